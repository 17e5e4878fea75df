"""Layouts: how a deployment's work and tensors are spread over its ranks, as index arithmetic.

`split` cuts work over the data-parallel replicas, and `merge` puts the results together again;
`contract.kinds` says how each kind of operation is cut and merged.

Tensors are spread as Megatron-core, FSDP2 and ring attention do it: each function says which
indices of a whole tensor's dim a rank holds (`Held`), in the order in which the rank keeps them.
Nothing here touches a tensor; the adapters do.

Ranks are numbered tp fastest, then cp, dp, pp. Expert parallelism has no ranks of its own: for it,
the ranks of a pipeline stage are numbered ep fastest, then the replicas of the experts (Megatron's
order `tp-cp-ep-dp-pp` with whole experts).
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
T = TypeVar("T")

# --- Ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinates:
    """A rank's place along each axis of its layout."""

    dp: int
    pp: int
    cp: int
    tp: int
    ep: int
    edp: int
    """The replica of its experts that the rank belongs to."""


def check_layout(layout: Layout) -> None:
    """Check the sizes of a layout.

    Raises: CallerError: a size is below 1, or ep does not divide the ranks of a pipeline stage.
    """
    for axis in layout.__struct_fields__:
        if getattr(layout, axis) < 1:
            raise CallerError(
                f"{getattr(layout, axis)} is no number of ranks",
                field=f"layout.{axis}",
                remedy="use 1 or more",
            )
    if _stage_ranks(layout) % layout.ep:
        raise CallerError(
            f"{layout.ep} does not divide the {_stage_ranks(layout)} ranks of a pipeline stage",
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


def speakers(layout: Layout) -> list[int]:
    """For each replica the rank whose results count: one of the last stage, where logits are."""
    return [rank_of(layout, dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]


def _stage_ranks(layout: Layout) -> int:
    return layout.dp * layout.cp * layout.tp


# --- Work ----------------------------------------------------------------------------------------


def split(args: A, layout: Layout, rank: int) -> A:
    """The part of an operation that this rank does; one without data goes to all ranks alike."""
    return split_shared([args], layout, rank)[0]


def split_shared(requests: Sequence[A], layout: Layout, rank: int) -> list[A]:
    """The part that this rank does of each of several operations of one kind that run together."""
    part = coordinates(rank, layout).dp
    return kind_for(requests[0]).cut(requests, layout.dp, part)


def merge(kind: str, results: Sequence[Result], layout: Layout) -> Result:
    """The result of an operation, put together from the results of all its ranks.

    Where each replica has a part of the result, only the results of one rank a replica count. Where
    a kind has a single result, all ranks must agree on it.

    Args:   results: those of all ranks, in the order of ranks.
    Raises: InternalError: the ranks do not agree, or the results cannot be merged.
    """
    merge_parts = KINDS[kind].merge
    if merge_parts is not None:
        merged: Result = merge_parts([results[rank] for rank in speakers(layout)])
        return merged
    if any(result != results[0] for result in results):
        raise InternalError(f"the ranks do not agree on the result of {kind}: {results}")
    return results[0]


# --- Tensors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A run of a whole dim's indices, with padding after them."""

    indices: range
    length: int
    """Number of the indices and of the padding, which is kept as zeroes."""


@dataclass(frozen=True)
class Held:
    """The indices of a whole tensor's dim that a rank holds, in the rank's own order."""

    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Size of the rank's own dim, padding included."""
        return sum(piece.length for piece in self.pieces)

    @property
    def indices(self) -> list[int | None]:
        """For each index of the rank's own dim the index in the whole dim; None is padding."""
        held: list[int | None] = []
        for piece in self.pieces:
            held += [*piece.indices, *[None] * (piece.length - len(piece.indices))]
        return held

    def take(self, values: Sequence[T], padding: T) -> list[T]:
        """The rank's slice of a whole dim."""
        return [padding if i is None else values[i] for i in self.indices]


def whole(held: Sequence[Held], slices: Sequence[Sequence[T]], size: int) -> list[T]:
    """The whole dim, put together from the slices of ranks that together hold all of it."""
    placed: dict[int, T] = {}
    for each, values in zip(held, slices, strict=True):
        pairs = zip(each.indices, values, strict=True)
        placed |= {i: value for i, value in pairs if i is not None}
    return [placed[i] for i in range(size)]


def chunk(size: int, parts: int, part: int) -> range:
    """The indices of one part by torch.chunk's rule, by which FSDP2 shards dim 0.

    Each part has ceil(size / parts) indices, while there are any left.
    """
    return _run(size, -(-size // parts), part)


def parallel(size: int, parts: int, part: int) -> Held:
    """A dim cut into chunks that are padded to the first one's length.

    Under FSDP2 this is dim 0 of a parameter. Under tensor parallelism it is dim 0 of a
    column-parallel weight and of its bias, and dim 1 of a row-parallel weight, whose bias every
    rank holds whole.
    """
    return Held((Piece(chunk(size, parts, part), -(-size // parts)),))


def vocabulary(size: int, tp: int, rank: int, multiple: int = 128) -> Held:
    """Dim 0 of an embedding or a head, padded so that each rank has a multiple of `multiple`.

    The padding lies on the last ranks; its logits must be masked out.
    """
    each = -(-size // (tp * multiple)) * multiple
    return Held((Piece(_run(size, each, rank), each),))


def gated_mlp(size: int, tp: int, rank: int) -> Held:
    """Dim 0 of gate and up projections laid end to end (2 · size): the rank's part of each."""
    (gate,) = parallel(size, tp, rank).pieces
    up = range(size + gate.indices.start, size + gate.indices.stop)
    return Held((gate, Piece(up, gate.length)))


def fused_qkv(num_heads: int, num_kv_heads: int, head_size: int, tp: int, rank: int) -> Held:
    """Dim 0 of query, key and value projections laid end to end, in the order of Megatron.

    A rank keeps for each of its key-value heads the queries, the key and the value. With more ranks
    than key-value heads, several ranks hold such a head and share its queries.

    Raises: CallerError: the heads cannot be spread evenly.
    """
    if num_heads % tp:
        raise _uneven(f"{num_heads} heads", tp)
    if max(num_kv_heads, tp) % min(num_kv_heads, tp):
        raise _uneven(f"{num_kv_heads} key-value heads", tp)
    num_queries = num_heads // max(num_kv_heads, tp)
    pieces: list[Piece] = []

    def hold(first_head: int, count: int) -> None:
        size = count * head_size
        pieces.append(Piece(range(first_head * head_size, first_head * head_size + size), size))

    for i in range(max(1, num_kv_heads // tp)):
        group = rank * num_kv_heads // tp + i
        hold(rank * (num_heads // tp) + i * num_queries, num_queries)
        hold(num_heads + group, 1)
        hold(num_heads + num_kv_heads + group, 1)
    return Held(tuple(pieces))


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """The layers of a pipeline stage; where they divide unevenly the first stages have one more.

    Raises: CallerError: a stage would have no layer.
    """
    if pp > num_layers:
        raise CallerError(
            f"{num_layers} layers are too few for {pp} pipeline stages",
            field="layout.pp",
            remedy=f"use at most {num_layers}",
        )
    each, extra = divmod(num_layers, pp)
    start = stage * each + min(stage, extra)
    return range(start, start + each + (stage < extra))


def experts(num_experts: int, ep: int, rank: int) -> range:
    """The experts of the rank at this place along ep.

    Raises: CallerError: the experts cannot be spread evenly.
    """
    if num_experts % ep:
        raise CallerError(
            f"{num_experts} experts cannot be dealt out to {ep} ranks",
            field="layout.ep",
            remedy="use a divisor of the number of experts",
        )
    each = num_experts // ep
    return range(rank * each, (rank + 1) * each)


def context(num_tokens: int, cp: int, rank: int) -> Held:
    """The positions of a sequence that a rank holds under context parallelism.

    The sequence is cut into 2 · cp chunks, of which rank i holds i and 2 · cp − 1 − i, so that all
    ranks have the same amount of causal attention to do. The last chunks are padded.
    """
    if cp == 1:
        return parallel(num_tokens, 1, 0)
    each = -(-num_tokens // (2 * cp))
    mine = (rank, 2 * cp - 1 - rank)
    return Held(tuple(Piece(_run(num_tokens, each, i), each) for i in mine))


def _run(size: int, each: int, part: int) -> range:
    return range(min(size, part * each), min(size, (part + 1) * each))


def _uneven(what: str, tp: int) -> CallerError:
    return CallerError(
        f"{what} cannot be dealt out to {tp} ranks",
        field="layout.tp",
        remedy="use a tp that divides the heads, and divides or is a multiple of the kv heads",
    )
