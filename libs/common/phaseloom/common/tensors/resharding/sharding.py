"""Sharding: the part of a parameter that each rank of a deployment holds, as pure arithmetic.

A parameter's rule cuts it over the tensor-parallel ranks. Where the replicas of such a rank are
sharded too (FSDP), the rank's piece is cut over them by rows, on dim 0. The pieces that result are
*shards*. All ranks that hold a shard are replicas of one another.

Parameters have the names and the whole shapes that both deployments agree on. A rank may keep a dim
in another order than the whole parameter does (`phaseloom.common.tensors.layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import (
    Held,
    Piece,
    check_layout,
    chunk,
    experts,
    fused_qkv,
    gated_mlp,
    parallel,
    stage_layers,
    vocabulary,
)

_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool"), 1),
}


def item_bytes(dtype: str) -> int:
    """The size of one element of a dtype.

    Raises: CallerError: no weight has this dtype.
    """
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        raise CallerError(
            f"{dtype!r} is no dtype of weights", field="dtype", remedy=f"use one of {_ITEM_BYTES}"
        ) from None


# --- How tensor parallelism cuts -----------------------------------------------------------------


@dataclass(frozen=True)
class Along:
    """A dim cut into equal runs: dim 0 of a column-parallel weight, dim 1 of a row-parallel one."""

    dim: int

    def held(self, size: int, parts: int, part: int) -> Held:
        return parallel(size, parts, part)


@dataclass(frozen=True)
class Vocabulary:
    """The rows of an embedding or a head, padded so that each rank has a multiple of `multiple`."""

    multiple: int = 128
    dim: int = 0

    def held(self, size: int, parts: int, part: int) -> Held:
        return vocabulary(size, parts, part, self.multiple)


@dataclass(frozen=True)
class GatedMlp:
    """Gate and up projections, end to end: each rank keeps its part of each."""

    dim: int = 0

    def held(self, size: int, parts: int, part: int) -> Held:
        return gated_mlp(size // 2, parts, part)


@dataclass(frozen=True)
class FusedQkv:
    """Query, key and value projections, end to end: each rank keeps them by key-value heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dim: int = 0

    def held(self, size: int, parts: int, part: int) -> Held:
        return fused_qkv(self.num_heads, self.num_kv_heads, self.head_size, parts, part)


Rule = Along | Vocabulary | GatedMlp | FusedQkv | None
"""How tensor parallelism cuts a parameter; None: every rank keeps the whole parameter."""


