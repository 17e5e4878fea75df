"""Seals: how they are written, kept in host memory or on disk, and copied to other nodes."""
