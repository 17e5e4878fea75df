"""The cost of planning a weight sync for a model like Qwen3-235B, with some 37,000 parameters.

The weights go from TP 8, PP 12, EP 8 and two replicas (192 ranks) to eight replicas of TP 4 (32
ranks) on another site. Figures are CPU seconds of one core, the median over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from loadtest.records import Record
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.resharding import (
    Along,
    End,
    FusedQkv,
    Parameter,
    Rule,
    Sharding,
    Vocabulary,
    node_fetches,
    plan,
)

NUM_LAYERS = 94
NUM_EXPERTS = 128
_HIDDEN, _EXPERT, _VOCABULARY = 4096, 1536, 151936
_NUM_HEADS, _NUM_KV_HEADS, _HEAD = 64, 4, 128
_AIM_S = 2.0
_LIMIT = "the aim: two seconds of one core"

SOURCE = Sharding(Layout(dp=2, tp=8, pp=12, ep=8), NUM_LAYERS, NUM_EXPERTS)
TARGET = Sharding(Layout(dp=8, tp=4), NUM_LAYERS, NUM_EXPERTS, expert_tp=4)
ONE_NODE = range(8)
"""The target ranks that are on the first node."""


def parameters() -> list[Parameter]:
    found = [
        _parameter("embedding", (_VOCABULARY, _HIDDEN), End.FIRST, Vocabulary()),
        _parameter("norm", (_HIDDEN,), End.LAST),
        _parameter("head", (_VOCABULARY, _HIDDEN), End.LAST, Vocabulary()),
    ]
    for layer in range(NUM_LAYERS):
        found += _layer(layer)
    return found


def measure(num_rounds: int) -> list[Record]:
    """Measure the plan, and from it the list of what one node fetches."""
    model = parameters()
    made = plan(model, SOURCE, TARGET)
    return [
        _record("plan_235b", num_rounds, lambda: plan(model, SOURCE, TARGET)),
        _record("plan_235b_one_node", num_rounds, lambda: node_fetches(made, ONE_NODE)),
    ]


def _record(name: str, num_rounds: int, work: Callable[[], object]) -> Record:
    spent_s = median(_cpu_s(work) for _ in range(num_rounds))
    return Record(
        name=name,
        value=round(spent_s, 3),
        unit="s",
        limit=_LIMIT,
        limit_value=_AIM_S,
        ratio=round(spent_s / _AIM_S, 3),
        aim="≤ 1",
    )


def _cpu_s(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def _layer(layer: int) -> list[Parameter]:
    qkv = FusedQkv(_NUM_HEADS, _NUM_KV_HEADS, _HEAD)
    rows = (_NUM_HEADS + 2 * _NUM_KV_HEADS) * _HEAD
    found = [
        _parameter(f"{layer}.qkv", (rows, _HIDDEN), layer, qkv),
        _parameter(f"{layer}.out", (_HIDDEN, _NUM_HEADS * _HEAD), layer, Along(1)),
        _parameter(f"{layer}.router", (NUM_EXPERTS, _HIDDEN), layer),
        _parameter(f"{layer}.norm1", (_HIDDEN,), layer),
        _parameter(f"{layer}.norm2", (_HIDDEN,), layer),
        _parameter(f"{layer}.q_norm", (_HEAD,), layer),
        _parameter(f"{layer}.k_norm", (_HEAD,), layer),
    ]
    for expert in range(NUM_EXPERTS):
        name = f"{layer}.{expert}"
        found += [
            _parameter(f"{name}.gate", (_EXPERT, _HIDDEN), layer, Along(0), expert),
            _parameter(f"{name}.up", (_EXPERT, _HIDDEN), layer, Along(0), expert),
            _parameter(f"{name}.down", (_HIDDEN, _EXPERT), layer, Along(1), expert),
        ]
    return found


def _parameter(
    name: str,
    shape: tuple[int, ...],
    layer: int | End,
    rule: Rule = None,
    expert: int | None = None,
) -> Parameter:
    return Parameter(name, shape, "bfloat16", layer, rule, expert)
