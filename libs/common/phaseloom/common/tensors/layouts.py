"""Layouts: how a deployment's work is spread over its ranks, as index arithmetic.

`split` divides work among the data-parallel replicas, and `merge` combines the results.
`contract.kinds` defines how each kind of operation is split and merged. The backend decides which
slice of a tensor each rank has (`phaseloom.common.tensors.resharding`).

Rank numbers count tp fastest, then cp, dp, pp. Expert parallelism has no ranks of its own: it
numbers the ranks of a pipeline stage ep fastest, then by replica of the experts (Megatron's order
`tp-cp-ep-dp-pp` with whole experts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from phaseloom.common.contract.errors import CallerError, InternalError
from phaseloom.common.contract.kinds import KINDS, kind_for
from phaseloom.common.contract.operations import Args, Result
from phaseloom.common.contract.specs import Layout

A = TypeVar("A", bound=Args)

# --- Ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinates:
    """A rank's position along each axis of its layout."""

    dp: int
    pp: int
    cp: int
    tp: int
    ep: int
    edp: int
    """The replica of its experts that the rank belongs to."""


def check_layout(layout: Layout) -> None:
    """Check the sizes of a layout.

    Raises: CallerError: a size is below 1, or ep does not divide the number of ranks of a pipeline
            stage.
    """
    for axis in layout.__struct_fields__:
        if getattr(layout, axis) < 1:
            raise CallerError(
                f"{axis} must be at least 1, got {getattr(layout, axis)}",
                field=f"layout.{axis}",
                remedy="use 1 or more",
            )
    if _stage_ranks(layout) % layout.ep:
        raise CallerError(
            f"ep must divide the {_stage_ranks(layout)} ranks of a pipeline stage, got {layout.ep}",
            field="layout.ep",
            remedy="use a divisor of dp * cp * tp",
        )


def coordinates(rank: int, layout: Layout) -> Coordinates:
    within, pp = rank % _stage_ranks(layout), rank // _stage_ranks(layout)
    return Coordinates(
        dp=within // (layout.tp * layout.cp),
        pp=pp,
        cp=within // layout.tp % layout.cp,
        tp=within % layout.tp,
        ep=within % layout.ep,
        edp=within // layout.ep,
    )


def rank_of(layout: Layout, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
    return ((pp * layout.dp + dp) * layout.cp + cp) * layout.tp + tp


def reporting_ranks(layout: Layout) -> list[int]:
    """Return one rank per replica whose results count: a rank of the last stage, which has the
    logits."""
    return [rank_of(layout, dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]


def _stage_ranks(layout: Layout) -> int:
    return layout.dp * layout.cp * layout.tp


# --- Work ----------------------------------------------------------------------------------------


def split(args: A, layout: Layout, rank: int) -> A:
    """Return the part of an operation that this rank runs. Operations without batch data go to all
    ranks unchanged."""
    return split_shared([args], layout, rank)[0]


def split_shared(requests: Sequence[A], layout: Layout, rank: int) -> list[A]:
    """Return the parts that this rank runs of several operations of one kind that run together."""
    part = coordinates(rank, layout).dp
    return kind_for(requests[0]).split(requests, layout.dp, part)


def item_ranges(requests: Sequence[A], layout: Layout, rank: int) -> list[range]:
    """Return, for each operation, the index range of the items that `split_shared` assigns to this
    rank."""
    return kind_for(requests[0]).item_ranges(requests, layout.dp, coordinates(rank, layout).dp)


def merge(kind: str, results: Sequence[Result], layout: Layout) -> Result:
    """Combine the results of all ranks into the result of an operation.

    If each replica has a part of the result, only one rank's result per replica counts. If the kind
    has a single result, all ranks must agree on it.

    Args:   results: the results of all ranks, in rank order.
    Raises: InternalError: the ranks disagree, or the results cannot be merged.
    """
    merge_parts = KINDS[kind].merge
    if merge_parts is not None:
        merged: Result = merge_parts([results[rank] for rank in reporting_ranks(layout)])
        return merged
    # A single result must not depend on the rank; a difference is a bug in the backend.
    if any(result != results[0] for result in results):
        raise InternalError(f"the ranks disagree on the result of {kind}: {results}")
    return results[0]


def chunk(size: int, parts: int, part: int) -> range:
    """Return the indices of one part by torch.chunk's rule, which FSDP2 uses to shard dim 0.

    Each part has ceil(size / parts) indices, as long as enough remain.
    """
    part_size = -(-size // parts)
    return range(min(size, part * part_size), min(size, (part + 1) * part_size))
