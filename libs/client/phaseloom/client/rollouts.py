"""Rollouts whose weights are updated while they run, from the next token on.

An update has the `generate` operations in flight end with the tokens that they have, syncs the
weights behind them, and asks for the rest. The rest goes on from those tokens with the draws of a
sample that was never interrupted; the KV cache of what there is already is computed anew, with the
new weights, unless the update keeps it. So each operation on the mesh is an ordinary one, which
runs with one version from its first token to its last: it is ordered, recovered and accounted for
like any other, on every backend. While new weights are made, and while they are on their way to
others, rollouts go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from phaseloom.client.batches import split_prompts
from phaseloom.client.operations import OperationHandle
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.continuation import PARTIAL, continued, extended
from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.kinds import merge_metrics

Handle = OperationHandle[ops.GenerateResult]


class VersionRun(NamedTuple):
    """Tokens that follow one another in a sequence, all drawn with one version."""

    version: int
    """The `seq` of the `publish_weights`; 0: this session has not synced the weights."""
    num_tokens: int


class RolloutResult(msgspec.Struct, frozen=True):
    """The samples of a rollout, and the versions that drew them."""

    sequences: list[list[ops.Sequence]]
    """[prompt][sample]. Each log-probability is by the version that drew the token."""
    versions: list[list[list[VersionRun]]]
    """[prompt][sample]: the versions that drew the sequence's tokens, in their order."""
    metrics: dict[str, float] = {}
    """The metrics of `GenerateResult`, added up over all operations that the rollout took."""


@dataclass(slots=True)
class _Sample:
    """One sequence so far."""

    prompt: ops.Prompt
    sequence: ops.Sequence = field(default_factory=lambda: ops.Sequence([], [], PARTIAL))
    runs: list[VersionRun] = field(default_factory=list)

    def extend(self, new: ops.Sequence, version: int) -> None:
        self.sequence = extended(self.sequence, new)
        if num_tokens := len(int32s(new.tokens)):
            self.runs.append(VersionRun(version, num_tokens))


@dataclass(slots=True, eq=False)
class _Asked:
    """An operation that is under way."""

    handle: Handle
    prompts: list[ops.Prompt]
    samples: list[list[_Sample]]
    """The samples that the operation continues, by prompt; each prompt has as many."""
    version: int
    is_interrupted: bool = False


class Rollout:
    """A `generate` that weight updates do not wait for, from `Deployment.rollout`.

    Await it for the result, as often as you like.
    """

    def __init__(self, rollouts: Rollouts, sampling: ops.SamplingParams) -> None:
        self._rollouts = rollouts
        self._sampling = sampling
        self._in_flight: set[_Asked] = set()
        self._is_stopped = False
        self._metrics: dict[str, float] = {}
        # An error is a value here, since an outcome that nobody awaits is no unhandled exception.
        self._outcome: asyncio.Future[RolloutResult | PhaseloomError] = (
            asyncio.get_running_loop().create_future()
        )

    def __await__(self) -> Generator[Any, None, RolloutResult]:
        return self._result().__await__()

    def done(self) -> bool:
        return self._outcome.done()

    async def stop(self) -> None:
        """End the rollout with the tokens that it has; unfinished samples stay `partial`.

        Raises: PhaseloomError: the mesh refused, or gave no answer.
        """
        self._is_stopped = True
        await self.interrupt()

    async def interrupt(self) -> None:
        """End the operations under way with the tokens that they have. The rest is submitted again,
        unless the rollout was stopped."""
        asked = [*self._in_flight]
        for each in asked:
            each.is_interrupted = True
        await asyncio.gather(*(each.handle.stop() for each in asked))

    def begin(self, prompts: list[ops.Prompt], num_samples: int) -> Coroutine[Any, Any, None]:
        """Submit the first operations. Returns: the coroutine that sees the rollout through."""
        samples = [
            [_Sample(replace(prompt, sample=prompt.sample + k)) for k in range(num_samples)]
            for prompt in prompts
        ]
        return self._complete(samples, self._ask(prompts, samples))

    async def _complete(self, samples: list[list[_Sample]], asked: list[_Asked]) -> None:
        outcome: RolloutResult | PhaseloomError = ResourceError(
            "the connection was closed", code=Code.ABORTED
        )
        try:
            await self._all_of(asked)
            outcome = RolloutResult(
                [[sample.sequence for sample in group] for group in samples],
                [[sample.runs for sample in group] for group in samples],
                self._metrics,
            )
        except PhaseloomError as error:
            outcome = error
        finally:
            self._rollouts.ended(self)
            self._outcome.set_result(outcome)

    def _ask(self, prompts: list[ops.Prompt], samples: list[list[_Sample]]) -> list[_Asked]:
        """Submit the missing part of these samples, in messages that are not too large."""
        if not prompts:
            return []
        num_samples = len(samples[0])
        groups = iter(samples)
        asked = [
            _Asked(
                self._rollouts.generate(part, self._sampling, num_samples),
                part,
                [*islice(groups, len(part))],
                self._rollouts.version,
            )
            for part in split_prompts(prompts, self._sampling, num_samples)
        ]
        self._in_flight.update(asked)
        return asked

    async def _all_of(self, asked: Iterable[_Asked]) -> None:
        await asyncio.gather(*map(self._one, asked))

    async def _one(self, asked: _Asked) -> None:
        """Take the samples of an operation, and submit what an update has left open, until nothing
        is."""
        has_begun = True
        try:
            result = await asked.handle
        except ResourceError as error:
            if not (asked.is_interrupted and error.info.code is Code.ABORTED):
                raise
            has_begun = False
        else:
            self._metrics = merge_metrics([self._metrics, result.metrics])
            for samples, group in zip(asked.samples, result.sequences, strict=True):
                for sample, sequence in zip(samples, group, strict=True):
                    sample.extend(sequence, asked.version)
        finally:
            self._in_flight.discard(asked)
        if self._is_stopped or not asked.is_interrupted:
            return
        if not has_begun:
            await self._all_of(self._ask(asked.prompts, asked.samples))
            return
        left = [
            sample
            for samples in asked.samples
            for sample in samples
            if sample.sequence.stop_reason == PARTIAL
        ]
        rest = [continued(sample.prompt, sample.sequence) for sample in left]
        await self._all_of(self._ask(rest, [[sample] for sample in left]))

    async def _result(self) -> RolloutResult:
        # Shielded, so that a waiter that is cancelled does not cancel the outcome of others.
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, PhaseloomError):
            raise outcome
        return outcome


@dataclass(slots=True)
class Rollouts:
    """The rollouts of a deployment that are under way."""

    generate: Callable[[list[ops.Prompt], ops.SamplingParams, int], Handle]
    run: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine in the background, for as long as the connection lasts."""
    version: int = 0
    """The version with which operations run that are submitted now."""
    _open: set[Rollout] = field(default_factory=set)

    def begin(
        self, prompts: list[ops.Prompt], sampling: ops.SamplingParams, num_samples: int
    ) -> Rollout:
        rollout = Rollout(self, sampling)
        work = rollout.begin(prompts, num_samples)
        self._open.add(rollout)
        self.run(work)
        return rollout

    def ended(self, rollout: Rollout) -> None:
        self._open.discard(rollout)

    async def interrupt(self) -> None:
        await asyncio.gather(*(rollout.interrupt() for rollout in self._open))
