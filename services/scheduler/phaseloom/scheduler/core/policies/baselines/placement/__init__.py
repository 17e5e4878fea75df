"""Placement baselines."""
