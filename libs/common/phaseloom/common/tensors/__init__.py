"""Layouts of tensors, their split over ranks, hashing and naming. Nothing here imports torch."""
