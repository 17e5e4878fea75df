"""The scheduler's own code under a virtual clock."""
