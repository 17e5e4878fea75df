"""The long tail of `generate` operations over several replicas (WEAVE §4.3).

When every replica has only the tail of its samples left, all replicas stop, and a few of them
finish all remaining samples. Their prompts continue the generated tokens exactly.
Keys and values are computed again, so the last bits of log-probabilities may differ from those of
an uninterrupted call. The other replicas are idle then, and their devices become available. This
module counts open samples on both sides and assembles the results. Pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from phaseloom.common.contract.arrays import length
from phaseloom.common.contract.continuation import PARTIAL, continued, extended
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import merge_metrics
from phaseloom.common.contract.operations import DrawnTokens, Generate, GenerateResult


class TailMonitor:
    """Reports once when only the tail of this rank's share remains."""

    def __init__(
        self, requests: Sequence[Generate], tail_share: float, report: Callable[[], None]
    ) -> None:
        self._open = [len(args.prompts) * args.num_samples for args in requests]
        self._tail = tail_share * sum(self._open)
        self._report = report
        self._has_reported = False
        self._report_if_reached()

    def still_open(self, i: int, num_samples: int) -> None:
        """Record how many samples of a request have not ended."""
        self._open[i] = num_samples
        self._report_if_reached()

    def _report_if_reached(self) -> None:
        if not self._has_reported and sum(self._open) <= self._tail:
            self._has_reported = True
            self._report()


@dataclass(slots=True)
class TailBarrier:
    """The ranks of a running call that have reported that only their tail remains."""

    operation: OperationKey
    """The first operation of the call."""
    num_ranks: int
    is_stopping: bool = False
    _ranks: set[int] = field(default_factory=set)
    _all_reached: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, rank: int) -> None:
        self._ranks.add(rank)
        if len(self._ranks) == self.num_ranks:
            self._all_reached.set()

    async def wait_for_all(self) -> None:
        await self._all_reached.wait()


@dataclass(frozen=True, slots=True)
class Remainder:
    """The remaining samples of one `generate`, and its results until then."""

    args: Generate
    """A request for one sample of each prompt; each prompt continues an open sample."""
    partial: GenerateResult
    positions: list[tuple[int, int]]
    """The (prompt, sample) of each open sample."""

    def complete_with(self, remainder: GenerateResult) -> GenerateResult:
        """Combine the earlier results with those of the remaining samples."""
        sequences = [[*group] for group in self.partial.sequences]
        for (prompt, sample), (sequence,) in zip(self.positions, remainder.sequences, strict=True):
            sequences[prompt][sample] = extended(sequences[prompt][sample], sequence)
        metrics = merge_metrics([self.partial.metrics, remainder.metrics])
        return replace(self.partial, sequences=sequences, metrics=metrics)

    def with_position(self, tokens: DrawnTokens) -> DrawnTokens:
        """Translate tokens drawn for `args` to their positions in the whole operation."""
        prompt, sample = self.positions[tokens.prompt]
        num_known = length(self.partial.sequences[prompt][sample].tokens)
        return replace(tokens, prompt=prompt, sample=sample, offset=num_known + tokens.offset)


def remainder_of(args: Generate, partial: GenerateResult) -> Remainder | None:
    """The remaining samples of a stopped `generate`; None: none remain."""
    positions = [
        (prompt, sample)
        for prompt, group in enumerate(partial.sequences)
        for sample, sequence in enumerate(group)
        if sequence.stop_reason == PARTIAL
    ]
    if not positions:
        return None
    prompts = [
        continued(args.prompts[prompt], partial.sequences[prompt][sample], sample)
        for prompt, sample in positions
    ]
    remainder = Generate(prompts, args.sampling, stream=args.stream, weights=args.weights)
    return Remainder(remainder, partial, positions)
