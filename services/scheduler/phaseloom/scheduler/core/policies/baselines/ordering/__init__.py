"""Ordering policies to compare with."""
