"""The queue before a WPG's devices: operations in the order they came, one call at a time.

Reading operations are permitted side by side, so several may wait. Where the deployment shares
batches, all `generate` that wait when the devices become free go into one call of the backend. All
`forward` that wait one behind the other go to the device thread together, each a call of its own.
An operation that is cancelled before it has begun ends at once; a `generate` that runs stops
between two tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import KINDS, Kind
from phaseloom.common.contract.operations import Generate, Operation, Result
from phaseloom.common.contract.specs import Batching
from phaseloom.common.contract.state_rank import Failed
from phaseloom.worker.core.permits import Cancelled
from phaseloom.worker.rank.executor import Executor, Refused
from phaseloom.worker.rank.group import Ranks
from phaseloom.worker.rank.wire import PartWritten, Payload, RunShare

MAX_SHARED_BYTES = 8 * 1024 * 1024
"""Limit of the payloads that go into one call."""


@dataclass(slots=True, eq=False)
class Call:
    """One operation on its way through the devices."""

    permit: Permit
    operation: Operation
    payload: Payload
    traceparent: str
    ended: asyncio.Future[Result | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    started_unix_s: float = field(default_factory=time.time)
    duration_s: float = 0.0
    has_begun: bool = False
    num_done: int = 0
    num_total: int = 0
    """Most new tokens of a running `generate`; on several ranks those of the leader's share."""

    @property
    def kind(self) -> Kind[Any, Any]:
        return KINDS[self.permit.kind]

    @property
    def is_reading(self) -> bool:
        return not self.kind.is_mutating

    @property
    def key(self) -> OperationKey:
        return self.permit.operation


