"""Calls to the NATS server that are repeated until they succeed.

The server may restart during any call, or be full. Neither is a reason for a service to stop. The
service resumes where it was, and reports the cause of the wait once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import Event
from phaseloom.common.contract.streams import SCHED
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import LogEntry

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 2.0
"""Seconds after which an attempt is abandoned. If the server died with the request, it never
answers."""
_PAUSE_S = 0.1
_SERVER_ERROR = 500


async def until_done(
    call: Callable[[], Awaitable[T]],
    label: str,
    *,
    attempt_s: float | None = None,
    report_full: Callable[[str], Awaitable[None]] | None = None,
) -> T:
    """Repeat an idempotent call until it succeeds.

    The number of attempts is unlimited. A process that must not wait forever is ended from outside:
    a node's agent by its lease, a rank by its agent.

    Args:   label: name of the call, for the log.
            attempt_s: time after which an attempt is abandoned; None: the call ends by itself.
            report_full: called once, with the reason, if a stream is full; then the call repeats
                until there is room. Without `report_full` a full stream is an error.
    Raises: the error with which the server refuses the call.
    """
    is_new = True
    while True:
        try:
            async with asyncio.timeout(attempt_s):
                return await call()
        except (ResourceError, TimeoutError, NatsTimeoutError, NatsError) as error:
            # Without `report_full`, a full stream is an ordinary refusal.
            is_full = report_full is not None and (
                isinstance(error, ResourceError) and error.info.code is Code.RESOURCE_EXHAUSTED
            )
            if not (is_full or _is_away(error)):
                raise
            reason = repr(error)
            if is_full and is_new and report_full is not None:
                try:
                    await report_full(reason)
                except NatsError as notice_error:
                    log.warning("cannot publish the notice: %r", notice_error)
        log.log(logging.WARNING if is_new else logging.DEBUG, "%s: %s; trying again", label, reason)
        is_new = False
        await asyncio.sleep(_PAUSE_S)


def _is_away(error: Exception) -> bool:
    """Whether an error is temporary because the server is unreachable, and not a refusal."""
    if isinstance(error, ResourceError):
        is_too_large = isinstance(error.__cause__, MaxPayloadError)
        return error.info.code is Code.UNAVAILABLE and not is_too_large
    if isinstance(error, APIError):
        return error.code is None or error.code >= _SERVER_ERROR
    return not isinstance(error, MaxPayloadError)


class RetryingLog:
    """The decision log with calls that are repeated until they succeed.

    An event appended without an id may be stored twice, so a duplicate must be harmless.
    """

    def __init__(self, bus: Bus, source: str) -> None:
        """Args:   source: name of the appending service, for people."""
        self._bus = bus
        self._source = source

    async def append(self, event: Event, *, msg_id: str | None = None) -> int:
        return await until_done(
            lambda: self._bus.log.append(event, msg_id=msg_id),
            "append",
            attempt_s=ATTEMPT_S,
            report_full=self._report_full,
        )

    async def _report_full(self, reason: str) -> None:
        await self._bus.notice(self._source, "waiting for room", reason, SCHED)

    def read_entries(self, start_sequence: int = 1) -> AsyncIterator[LogEntry]:
        """Yield every entry of the log from `start_sequence` on, forever, as it is stored.

        Each entry contains all events of one append.
        """
        return self._bus.log.read_entries(start_sequence)

    async def end(self) -> int:
        return await until_done(self._bus.log.end, "the log's end", attempt_s=ATTEMPT_S)
