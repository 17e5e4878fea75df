"""Whole tensors on rank 0, one at a time, from slices on all ranks."""

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
    """Yield whole tensors in host memory, with their names, on rank 0. Other ranks yield nothing.
    Collective.

    Args: slots: the whole tensors, in the order to yield them.
          holdings: each rank's slices. If several ranks hold a slice, the first of them sends it.
          local_slices: this rank's slices.
    """
    for slot in slots:
        name = slot.name
        tensor = torch.empty(slot.shape if rank == 0 else [0], dtype=TORCH_DTYPES[slot.dtype])
        # Every rank walks the owners in the same order, so sends and receives pair up.
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
    """Return the digest of the whole weights, on all ranks. See `whole_tensors`. Collective."""
    tensors = as_little_endian(whole_tensors(slots, holdings, local_slices, rank))
    hexadecimal = weights_sha256(tensors, dtype)
    if len(holdings) == 1:
        return hexadecimal
    digest = torch.frombuffer(bytearray.fromhex(hexadecimal), dtype=torch.uint8)
    dist.broadcast(digest, src=0)
    return bytes(digest.tolist()).hex()


def owned(holdings: Sequence[Holding], rank: int) -> set[str]:
    """Return the names of the slices that a rank holds and no earlier rank does."""
    before = {(name, box) for holding in holdings[:rank] for name, box in holding.items()}
    return {name for name, box in holdings[rank].items() if (name, box) not in before}


def _owners(holdings: Sequence[Holding], name: str) -> list[tuple[int, Box]]:
    """Return each non-empty slice of a tensor with the first rank that holds it."""
    first_rank: dict[Box, int] = {}
    for rank, holding in enumerate(holdings):
        box = holding.get(name)
        if box is not None and all(box.size):
            first_rank.setdefault(box, rank)
    return [(rank, box) for box, rank in first_rank.items()]


def inside(box: Box) -> tuple[slice, ...]:
    """Return the index of a slice in its whole tensor."""
    return tuple(
        slice(start, start + size) for start, size in zip(box.start, box.size, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
