"""The NVMe tier: the format of state files, and how they are read and written at disk speed."""
