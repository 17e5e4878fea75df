"""Where state lies: switches, host memory and NVMe, what is held once."""
