"""Seals: written, kept in host memory or on disk, copied to other nodes."""
