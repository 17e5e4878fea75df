"""Building blocks of PlexRL's policies (§6.3): where a job fits, and when a waiting job will
fit."""
