"""State between device memory, host memory and NVMe."""
