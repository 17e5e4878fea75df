"""Checkpoints: snapshots of ranks' states, written and read as safetensors of whole tensors."""
