"""The long tail of `generate` operations over several replicas (WEAVE §4.3).

When every replica has only the tail of its samples left, all replicas stop, and a few of them
finish all remaining samples. Their prompts continue the tokens generated so far, token for token.
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


class Tail:
    """Reports once when only the tail of this rank's share remains."""

    def __init__(
        self, requests: Sequence[Generate], tail_share: float, tell: Callable[[], None]
    ) -> None:
        self._open = [len(args.prompts) * args.num_samples for args in requests]
        self._tail = tail_share * sum(self._open)
        self._tell = tell
        self._has_told = False
        self._look()

    def still_open(self, i: int, num_samples: int) -> None:
        """Record how many samples of a request have not ended."""
        self._open[i] = num_samples
        self._look()

    def _look(self) -> None:
        if not self._has_told and sum(self._open) <= self._tail:
            self._has_told = True
            self._tell()


@dataclass(slots=True)
class Reached:
    """The ranks of a running call that have reported that only their tail remains."""

    operation: OperationKey
    """The first operation of the call."""
    num_ranks: int
    is_stopping: bool = False
    _ranks: set[int] = field(default_factory=set)
    _by_all: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, rank: int) -> None:
        self._ranks.add(rank)
        if len(self._ranks) == self.num_ranks:
            self._by_all.set()

    async def by_all(self) -> None:
        await self._by_all.wait()


@dataclass(frozen=True, slots=True)
class Rest:
    """The remaining samples of one `generate`, and its results so far."""

    args: Generate
    """A request for one sample of each prompt; each prompt continues an open sample."""
    had: GenerateResult
    places: list[tuple[int, int]]
    """The (prompt, sample) of each open sample."""

    def completed(self, rest: GenerateResult) -> GenerateResult:
        """Combine the earlier results with those of the remaining samples."""
        sequences = [[*group] for group in self.had.sequences]
        for (prompt, sample), (sequence,) in zip(self.places, rest.sequences, strict=True):
            sequences[prompt][sample] = extended(sequences[prompt][sample], sequence)
        metrics = merge_metrics([self.had.metrics, rest.metrics])
        return replace(self.had, sequences=sequences, metrics=metrics)

    def placed(self, drawn: DrawnTokens) -> DrawnTokens:
        """Translate tokens drawn for `args` to their positions in the whole operation."""
        prompt, sample = self.places[drawn.prompt]
        had = length(self.had.sequences[prompt][sample].tokens)
        return replace(drawn, prompt=prompt, sample=sample, offset=had + drawn.offset)


def rest_of(args: Generate, had: GenerateResult) -> Rest | None:
    """The remaining samples of a stopped `generate`; None: none remain."""
    places = [
        (prompt, sample)
        for prompt, group in enumerate(had.sequences)
        for sample, sequence in enumerate(group)
        if sequence.stop_reason == PARTIAL
    ]
    if not places:
        return None
    prompts = [
        continued(args.prompts[prompt], had.sequences[prompt][sample], sample)
        for prompt, sample in places
    ]
    rest = Generate(prompts, args.sampling, stream=args.stream, weights=args.weights)
    return Rest(rest, had, places)