class End(StrEnum):
    """The pipeline stages that hold a parameter which belongs to no layer."""

    FIRST = "first"
    LAST = "last"
    BOTH = "both"
    """The first and the last stage, as for an embedding that is also the head."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model, with its whole shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | End
    rule: Rule = None
    expert: int | None = None
    """The number of the expert, within the layer, that the parameter belongs to; None: to none."""


@dataclass(frozen=True)
class Shard:
    """The piece of a parameter that a rank holds: for each dim the indices, in the rank's order."""

    dims: tuple[Held, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor, padding included."""
        return tuple(held.length for held in self.dims)


@dataclass(frozen=True)
class Sharding:
    """How a deployment spreads its parameters over its ranks.

    Ranks are numbered as in `phaseloom.common.tensors.layouts`. For the parameters of experts,
    `expert_tp` runs fastest within a stage, then ep, then the replicas of the experts.
    """

    layout: Layout
    num_layers: int
    num_experts: int = 0
    """Number of experts in each layer that has any."""
    expert_tp: int = 1
    """Number of parts into which each expert is cut, by the rules of its parameters."""
    fsdp: int = 1
    """How many of the dp · cp replicas share the rows of a parameter; the other replicas repeat
    these."""
    expert_fsdp: int = 1
    """How many replicas of an expert share the rows of each of its parameters."""
    rules: Mapping[Rule, Rule] = field(default_factory=dict)
    """Exceptions from the parameters' own rules: {a parameter's rule: the rule that holds here}."""

    def check(self) -> None:
        """Check that each size divides the ranks that it cuts.

        Raises: CallerError: a size does not.
        """
        check_layout(self.layout)
        layout, replicas = self.layout, self.layout.dp * self.layout.cp
        cut = layout.ep * self.expert_tp
        for name, size, of in (
            ("fsdp", self.fsdp, replicas),
            ("expert_tp", cut, self.stage_ranks),
            ("expert_fsdp", self.expert_fsdp, max(1, self.stage_ranks // max(1, cut))),
        ):
            if size < 1 or of % size:
                raise CallerError(
                    f"{size} does not divide the {of} ranks that it cuts",
                    field=f"sharding.{name}",
                    remedy=f"take a divisor of {of}",
                )

    @property
    def stage_ranks(self) -> int:
        return self.layout.dp * self.layout.cp * self.layout.tp

    def rule_of(self, parameter: Parameter) -> Rule:
        return self.rules.get(parameter.rule, parameter.rule)

    def cuts(self, *, is_expert: bool) -> tuple[int, int]:
        """The number of parts into which a rule cuts, and into how many each is cut by rows."""
        if is_expert:
            return self.expert_tp, self.expert_fsdp
        return self.layout.tp, self.fsdp

    def stages(self, parameter: Parameter) -> tuple[int, ...]:
        last = self.layout.pp - 1
        match parameter.layer:
            case End.FIRST:
                return (0,)
            case End.LAST:
                return (last,)
            case End.BOTH:
                return (0, last) if last else (0,)
            case layer:
                return (self._stage_of(layer),)

    def place(self, parameter: Parameter) -> tuple[tuple[int, ...], int | None]:
        """The pipeline stages that hold a parameter, and its expert's place along ep.

        The latter is None where the parameter belongs to no expert.

        Raises: CallerError: there is no such expert or layer.
        """
        if parameter.expert is None:
            return self.stages(parameter), None
        if not 0 <= parameter.expert < self.num_experts:
            raise CallerError(
                f"{parameter.name} is of expert {parameter.expert} of {self.num_experts}",
                field="parameters",
                remedy=f"number experts from 0 to {self.num_experts - 1}",
            )
        each = len(experts(self.num_experts, self.layout.ep, 0))
        return self.stages(parameter), parameter.expert // each

    def ranks(self, stages: tuple[int, ...], ep: int | None) -> list[list[int]]:
        """The ranks that hold each shard of a parameter, in the order of `shards`.

        Args: stages, ep: the place of the parameter, as `place` returns it.
        """
        tp, fsdp = self.cuts(is_expert=ep is not None)
        found: list[list[int]] = [[] for _ in range(tp * fsdp)]
        for stage, within in product(stages, range(self.stage_ranks)):
            outer = within // tp
            if ep is not None:
                if outer % self.layout.ep != ep:
                    continue
                outer //= self.layout.ep
            found[outer % fsdp * tp + within % tp].append(stage * self.stage_ranks + within)
        return found

    def _stage_of(self, layer: int) -> int:
        for stage in range(self.layout.pp):
            if layer in stage_layers(self.num_layers, self.layout.pp, stage):
                return stage
        raise CallerError(
            f"layer {layer} of {self.num_layers}",
            field="parameters",
            remedy=f"number layers from 0 to {self.num_layers - 1}",
        )


def shards(shape: tuple[int, ...], rule: Rule, tp: int, fsdp: int) -> list[Shard]:
    """All shards of a parameter; the parts of the rule run fastest, then those of the rows.

    Args:   tp: the number of parts into which the rule cuts.
            fsdp: the number of parts into which the rows of each are cut.
    Raises: CallerError: the rule's dim is not there, or cannot be cut so.
    """
    if rule is not None and rule.dim >= len(shape):
        raise CallerError(
            f"a parameter of shape {shape} has no dim {rule.dim}",
            field="rule",
            remedy=f"cut one of its {len(shape)} dims",
        )
    if isinstance(rule, FusedQkv | GatedMlp) and shape[rule.dim] != _size(rule, shape[rule.dim]):
        raise CallerError(
            f"shape {shape} does not fit {rule}",
            field="rule",
            remedy="give the rule the sizes of this parameter's parts",
        )
    cut: list[Shard] = []
    for row, part in product(range(fsdp), range(tp)):
        dims = [_whole(size) for size in shape]
        if rule is not None:
            dims[rule.dim] = rule.held(shape[rule.dim], tp, part)
        if dims:
            dims[0] = _within(dims[0], chunk(dims[0].length, fsdp, row))
        cut.append(Shard(tuple(dims)))
    return cut


def num_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _size(rule: FusedQkv | GatedMlp, size: int) -> int:
    if isinstance(rule, GatedMlp):
        return size - size % 2
    return (rule.num_heads + 2 * rule.num_kv_heads) * rule.head_size


def _whole(size: int) -> Held:
    return Held((Piece(range(size), size),))


def _within(held: Held, run: range) -> Held:
    """The part of a held dim that lies in a run of its positions, padding included."""
    pieces: list[Piece] = []
    at = 0
    for piece in held.pieces:
        start, stop = max(run.start, at) - at, min(run.stop, at + piece.length) - at
        if start < stop:
            pieces.append(Piece(piece.indices[start:stop], stop - start))
        at += piece.length
    return Held(tuple(pieces))
