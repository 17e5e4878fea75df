"""Policies that exist to be compared with: what papers and peers do."""
