"""Rollouts whose weights can be updated while they run, starting with the next token.

An update stops the `generate` operations in flight, which return the tokens already sampled. It
then syncs the weights and submits operations that continue the samples. A continued sample uses the
same random draws as one that was never interrupted. Its KV cache is recomputed with the new
weights, unless the update keeps it.

So each operation on the mesh is an ordinary one, which runs with a single version from its first
token to its last. It is ordered, recovered and accounted for like any other, on every backend.
Rollouts continue while new weights are computed and sent to other deployments.
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
    """Consecutive tokens of a sequence that one version sampled."""

    version: int
    """`seq` of the `publish_weights`. 0: this session has not synced the weights."""
    num_tokens: int


class RolloutResult(msgspec.Struct, frozen=True):
    """The samples of a rollout, and the versions that sampled them."""

    sequences: list[list[ops.Sequence]]
    """[prompt][sample]. Each log-probability comes from the version that sampled the token."""
    versions: list[list[list[VersionRun]]]
    """[prompt][sample]: the versions that sampled the sequence, in order."""
    metrics: dict[str, float] = {}
    """The metrics of `GenerateResult`, summed over all operations of the rollout."""


@dataclass(slots=True)
class _Sample:
    prompt: ops.Prompt
    sequence: ops.Sequence = field(default_factory=lambda: ops.Sequence([], [], PARTIAL))
    runs: list[VersionRun] = field(default_factory=list)

    def extend(self, new: ops.Sequence, version: int) -> None:
        self.sequence = extended(self.sequence, new)
        if num_tokens := len(int32s(new.tokens)):
            self.runs.append(VersionRun(version, num_tokens))


@dataclass(slots=True, eq=False)
class _RolloutOperation:
    """One operation in flight."""

    handle: Handle
    prompts: list[ops.Prompt]
    samples: list[list[_Sample]]
    """The samples that the operation continues, grouped by prompt. All groups have the same
    size."""
    version: int
    is_interrupted: bool = False


class Rollout:
    """A `generate` that does not delay weight updates, from `Deployment.rollout`.

    Await it for the result, any number of times.
    """

    def __init__(self, rollouts: Rollouts, sampling: ops.SamplingParams) -> None:
        self._rollouts = rollouts
        self._sampling = sampling
        self._in_flight: set[_RolloutOperation] = set()
        self._is_stopped = False
        self._metrics: dict[str, float] = {}
        # An error is stored as a value: asyncio warns about exceptions that nobody retrieves.
        self._outcome: asyncio.Future[RolloutResult | PhaseloomError] = (
            asyncio.get_running_loop().create_future()
        )

    def __await__(self) -> Generator[Any, None, RolloutResult]:
        return self._result().__await__()

    def done(self) -> bool:
        return self._outcome.done()

    async def stop(self) -> None:
        """End the rollout with the tokens already sampled. Unfinished samples stay `partial`.

        Raises: PhaseloomError: the mesh refused or did not answer.
        """
        self._is_stopped = True
        await self.interrupt()

    async def interrupt(self) -> None:
        """Stop the operations in flight, which return the tokens already sampled. Unless the
        rollout was stopped, request the remaining tokens again."""
        operations = [*self._in_flight]
        for operation in operations:
            operation.is_interrupted = True
        await asyncio.gather(*(operation.handle.stop() for operation in operations))

    def begin(self, prompts: list[ops.Prompt], num_samples: int) -> Coroutine[Any, Any, None]:
        """Submit the first operations. Return the coroutine that completes the rollout."""
        samples = [
            [_Sample(replace(prompt, sample=prompt.sample + k)) for k in range(num_samples)]
            for prompt in prompts
        ]
        return self._run(samples, self._submit(prompts, samples))

    async def _run(self, samples: list[list[_Sample]], operations: list[_RolloutOperation]) -> None:
        outcome: RolloutResult | PhaseloomError = ResourceError(
            "the connection was closed", code=Code.ABORTED
        )
        try:
            await self._complete_all(operations)
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

    def _submit(
        self, prompts: list[ops.Prompt], samples: list[list[_Sample]]
    ) -> list[_RolloutOperation]:
        if not prompts:
            return []
        num_samples = len(samples[0])
        groups = iter(samples)
        operations = [
            _RolloutOperation(
                self._rollouts.generate(chunk, self._sampling, num_samples),
                chunk,
                [*islice(groups, len(chunk))],
                self._rollouts.version,
            )
            for chunk in split_prompts(prompts, self._sampling, num_samples)
        ]
        self._in_flight.update(operations)
        return operations

    async def _complete_all(self, operations: Iterable[_RolloutOperation]) -> None:
        await asyncio.gather(*map(self._complete_one, operations))

    async def _complete_one(self, operation: _RolloutOperation) -> None:
        """Collect the samples of an operation, and resubmit those that an update interrupted until
        all are complete."""
        has_result = True
        try:
            result = await operation.handle
        except ResourceError as error:
            # Stopping an operation that was not running yet cancels it: it has no result.
            if not (operation.is_interrupted and error.info.code is Code.ABORTED):
                raise
            has_result = False
        else:
            self._metrics = merge_metrics([self._metrics, result.metrics])
            for samples, group in zip(operation.samples, result.sequences, strict=True):
                for sample, sequence in zip(samples, group, strict=True):
                    sample.extend(sequence, operation.version)
        finally:
            self._in_flight.discard(operation)
        if self._is_stopped or not operation.is_interrupted:
            return
        if not has_result:
            await self._complete_all(self._submit(operation.prompts, operation.samples))
            return
        unfinished = [
            sample
            for samples in operation.samples
            for sample in samples
            if sample.sequence.stop_reason == PARTIAL
        ]
        # Each unfinished sample becomes a prompt of its own, since samples differ in length now.
        prompts = [continued(sample.prompt, sample.sequence) for sample in unfinished]
        await self._complete_all(self._submit(prompts, [[sample] for sample in unfinished]))

    async def _result(self) -> RolloutResult:
        # Shielded: cancelling one waiter must not cancel the outcome that others await.
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, PhaseloomError):
            raise outcome
        return outcome


@dataclass(slots=True)
class Rollouts:
    """The unfinished rollouts of a deployment."""

    generate: Callable[[list[ops.Prompt], ops.SamplingParams, int], Handle]
    start: Callable[[Coroutine[Any, Any, None]], None]
    """Starts a coroutine in the background. It runs until it ends or the connection closes."""
    version: int = 0
    """The weights version that an operation submitted now would use."""
    _open: set[Rollout] = field(default_factory=set)

    def begin(
        self, prompts: list[ops.Prompt], sampling: ops.SamplingParams, num_samples: int
    ) -> Rollout:
        rollout = Rollout(self, sampling)
        work = rollout.begin(prompts, num_samples)
        self._open.add(rollout)
        self.start(work)
        return rollout

    def ended(self, rollout: Rollout) -> None:
        self._open.discard(rollout)

    async def interrupt(self) -> None:
        await asyncio.gather(*(rollout.interrupt() for rollout in self._open))
