"""What PlexRL's policies (§6.3) share: where a job fits, and when one that waits will."""
