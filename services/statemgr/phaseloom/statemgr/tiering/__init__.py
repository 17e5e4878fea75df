"""Movement of state between the three tiers: device memory, host memory and NVMe."""
