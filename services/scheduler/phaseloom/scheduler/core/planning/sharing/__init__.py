"""Shared parts of PlexRL's policies (§6.3): where a job fits, and when a waiting one will fit."""
