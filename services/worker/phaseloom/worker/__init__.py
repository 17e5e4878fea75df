"""The worker service: an agent for each node, and one process for each device and deployment."""
