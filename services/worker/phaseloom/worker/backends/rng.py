"""Uniform draws as pure functions of (seed, sample, position).

The generator is counter-based and has no state. A token's draw therefore does not depend on its
batch, on earlier tokens, or on the process that computes it. The mixer is splitmix64's finaliser,
chained over the three counters.

Source: Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Uint64s = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: Uint64s) -> Uint64s:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(
    seeds: npt.ArrayLike, samples: npt.ArrayLike, positions: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Return draws in [0, 1), of the shape to which the arguments broadcast.

    They are multiples of 2^-32. With 32 bits, draw × total < total holds exactly in float64, which
    inverting a CDF relies on.

    Args: seeds: in [0, 2^64), see `wrapped`.
    """
    state = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
    state = _mix((state ^ np.asarray(samples, dtype=np.uint64)) + _GOLDEN)
    state = _mix((state ^ np.asarray(positions, dtype=np.uint64)) + _GOLDEN)
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def wrapped(seeds: list[int]) -> Uint64s:
    """Return seeds modulo 2^64, so that any integer can be a seed."""
    return np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)


def uniforms(
    seeds: list[int],
    num_samples: int,
    num_positions: int,
    first_samples: Sequence[int] = (0,),
    first_positions: Sequence[int] = (0,),
) -> npt.NDArray[np.float64]:
    """Return the draws of whole sequences, shape (len(seeds), num_samples, num_positions).

    Args: first_samples, first_positions: first value of each counter, for each seed or for all.
    """
    samples_PK = _counted(first_samples, num_samples)
    positions_PI = _counted(first_positions, num_positions)
    return uniform(wrapped(seeds)[:, None, None], samples_PK[:, :, None], positions_PI[:, None])


def _counted(first: Sequence[int], num: int) -> Uint64s:
    firsts: Uint64s = np.array(first, dtype=np.uint64)
    offsets: Uint64s = np.arange(num, dtype=np.uint64)
    return firsts[:, None] + offsets
