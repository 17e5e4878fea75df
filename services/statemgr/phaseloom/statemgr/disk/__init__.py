"""The NVMe tier's bytes: how files are written and read as fast as their disk allows."""
