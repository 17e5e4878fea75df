"""The `fsdp` backend: training by torch's FSDP2."""
