"""The cost of planning a weight sync for a model like Qwen3-235B, with some 37,000 parameters.

The weights go from TP 8, PP 12, EP 8 and two replicas (192 ranks) to eight replicas of TP 4 (32
ranks) on another site. Figures are CPU seconds of one core, the median over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

from loadtest.records import Record
from phaseloom.common.tensors.resharding import Box, Holding, Tensor, fetches, parts_of

NUM_LAYERS = 94
NUM_EXPERTS = 128
_HIDDEN, _EXPERT, _VOCABULARY = 4096, 1536, 151936
_NUM_HEADS, _NUM_KV_HEADS, _HEAD = 64, 4, 128
_AIM_S = 2.0
_LIMIT = "the aim: two seconds of one core"

_Cut = tuple[str, tuple[int, ...], int | None, int]
"""A tensor: its name, shape, the dim that tensor parallelism cuts, and into how many at most."""


def tensors() -> dict[str, Tensor]:
    cuts = [*_ends(), *(cut for layer in range(NUM_LAYERS) for cut in _layer(layer))]
    cuts += [cut for i in range(NUM_LAYERS) for e in range(NUM_EXPERTS) for cut in _expert(i, e)]
    return {name: Tensor(shape, "bfloat16") for name, shape, _, _ in cuts}


def source() -> list[dict[str, Box]]:
    """The holdings of 192 ranks: 12 stages of two replicas of TP 8; 8 groups of whole experts."""
    each = NUM_EXPERTS // 8
    held = []
    for rank in range(192):
        stage, part = rank // 16, rank % 8
        layers = range(stage * NUM_LAYERS // 12, (stage + 1) * NUM_LAYERS // 12)
        mine = _cut([cut for layer in layers for cut in _layer(layer)], 8, part)
        if stage in (0, 11):
            mine |= _cut([*_ends()][slice(0, 1) if stage == 0 else slice(1, 3)], 8, part)
        experts = range(part * each, (part + 1) * each)
        held.append(mine | _cut([c for i in layers for e in experts for c in _expert(i, e)], 1, 0))
    return held


def target() -> dict[int, Holding]:
    """The holdings of the first node's ranks: two replicas of TP 4, which cuts experts too."""
    layers = range(NUM_LAYERS)
    cuts = [*_ends(), *(cut for layer in layers for cut in _layer(layer))]
    cuts += [cut for i in layers for e in range(NUM_EXPERTS) for cut in _expert(i, e)]
    replica = [_cut(cuts, 4, part) for part in range(4)]
    return dict(enumerate(replica * 2))


def measure(num_rounds: int) -> list[Record]:
    """Measure the plan of what one node fetches."""
    model, ranks = tensors(), target()
    held = source()
    parts = [held[shared[0]] for shared in parts_of(held)]
    spent_s = median(_cpu_s(lambda: fetches(model, parts, ranks)) for _ in range(num_rounds))
    return [
        Record(
            name="plan_235b_one_node",
            value=round(spent_s, 3),
            unit="s",
            limit=_LIMIT,
            limit_value=_AIM_S,
            ratio=round(spent_s / _AIM_S, 3),
            aim="≤ 1",
        )
    ]


def _cpu_s(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def _cut(cuts: list[_Cut], tp: int, rank: int) -> dict[str, Box]:
    """What a rank of tensor parallelism holds of these tensors."""
    boxes = {}
    for name, shape, dim, most in cuts:
        start, size = [0] * len(shape), list(shape)
        if dim is not None:
            parts = min(tp, most)
            size[dim] = shape[dim] // parts
            start[dim] = rank * parts // tp * size[dim]
        boxes[name] = Box(tuple(start), tuple(size))
    return boxes


def _ends() -> Iterator[_Cut]:
    yield "embedding", (_VOCABULARY, _HIDDEN), 0, _VOCABULARY
    yield "norm", (_HIDDEN,), None, 1
    yield "head", (_VOCABULARY, _HIDDEN), 0, _VOCABULARY


def _layer(layer: int) -> Iterator[_Cut]:
    yield f"{layer}.q", (_NUM_HEADS * _HEAD, _HIDDEN), 0, _NUM_HEADS
    yield f"{layer}.k", (_NUM_KV_HEADS * _HEAD, _HIDDEN), 0, _NUM_KV_HEADS
    yield f"{layer}.v", (_NUM_KV_HEADS * _HEAD, _HIDDEN), 0, _NUM_KV_HEADS
    yield f"{layer}.out", (_HIDDEN, _NUM_HEADS * _HEAD), 1, _NUM_HEADS
    yield f"{layer}.router", (NUM_EXPERTS, _HIDDEN), None, 1
    yield f"{layer}.norm1", (_HIDDEN,), None, 1
    yield f"{layer}.norm2", (_HIDDEN,), None, 1
    yield f"{layer}.q_norm", (_HEAD,), None, 1
    yield f"{layer}.k_norm", (_HEAD,), None, 1


def _expert(layer: int, expert: int) -> Iterator[_Cut]:
    yield f"{layer}.{expert}.gate", (_EXPERT, _HIDDEN), 0, _EXPERT
    yield f"{layer}.{expert}.up", (_EXPERT, _HIDDEN), 0, _EXPERT
    yield f"{layer}.{expert}.down", (_HIDDEN, _EXPERT), 1, _EXPERT
