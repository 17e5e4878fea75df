"""Ordering baselines."""
