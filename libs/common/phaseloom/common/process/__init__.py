"""How a process of ours starts, reads its configuration, retries, fails and stops."""
