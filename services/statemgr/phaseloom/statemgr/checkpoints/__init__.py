"""Checkpoints: cut from ranks, written and read as safetensors of whole tensors."""