class DeviceQueue:
    def __init__(self, executor: Executor, ranks: Ranks, batching: Batching) -> None:
        self._executor = executor
        self._ranks = ranks
        self._is_shared = batching is Batching.SHARED
        self._waiting: deque[Call] = deque()
        self._has_waiting = asyncio.Event()
        self._running: list[Call] = []
        self._cancelled = Cancelled()

    @property
    def running(self) -> Iterable[Call]:
        return self._running

    async def run(self, call: Call) -> Result | None:
        """Run an operation of any kind but those that move state.

        Returns: its result, or None where it was cancelled.
        Raises:  Refused: nothing happened. Anything else: it failed half-way.
        """
        if call.is_reading and call.key in self._cancelled:
            return None
        self._waiting.append(call)
        self._has_waiting.set()
        return await call.ended

    def cancel(self, key: OperationKey) -> None:
        """Cancel a reading operation, wherever it is; harmless once it has ended."""
        self._cancelled.add(key)
        for call in [c for c in self._waiting if c.key == key and c.is_reading]:
            self._waiting.remove(call)
            call.ended.set_result(None)
        for call in self._running:
            if call.key == key and not call.has_begun and not call.ended.done():
                call.ended.set_result(None)

    def is_cancelled(self, key: OperationKey) -> bool:
        """Whether a cancel has come for the operation."""
        return key in self._cancelled

    async def serve(self) -> None:
        """Run the operations that come, for ever."""
        while True:
            await self._has_waiting.wait()
            while self._waiting:
                calls = self._next()
                self._running = calls
                try:
                    await self._run(calls)
                finally:
                    self._running = []
            self._has_waiting.clear()

    def _next(self) -> list[Call]:
        first = self._waiting.popleft()
        calls = [first]
        if self._is_shared and first.kind.shares_calls:
            num_bytes = len(first.payload.payload)
            for call in list(self._waiting):
                num_bytes += len(call.payload.payload)
                if call.kind is first.kind and num_bytes <= MAX_SHARED_BYTES:
                    self._waiting.remove(call)
                    calls.append(call)
        if self._is_in_a_row(first):
            while self._waiting and self._is_in_a_row(self._waiting[0]):
                calls.append(self._waiting.popleft())
        return calls

    def _is_in_a_row(self, call: Call) -> bool:
        """Whether others of the same kind may follow the call in the device thread.

        Handing over each alone takes longer than a short one runs.
        """
        return self._ranks.is_alone and call.is_reading and not call.kind.shares_calls

    async def _run_in_a_row(self, calls: list[Call]) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            for call in calls:
                if call.ended.done():
                    continue  # cancelled
                call.has_begun = True
                call.started_unix_s, clock_s = time.time(), time.perf_counter()
                outcome: Result | Exception
                try:
                    outcome = self._executor.run(call.operation.args)
                except Exception as error:
                    outcome = error
                call.duration_s = time.perf_counter() - clock_s
                loop.call_soon_threadsafe(_end, call, outcome)

        await self._ranks.here(run)

    async def _run(self, calls: list[Call]) -> None:
        """Run calls together and end each of them, whatever happens."""
        if self._is_in_a_row(calls[0]):
            await self._run_in_a_row(calls)
            return
        for call in calls:
            call.has_begun = True
        started_unix_s, clock_s = time.time(), time.perf_counter()
        outcomes: list[Result | Exception | None]
        try:
            if calls[0].kind.shares_calls:
                outcomes = await self._generate(calls)
            else:
                outcomes = [await self._compute(calls[0])]
        except Exception as error:
            outcomes = [error] * len(calls)
        duration_s = time.perf_counter() - clock_s
        for call, outcome in zip(calls, outcomes, strict=True):
            call.started_unix_s, call.duration_s = started_unix_s, duration_s
            _end(call, outcome)

    async def _compute(self, call: Call) -> Result:
        args = call.operation.args
        if self._ranks.is_alone:
            return await self._ranks.here(lambda: self._executor.run(args))
        await self._ranks.here(lambda: self._executor.check(args))
        own, others = await self._ranks.everywhere(
            lambda: self._executor.compute(args), _share([call])
        )
        known = (result for (result,) in others)
        shares = [own, *(r for r in known if not isinstance(r, PartWritten | Failed | None))]
        return await self._ranks.here(lambda: self._executor.finish(args, shares))

    async def _generate(self, calls: list[Call]) -> list[Result | Exception | None]:
        """One result, refusal or None for each call: an operation that is wrong fails alone."""
        if self._ranks.is_alone:
            return await self._ranks.here(lambda: self._generate_here(calls))
        refused = await self._ranks.here(lambda: self._refusals(calls))
        good = [call for call in calls if call not in refused]
        if not good:
            return [refused[call] for call in calls]
        requests, watch = _requests(good), _Watch(self._cancelled, good)
        own, others = await self._ranks.everywhere(
            lambda: self._executor.generate(requests, watch), _share(good)
        )
        merged = await self._ranks.here(
            lambda: [
                self._merged(call, shares) for call, *shares in zip(good, own, *others, strict=True)
            ]
        )
        results = dict(zip(good, merged, strict=True))
        return [refused.get(call) or results[call] for call in calls]

    def _generate_here(self, calls: list[Call]) -> list[Result | Exception | None]:
        refused = self._refusals(calls)
        good = [call for call in calls if call not in refused]
        results: dict[Call, Result | None] = {}
        if good:
            watch = _Watch(self._cancelled, good)
            made = self._executor.generate(_requests(good), watch)
            results = dict(zip(good, made, strict=True))
        return [refused.get(call) or results[call] for call in calls]

    def _refusals(self, calls: list[Call]) -> dict[Call, Refused]:
        refused = {}
        for call in calls:
            try:
                self._executor.check(call.operation.args)
            except Refused as why:
                refused[call] = why
        return refused

    def _merged(self, call: Call, shares: list[Result | None]) -> Result | None:
        whole = [share for share in shares if share is not None]
        is_whole = len(whole) == len(shares)
        return self._executor.finish(call.operation.args, whole) if is_whole else None


def _end(call: Call, outcome: Result | Exception | None) -> None:
    if call.ended.done():
        return  # nobody waits any more
    if isinstance(outcome, Exception):
        call.ended.set_exception(outcome)
    else:
        call.ended.set_result(outcome)


def _share(calls: list[Call]) -> RunShare:
    first = calls[0]
    return RunShare([call.payload for call in calls], first.permit, first.traceparent)


def _requests(calls: list[Call]) -> list[Generate]:
    return [call.operation.args for call in calls if isinstance(call.operation.args, Generate)]


@dataclass(frozen=True, slots=True)
class _Watch:
    """The backend's view of its calls, in the device thread: it asks for cancels and tells
    progress."""

    cancelled: Cancelled
    calls: list[Call]

    def is_cancelled(self, i: int) -> bool:
        return self.calls[i].key in self.cancelled

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        call = self.calls[i]
        call.num_done, call.num_total = num_done, num_total
