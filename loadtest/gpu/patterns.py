"""Patterns that the proofs write and find again: 64-bit words made of seed and place."""

from __future__ import annotations

import torch

_FACTOR = -7046029254386353131
"""An odd number, so that no two words of a pattern are equal: 2⁶⁴ over the golden ratio, signed."""
_CHUNK_WORDS = 8 * 1024 * 1024


def fill(memory: torch.Tensor, seed: int) -> None:
    """Write the pattern of a seed. Args: memory: a multiple of 8 bytes."""
    words = memory.view(torch.int64)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        part.copy_(_pattern(start, part.numel(), seed, memory.device))


def num_differing(memory: torch.Tensor, seed: int) -> int:
    """The number of words that differ from the pattern that `fill` wrote."""
    words = memory.view(torch.int64)
    count = 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        expected = _pattern(start, part.numel(), seed, memory.device)
        count += int((part != expected).sum().item())
    return count


def _pattern(start: int, num_words: int, seed: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(start, start + num_words, dtype=torch.int64, device=device)
    return (places + (seed << 40)) * _FACTOR
