"""An operation on its way through the devices of a WPG, and the execution time charged to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from phaseloom.common.contract.codec import MSGPACK, encode
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.events import StepRun
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import KINDS, Kind
from phaseloom.common.contract.operations import (
    ForwardResult,
    Generate,
    GenerateResult,
    Operation,
    Result,
)
from phaseloom.common.observability.substages import combine_replicas
from phaseloom.worker.backends.base import NONFINITE, Version
from phaseloom.worker.rank.wire import Payload, RunShare


@dataclass(slots=True, eq=False)
class DeviceCall:
    """One operation on its way through the devices."""

    permit: Permit
    operation: Operation
    payload: Payload
    traceparent: str
    version: Version | None = None
    """The weights that the operation names; None: the deployment's current weights."""
    ended: asyncio.Future[Result | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    started_unix_s: float = field(default_factory=time.time)
    duration_s: float = 0.0
    own_s: float = 0.0
    """The part of `duration_s` charged to this operation."""
    has_shared: bool = False
    """Whether other operations ran at the same time."""
    has_started: bool = False
    _started_s: float = 0.0
    num_done: int = 0
    num_total: int = 0
    """Upper bound of new tokens in a running `generate`. With several ranks: of the leader's
    share."""
    _runs: dict[int, list[StepRun]] = field(default_factory=dict)
    """The steps of a `generate` by replica."""

    @property
    def kind(self) -> Kind[Any, Any]:
        return KINDS[self.permit.kind]

    @property
    def is_reading(self) -> bool:
        return not self.kind.is_mutating

    @property
    def share(self) -> float:
        """The fraction of `duration_s` charged to this operation, 0 to 1."""
        return self.own_s / self.duration_s if self.has_shared and self.duration_s else 1.0

    @property
    def num_rows(self) -> int:
        """The number of sequences that the operation works on."""
        args = self.operation.args
        return max(1, len(args.prompts) * args.num_samples) if isinstance(args, Generate) else 1

    @property
    def key(self) -> OperationKey:
        return self.permit.operation

    @property
    def steps(self) -> list[StepRun]:
        """As in `OperationFinished`."""
        return combine_replicas([runs for _, runs in sorted(self._runs.items())])

    def record_steps(self, replica: int, runs: list[StepRun]) -> None:
        """Append steps to those already recorded for a replica."""
        self._runs.setdefault(replica, []).extend(runs)

    def start(self, now_s: float) -> None:
        self.has_started = True
        self.started_unix_s, self._started_s = time.time(), now_s

    def end(self, outcome: Result | Exception | None) -> None:
        """Complete the call with a result, the error that it failed with, or None if it was
        cancelled.

        Call it in the event loop.
        """
        if self.ended.done():
            return  # the waiter has gone
        if isinstance(outcome, Exception):
            self.ended.set_exception(outcome)
        else:
            self.ended.set_result(outcome)

    def stop_clock(self, now_s: float) -> None:
        self.duration_s = now_s - self._started_s


class Clocks:
    """Clocks of the running calls.

    While several calls run, elapsed time is divided among them in proportion to their sequences.
    The charged times therefore add up to the elapsed time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Args: now: returns seconds on a monotonic clock."""
        self._now = now
        self._running: dict[DeviceCall, int] = {}
        """Running call → the number of its sequences."""
        self._since_s = 0.0

    def start(self, call: DeviceCall) -> None:
        self._charge_elapsed(now_s := self._now())
        self._running[call] = call.num_rows
        call.start(now_s)

    def stop(self, call: DeviceCall) -> None:
        """Stop a call's clock, if it is running."""
        if call in self._running:
            self._charge_elapsed(now_s := self._now())
            del self._running[call]
            call.stop_clock(now_s)

    def _charge_elapsed(self, now_s: float) -> None:
        """Divide the time since a call last started or stopped."""
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        num_rows = sum(self._running.values())
        for call, rows in self._running.items():
            call.own_s += elapsed_s * rows / num_rows
            call.has_shared |= len(self._running) > 1


def check_numbers(result: Result | None) -> None:
    """Check that what the model computed can be used.

    A log-probability of -inf is legitimate: the model itself excludes some tokens.

    Raises: CallerError: a number is NaN or +inf.
    """
    if isinstance(result, ForwardResult):
        values = result.logprobs
    elif isinstance(result, GenerateResult):
        values = result.prompt_logprobs
        if any(s.stop_reason == NONFINITE for group in result.sequences for s in group):
            raise _nonfinite("the logits of a sample")
    else:
        return
    import numpy as np  # a rank's process begins without it

    for value in values:
        numbers = np.asarray(value if isinstance(value, list) else np.frombuffer(value, "<f4"))
        if np.isnan(numbers).any() or np.isposinf(numbers).any():
            raise _nonfinite("log-probabilities")


def _nonfinite(label: str) -> CallerError:
    return CallerError(
        f"{label} are NaN or infinite",
        code=Code.FAILED_PRECONDITION,
        field="args",
        remedy="use weights that are finite: these may come from a training that diverged; and use "
        "less extreme sampling parameters",
    )


def requests_of(calls: Sequence[DeviceCall]) -> list[Generate]:
    """The arguments of the `generate` calls among these."""
    return [call.operation.args for call in calls if isinstance(call.operation.args, Generate)]


def share_of(
    calls: list[DeviceCall], *, replicas: tuple[int, ...] = (), tail_share: float = 0.0
) -> RunShare:
    """Describe these calls as a share for the other ranks.

    Args: replicas, tail_share: as in `RunShare`.
    """
    first = calls[0]
    return RunShare(
        [call.payload for call in calls],
        first.permit,
        first.traceparent,
        replicas=replicas,
        tail_share=tail_share,
        naming=_version_permits(calls),
        weights=_weight_names(calls),
    )


def _version_permits(calls: list[DeviceCall]) -> tuple[Permit | None, ...]:
    """The permits of the operations that name versions, in order; empty if none names a version."""
    permits = tuple(None if call.permit.ticket is None else call.permit for call in calls)
    return permits if any(permits) else ()


def _weight_names(calls: list[DeviceCall]) -> tuple[str, ...]:
    """The names of the weights that this rank has read for each operation, in order; empty if no
    operation names any."""
    names = tuple("" if call.version is None else call.version.name for call in calls)
    return names if any(names) else ()


def share_of_remainder(
    calls: list[DeviceCall], requests: list[Generate], replicas: tuple[int, ...]
) -> RunShare:
    """Describe the remainders of operations as a share of independent operations."""
    payloads = [
        Payload(call.key, encode(replace(call.operation, args=request)), MSGPACK)
        for call, request in zip(calls, requests, strict=True)
    ]
    first = calls[0]
    return RunShare(
        payloads,
        first.permit,
        first.traceparent,
        replicas=replicas,
        naming=_version_permits(calls),
        weights=_weight_names(calls),
    )
