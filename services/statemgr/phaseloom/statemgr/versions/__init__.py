"""Weights versions: written, served, fetched whole or by slices."""
