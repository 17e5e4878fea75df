"""Models of small arrays, and what each rank of a layout holds of them, index by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from phaseloom.common.tensors.resharding import Parameter, Shard, Sharding, shards

Array = np.ndarray[Any, Any]
DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8}


def local(whole: Array, shard: Shard) -> Array:
    """What a rank holds of an array, taken index by index."""
    for dim, held in enumerate(shard.dims):
        indices = [0 if i is None else i for i in held.indices]
        whole = np.take(whole, indices, axis=dim)
        padding = [i is None for i in held.indices]
        whole[(slice(None),) * dim + (np.array(padding, dtype=bool),)] = 0
    return whole


def holdings(parameter: Parameter, sharding: Sharding) -> dict[int, Shard]:
    """By rank."""
    cuts = sharding.cuts(is_expert=parameter.expert is not None)
    cut = shards(parameter.shape, sharding.rule_of(parameter), *cuts)
    ranks = sharding.ranks(*sharding.place(parameter))
    return {rank: shard for shard, holders in zip(cut, ranks, strict=True) for rank in holders}


def whole(parameter: Parameter, number: int) -> Array:
    """Neighbours differ in every byte, and no byte is zero, which padding is."""
    dtype = np.dtype(DTYPES[parameter.dtype])
    size = int(np.prod(parameter.shape)) * dtype.itemsize
    raw = (np.arange(size) + 7 * number) % 251 + 1
    return raw.astype(np.uint8).view(dtype).reshape(parameter.shape)


def tensors(parameters: list[Parameter], sharding: Sharding) -> dict[tuple[int, int], Array]:
    """(parameter, rank) → what it holds."""
    return {
        (number, rank): local(whole(parameter, number), shard)
        for number, parameter in enumerate(parameters)
        for rank, shard in holdings(parameter, sharding).items()
    }
