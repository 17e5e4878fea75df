"""How tensors are laid out, cut over ranks, hashed and named; nothing here imports torch."""
