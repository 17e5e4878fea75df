"""Weights versions: made by policies, read by ranks, fetched from disk and other nodes."""
