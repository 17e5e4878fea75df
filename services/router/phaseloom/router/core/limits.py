"""Limits of a tenant, enforced by each replica alone: open operations, stored bytes, rate.

A replica sees only part of a tenant's operations. Periodic readings tell it the totals of all
replicas, and it adds what it has admitted since the last reading. With R replicas and a reading
every s seconds, the open operations (and likewise the stored bytes) therefore exceed their limit by
at most what the other R - 1 replicas admit within s.

The rate uses the sequence numbers of the tenant's stream, which count the messages of all replicas.
A new replica starts with a full burst.
"""

from __future__ import annotations

from collections import deque

import msgspec

from phaseloom.common.contract.tenantlimits import limit_exceeded

_LOOK_AGAIN_S = 1.0
"""Retry time if open operations must end first. Nobody knows when they will, so it is short."""
_AWAIT_OPEN = "await some open operations"
_AWAIT_EXPIRY = (
    "request fewer samples or log-probabilities; outcomes expire, from 10 minutes after they were "
    "stored; wait for that"
)


class Limits(msgspec.Struct, frozen=True):
    """Limits of one tenant. 0 means no limit, except for bursts."""

    max_operations: int = 20_000
    """Maximum operations that are admitted and have no outcome yet."""
    max_bytes: int = 960 * 2**20
    """Maximum bytes of stored operations and outcomes. Mutating operations are stored until they
    are sealed, and outcomes until they expire."""
    rate: float = 10_000.0
    """Maximum average operations per second."""
    burst: int = 20_000
    """Maximum operations in one burst after a quiet period; at least 1."""
    api_rate: float = 500.0
    """Maximum average API calls per second that one replica accepts."""
    api_burst: int = 2_000
    """Maximum API calls in one burst after a quiet period; at least 1."""


class Reading(msgspec.Struct, frozen=True):
    """Totals over all router replicas, each up to a position in a stream."""

    open_operations: int
    log_sequence: int
    """Position in the decision log up to which `open_operations` counts."""
    stored_bytes: int
    stream_sequence: int
    """Position in the tenant's stream up to which `stored_bytes` counts."""
    outcome_bytes: int = 0
    """Bytes of stored outcomes."""


class Meter:
    """One tenant's usage of its limits that this replica knows of."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reading = Reading(0, 0, 0, 0)
        self._unlogged = 0
        """Operations admitted here that are not in the log yet."""
        self._logged: deque[int] = deque()
        """Log positions of the operations admitted here that the last reading of usage did not
        include yet."""
        self._stored: deque[tuple[int, int]] = deque()
        """(stream sequence, bytes) of operations received here after the reading."""
        self._stored_bytes = 0
        self._level = 0.0
        """Fill level of the leaky bucket, in operations. It drains at `rate`."""
        self._first_sequence = 0
        self._last_sequence = 0
        self._last_s = 0.0

    @property
    def open_operations(self) -> int:
        return self._reading.open_operations + len(self._logged) + self._unlogged

    @property
    def stored_bytes(self) -> int:
        reading = self._reading
        return reading.stored_bytes + reading.outcome_bytes + self._stored_bytes

    def read(self, reading: Reading) -> None:
        """Store a new reading and forget the local counts that it includes."""
        self._reading = reading
        self._logged = deque(seq for seq in self._logged if seq > reading.log_sequence)
        self._stored = deque(s for s in self._stored if s[0] > reading.stream_sequence)
        self._stored_bytes = sum(num_bytes for _, num_bytes in self._stored)

    def admit(self, sequence: int, time_s: float, num_bytes: int) -> None:
        """Count a valid operation. The caller must later call `logged` or `dropped`.

        Args:   sequence, time_s: its position in the tenant's stream and its time in Unix seconds.
        Raises: ResourceError: RESOURCE_EXHAUSTED, with `retry_after_s` in its details.
        """
        if sequence > self._reading.stream_sequence:
            self._stored.append((sequence, num_bytes))
            self._stored_bytes += num_bytes
        limits = self._limits
        if limits.max_operations and self.open_operations >= limits.max_operations:
            raise limit_exceeded(
                "max_operations",
                "operations are open",
                self.open_operations,
                limits.max_operations,
                _AWAIT_OPEN,
                retry_after_s=_LOOK_AGAIN_S,
            )
        if limits.max_bytes and self.stored_bytes > limits.max_bytes:
            raise limit_exceeded(
                "max_bytes",
                "bytes of operations and outcomes are stored",
                self.stored_bytes,
                limits.max_bytes,
                _AWAIT_OPEN
                if 2 * self._reading.outcome_bytes < self.stored_bytes
                else _AWAIT_EXPIRY,
                retry_after_s=_LOOK_AGAIN_S,
            )
        if limits.rate:
            self._count_rate(sequence, time_s)
        self._unlogged += 1

    def logged(self, log_sequence: int) -> None:
        """Record an admitted operation's position in the decision log."""
        self._unlogged -= 1
        if log_sequence > self._reading.log_sequence:
            self._logged.append(log_sequence)

    def dropped(self) -> None:
        """Forget an admitted operation that did not reach the log. It will be delivered again."""
        self._unlogged -= 1

    def _count_rate(self, sequence: int, time_s: float) -> None:
        limits = self._limits
        if not self._last_sequence:
            self._first_sequence, self._last_sequence = sequence, sequence - 1
        if sequence < self._first_sequence:
            # An earlier operation that arrived late: no later sequence number covers it.
            self._first_sequence, num_new = sequence, 1
        else:
            num_new = sequence - self._last_sequence
        if num_new <= 0:
            return  # a redelivery, or overtaken: already counted with a later sequence number
        passed_s = max(0.0, time_s - self._last_s)
        self._level = max(0.0, self._level - limits.rate * passed_s)
        self._last_sequence = max(sequence, self._last_sequence)
        self._last_s = max(time_s, self._last_s)
        if self._level + num_new > limits.burst:
            # Operations in between count as refused too, and refused ones add nothing to the level.
            raise limit_exceeded(
                "rate",
                "operations arrived in a burst",
                int(self._level) + num_new,
                limits.burst,
                _AWAIT_OPEN,
                retry_after_s=(self._level + 1 - limits.burst) / limits.rate,
            )
        self._level += num_new
