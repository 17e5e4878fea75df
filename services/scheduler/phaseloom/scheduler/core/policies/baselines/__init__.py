"""Baselines: policies from papers and peer systems, for comparison."""
