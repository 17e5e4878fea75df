"""The watches of running `generate` calls.

A backend polls its watch for joining requests, cancellations and streaming, and reports each step
and each completed request to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import DrawnTokens, Generate, GenerateResult, Result
from phaseloom.common.observability.substages import StepRecord
from phaseloom.worker.backends.base import AdapterVersion, Version
from phaseloom.worker.core.permits import CancelledOperations
from phaseloom.worker.rank.calls import DeviceCall, requests_of
from phaseloom.worker.rank.tails import TailMonitor

_STREAM_S = 0.05
"""Seconds between two messages with an operation's new tokens."""

ReportTokens = Callable[[OperationKey, list[DrawnTokens]], None]
"""Called with an operation's new tokens, in the device thread."""


class ShareWatch:
    """`Watch` of a rank's share of operations that run on several ranks. No request can join."""

    def __init__(
        self,
        cancelled: CancelledOperations,
        operations: list[OperationKey],
        report_tokens: ReportTokens,
    ) -> None:
        """Args: report_tokens: called in the device thread with an operation's new tokens."""
        self.results: list[GenerateResult | None] = [None] * len(operations)
        self.records = [StepRecord() for _ in operations]
        self._live = {*range(len(operations))}
        """The indices of the requests that have not ended."""
        self.first_prompts: list[int] = []
        """The index, in its operation, of the first prompt of each request; empty: 0 for all."""
        self.versions: list[Version | None] = []
        """The weights that each request names; empty: none names any."""
        self.tail: TailMonitor | None = None
        """Reports when only the tail of this share remains; None: no report is needed."""
        self._cancelled = cancelled
        self._operations = operations
        self._is_stopped = False
        self._report_tokens = report_tokens
        self._next_report_s: dict[int, float] = {}
        """Request → the earliest time, on the monotonic clock, of the next report of its new
        tokens."""

    @property
    def first_operation(self) -> OperationKey:
        return self._operations[0]

    def stop(self) -> None:
        """End all requests with the tokens that they have. May be called from any thread."""
        self._is_stopped = True

    def joined(self) -> Sequence[Generate]:
        return ()

    @property
    def call_version(self) -> Version | None:
        """The weights that the first request names.

        If the backend reads with one version at a time, all requests name the same weights.
        """
        return self.versions[0] if self.versions else None

    def adapter(self, i: int) -> AdapterVersion | None:
        return _adapter_of(self.versions[i] if self.versions else None)

    def is_cancelled(self, i: int) -> bool:
        key = self._operations[i]
        return key in self._cancelled and not self._cancelled.keeps_partial(key)

    def is_stopped(self, i: int) -> bool:
        return self._is_stopped or self._cancelled.keeps_partial(self._operations[i])

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        """Ignore: only the leader reports progress, of its own share."""

    def stepped(self, tokens: int) -> None:
        for i in self._live:
            self.records[i].stepped(tokens)

    def wants_tokens(self, i: int) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_report_s.get(i, 0.0):
            return False
        self._next_report_s[i] = now_s + _STREAM_S
        return True

    def drawn(self, i: int, tokens: Sequence[DrawnTokens]) -> None:
        first_prompt = self.first_prompts[i] if self.first_prompts else 0
        placed = [replace(entry, prompt=first_prompt + entry.prompt) for entry in tokens]
        self._report_tokens(self._operations[i], placed)

    def still_open(self, i: int, num_samples: int) -> None:
        if self.tail is not None:
            self.tail.still_open(i, num_samples)

    def ended(self, i: int, result: GenerateResult | None) -> None:
        self._live.discard(i)
        self.results[i] = result
        self.still_open(i, 0)


class LeaderWatch(ShareWatch):
    """`Watch` of the leader's share of operations that run on several ranks."""

    def __init__(
        self, cancelled: CancelledOperations, calls: list[DeviceCall], report_tokens: ReportTokens
    ) -> None:
        super().__init__(cancelled, [call.key for call in calls], report_tokens)
        self.calls = calls

    @property
    def call_version(self) -> Version | None:
        return self.calls[0].version

    def adapter(self, i: int) -> AdapterVersion | None:
        return _adapter_of(self.calls[i].version)

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        self.calls[i].num_done, self.calls[i].num_total = num_done, num_total


class CallsWatch(LeaderWatch):
    """`Watch` of whole operations on one replica. Others may join; each ends when it is done."""

    def __init__(
        self,
        cancelled: CancelledOperations,
        joined: Callable[[], list[DeviceCall]],
        end: Callable[[DeviceCall, Result | None], None],
        report_tokens: ReportTokens,
    ) -> None:
        super().__init__(cancelled, [], report_tokens)
        self._joined = joined
        self._end = end

    def add_calls(self, calls: Iterable[DeviceCall]) -> None:
        """Add calls to the running batch."""
        for call in calls:
            self._live.add(len(self.calls))
            self.calls.append(call)
            self.records.append(StepRecord())
            self._operations.append(call.key)

    def joined(self) -> Sequence[Generate]:
        new = self._joined()
        self.add_calls(new)
        return requests_of(new)

    def ended(self, i: int, result: GenerateResult | None) -> None:
        self._live.discard(i)
        self.calls[i].record_steps(0, self.records[i].runs)
        self._end(self.calls[i], result)


def _adapter_of(version: Version | None) -> AdapterVersion | None:
    return version if isinstance(version, AdapterVersion) else None
