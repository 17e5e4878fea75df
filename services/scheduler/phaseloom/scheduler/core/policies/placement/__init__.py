"""Placement policies for production: which nodes a job gets."""
