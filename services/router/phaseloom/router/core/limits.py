"""The bounds of a tenant, which each replica judges alone: operations open, bytes stored, the rate.

A replica sees a part of the operations. It knows what all replicas let in together from readings
that it is given now and then, and from the sequence numbers that the tenant's stream gives to every
message; it counts what it let in itself since a reading. Hence, with R replicas and a reading every
s seconds, the open operations exceed their bound by at most what the other R - 1 replicas let in
within s; the stored bytes likewise. The rate is judged by the stream's own numbers: a replica
judges messages that went to others like its own next one, and a new replica begins with a whole
burst.
"""

from __future__ import annotations

from collections import deque

import msgspec

from phaseloom.common.contract.errors import Code, ResourceError

_LOOK_AGAIN_S = 1.0
"""The retry time where open operations must end first: nobody knows when, so it is short."""


class Limits(msgspec.Struct, frozen=True):
    """The bounds of one tenant. 0 in any but `burst` means no bound."""

    max_operations: int = 20_000
    """The most operations open at once: admitted, without an outcome."""
    max_bytes: int = 960 * 2**20
    """The most bytes of stored operations; mutating ones are kept until they are sealed."""
    rate: float = 10_000.0
    """The most operations in a second, over a longer time."""
    burst: int = 20_000
    """The most operations at once, after a silence; at least 1."""


class Reading(msgspec.Struct, frozen=True):
    """What all replicas of the router let in, up to a place in each of two streams."""

    open_operations: int
    log_sequence: int
    """The place in the decision log up to which `open_operations` counts."""
    stored_bytes: int
    stream_sequence: int
    """The place in the tenant's stream up to which `stored_bytes` counts."""


class Meter:
    """What one tenant has used of its bounds, as one replica knows."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reading = Reading(0, 0, 0, 0)
        self._unlogged = 0
        """The number of operations admitted here that are not in the log yet."""
        self._logged: deque[int] = deque()
        """The places in the log, later than the reading's, of operations admitted here."""
        self._stored: deque[tuple[int, int]] = deque()
        """The (stream sequence, bytes) of operations that came here, later than the reading."""
        self._stored_bytes = 0
        """The sum of the bytes in `_stored`."""
        self._level = 0.0
        """The number of operations in the bucket, which drains at `rate`."""
        self._first_sequence = 0
        self._last_sequence = 0
        self._last_s = 0.0

    @property
    def open_operations(self) -> int:
        return self._reading.open_operations + len(self._logged) + self._unlogged

    @property
    def stored_bytes(self) -> int:
        return self._reading.stored_bytes + self._stored_bytes

    def read(self, reading: Reading) -> None:
        """Take a new reading; operations that it counts are not counted here any more."""
        self._reading = reading
        self._logged = deque(seq for seq in self._logged if seq > reading.log_sequence)
        self._stored = deque(s for s in self._stored if s[0] > reading.stream_sequence)
        self._stored_bytes = sum(num_bytes for _, num_bytes in self._stored)

    def admit(self, sequence: int, time_s: float, num_bytes: int) -> None:
        """Count a sound operation. The caller tells later whether it was `logged` or `dropped`.

        Args:   sequence, time_s: where and when (Unix seconds) the tenant's stream stored it.
        Raises: ResourceError: RESOURCE_EXHAUSTED, with `retry_after_s` in its details.
        """
        if sequence > self._reading.stream_sequence:
            self._stored.append((sequence, num_bytes))
            self._stored_bytes += num_bytes
        limits = self._limits
        if limits.max_operations and self.open_operations >= limits.max_operations:
            raise _exceeded(
                "max_operations",
                "operations are open",
                self.open_operations,
                limits.max_operations,
                _LOOK_AGAIN_S,
            )
        if limits.max_bytes and self.stored_bytes > limits.max_bytes:
            raise _exceeded(
                "max_bytes",
                "bytes of operations are stored",
                self.stored_bytes,
                limits.max_bytes,
                _LOOK_AGAIN_S,
            )
        if limits.rate:
            self._pour(sequence, time_s)
        self._unlogged += 1

    def logged(self, log_sequence: int) -> None:
        """Note that an admitted operation is in the decision log, at this place."""
        self._unlogged -= 1
        if log_sequence > self._reading.log_sequence:
            self._logged.append(log_sequence)

    def dropped(self) -> None:
        """Note that an admitted operation did not reach the decision log: it will come again."""
        self._unlogged -= 1

    def _pour(self, sequence: int, time_s: float) -> None:
        limits = self._limits
        if not self._last_sequence:
            self._first_sequence, self._last_sequence = sequence, sequence - 1
        if sequence < self._first_sequence:
            # The first operation that came here overtook this one: no later one counts it.
            self._first_sequence, num_new = sequence, 1
        else:
            num_new = sequence - self._last_sequence
        if num_new <= 0:
            return  # delivered again, or overtaken: counted with a later one
        passed_s = max(0.0, time_s - self._last_s)
        self._level = max(0.0, self._level - limits.rate * passed_s)
        self._last_sequence = max(sequence, self._last_sequence)
        self._last_s = max(time_s, self._last_s)
        if self._level + num_new > limits.burst:
            # Those between are taken for refused too, and refused operations fill nothing.
            raise _exceeded(
                "rate",
                "operations came in a burst",
                int(self._level) + num_new,
                limits.burst,
                (self._level + 1 - limits.burst) / limits.rate,
            )
        self._level += num_new


def _exceeded(bound: str, what: str, used: int, limit: int, retry_after_s: float) -> ResourceError:
    retry_after_s = max(retry_after_s, 0.001)
    return ResourceError(
        f"{used} {what}; the tenant may have {limit}",
        code=Code.RESOURCE_EXHAUSTED,
        remedy=f"await some of those under way and send it again after {retry_after_s:.3g} s, "
        f"or have the operator raise `{bound}`",
        details={
            "bound": bound,
            "limit": str(limit),
            "used": str(used),
            "retry_after_s": f"{retry_after_s:.3f}",
        },
    )
