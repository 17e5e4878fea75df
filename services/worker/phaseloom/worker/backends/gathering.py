"""Whole tensors of a model whose ranks hold slices of them, one at a time, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Box, Holding
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.model import TORCH_DTYPES, as_little_endian


def whole_tensors(
    slots: Sequence[TensorSlot],
    holdings: Sequence[Holding],
    local_slices: Mapping[str, torch.Tensor],
    rank: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in host memory, by name, on rank 0; nothing on any other rank. Collective.

    Args: slots: the whole tensors, in the order in which they come.
          holdings: the slice of each tensor that every rank holds; where several hold one, the
              first of them sends it.
          own: this rank's slices.
    """
    for slot in slots:
        name = slot.name
        tensor = torch.empty(slot.shape if rank == 0 else [0], dtype=TORCH_DTYPES[slot.dtype])
        for owner, box in _owners(holdings, name):
            if owner == rank:
                local = local_slices[name].detach().cpu().contiguous()
                if rank:
                    dist.send(_bytes(local), dst=0)
                else:
                    tensor[inside(box)] = local
            elif rank == 0:
                received = torch.empty(box.size, dtype=tensor.dtype)
                dist.recv(_bytes(received), src=owner)
                tensor[inside(box)] = received
        if rank == 0:
            yield name, tensor


def weights_digest(
    slots: Sequence[TensorSlot],
    holdings: Sequence[Holding],
    local_slices: Mapping[str, torch.Tensor],
    rank: int,
    dtype: str,
) -> str:
    """The digest of the whole weights, on all ranks; see `whole_tensors`. Collective."""
    tensors = as_little_endian(whole_tensors(slots, holdings, local_slices, rank))
    hexadecimal = weights_sha256(tensors, dtype)
    if len(holdings) == 1:
        return hexadecimal
    digest = torch.frombuffer(bytearray.fromhex(hexadecimal), dtype=torch.uint8)
    dist.broadcast(digest, src=0)
    return bytes(digest.tolist()).hex()


def owned(holdings: Sequence[Holding], rank: int) -> set[str]:
    """The names of the slices that a rank holds and no rank before it."""
    before = {(name, box) for holding in holdings[:rank] for name, box in holding.items()}
    return {name for name, box in holdings[rank].items() if (name, box) not in before}


def _owners(holdings: Sequence[Holding], name: str) -> list[tuple[int, Box]]:
    """The first rank that holds each slice of a tensor, of those that are not empty."""
    first_rank: dict[Box, int] = {}
    for rank, holding in enumerate(holdings):
        box = holding.get(name)
        if box is not None and all(box.size):
            first_rank.setdefault(box, rank)
    return [(rank, box) for box, rank in first_rank.items()]


def inside(box: Box) -> tuple[slice, ...]:
    """The index of a slice in its whole tensor."""
    return tuple(
        slice(start, start + size) for start, size in zip(box.start, box.size, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
