"""The cost of planning a weight sync for models like Qwen3-30B-A3B and Qwen3-235B, with some 19,000
and 37,000 parameters, from Megatron's ranks to one node of a vLLM on another site.

Figures are CPU seconds of one core, the median over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from loadtest.records import Record
from phaseloom.common.tensors.resharding import Box, Holding, Tensor, parts_of, plan_fetches

_VOCABULARY = 151936
_AIM_S = 2.0
_LIMIT = "the aim: two seconds of one core"

_Cut = tuple[str, tuple[int, ...], int | None, int]
"""A tensor: its name, shape, the dim that tensor parallelism cuts, and into how many at most."""


@dataclass(frozen=True)
class Plan:
    """A model of experts, the layout of its trainer, and that of its sampler."""

    name: str
    num_layers: int
    hidden: int
    expert: int
    """The intermediate size of an expert."""
    num_heads: int
    tp: int
    pp: int
    ep: int
    """Groups that experts are spread over, each with whole ones."""
    replicas: int
    """Data-parallel replicas of the trainer."""
    num_experts: int = 128
    num_kv_heads: int = 4
    head: int = 128
    sampler_tp: int = 4
    sampler_replicas: int = 2
    """Replicas of the sampler on the node that is planned for; `sampler_tp` cuts experts, too."""

    def tensors(self) -> dict[str, Tensor]:
        return {name: Tensor(shape, "bfloat16") for name, shape, _, _ in self._cuts()}

    def source(self) -> list[dict[str, Box]]:
        """The holdings of the trainer's ranks, numbered as Megatron does."""
        in_stage, each = self.tp * self.replicas, self.num_experts // self.ep
        held = []
        for rank in range(in_stage * self.pp):
            stage, part, group = rank // in_stage, rank % self.tp, rank % self.ep
            first, last = (at * self.num_layers // self.pp for at in (stage, stage + 1))
            mine = _cut([c for i in range(first, last) for c in self._layer(i)], self.tp, part)
            ends = [*self._ends()]
            if stage == 0:
                mine |= _cut(ends[:1], self.tp, part)
            if stage == self.pp - 1:
                mine |= _cut(ends[1:], self.tp, part)
            experts = range(group * each, (group + 1) * each)
            whole = [c for i in range(first, last) for e in experts for c in self._expert(i, e)]
            held.append(mine | _cut(whole, 1, 0))
        return held

    def target(self) -> dict[int, Holding]:
        """The holdings of the node's ranks."""
        cuts = [*self._cuts()]
        replica = [_cut(cuts, self.sampler_tp, part) for part in range(self.sampler_tp)]
        return dict(enumerate(replica * self.sampler_replicas))

    def _cuts(self) -> Iterator[_Cut]:
        yield from self._ends()
        for layer in range(self.num_layers):
            yield from self._layer(layer)
            for expert in range(self.num_experts):
                yield from self._expert(layer, expert)

    def _ends(self) -> Iterator[_Cut]:
        yield "embedding", (_VOCABULARY, self.hidden), 0, _VOCABULARY
        yield "norm", (self.hidden,), None, 1
        yield "head", (_VOCABULARY, self.hidden), 0, _VOCABULARY

    def _layer(self, layer: int) -> Iterator[_Cut]:
        queries, keys = self.num_heads * self.head, self.num_kv_heads * self.head
        yield f"{layer}.q", (queries, self.hidden), 0, self.num_heads
        yield f"{layer}.k", (keys, self.hidden), 0, self.num_kv_heads
        yield f"{layer}.v", (keys, self.hidden), 0, self.num_kv_heads
        yield f"{layer}.out", (self.hidden, queries), 1, self.num_heads
        yield f"{layer}.router", (self.num_experts, self.hidden), None, 1
        yield f"{layer}.norm1", (self.hidden,), None, 1
        yield f"{layer}.norm2", (self.hidden,), None, 1
        yield f"{layer}.q_norm", (self.head,), None, 1
        yield f"{layer}.k_norm", (self.head,), None, 1

    def _expert(self, layer: int, expert: int) -> Iterator[_Cut]:
        yield f"{layer}.{expert}.gate", (self.expert, self.hidden), 0, self.expert
        yield f"{layer}.{expert}.up", (self.expert, self.hidden), 0, self.expert
        yield f"{layer}.{expert}.down", (self.hidden, self.expert), 1, self.expert


PLANS = [
    Plan("30b_a3b", 48, 2048, 768, 32, tp=4, pp=2, ep=8, replicas=2),
    Plan("235b", 94, 4096, 1536, 64, tp=8, pp=12, ep=8, replicas=2),
]


def measure(num_rounds: int) -> list[Record]:
    """Measure the plans of what one node fetches."""
    return [_measured(plan, num_rounds) for plan in PLANS]


def _measured(plan: Plan, num_rounds: int) -> Record:
    model, ranks, held = plan.tensors(), plan.target(), plan.source()
    parts = [held[shared[0]] for shared in parts_of(held)]
    spent_s = median(_cpu_s(lambda: plan_fetches(model, parts, ranks)) for _ in range(num_rounds))
    return Record(
        name=f"plan_{plan.name}_one_node",
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
