"""Placement policies that people run: which nodes a job is pinned to, and with whom it shares."""
