"""Layouts of tensors, their cutting over ranks, hashing and naming; nothing here imports torch."""
