"""Calls to the server for as long as it takes: it may be restarted under any of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.errors import APIError

from phaseloom.common.bus import Bus, LogEntry
from phaseloom.common.errors import Code, ResourceError
from phaseloom.common.messages import Event

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 2.0
"""A request that met the server's death is not answered."""
_PAUSE_S = 0.2
_SERVER_ERROR = 500


async def until_done(
    call: Callable[[], Awaitable[T]], what: str, attempt_s: float = ATTEMPT_S
) -> T:
    """Try until the server answers.

    Args:   call: harmless twice.
    Raises: what it refuses the call with.
    """
    is_news = True
    while True:
        try:
            async with asyncio.timeout(attempt_s):
                return await call()
        except ResourceError as error:
            if error.info.code is not Code.UNAVAILABLE:
                raise
            reason = error.info.message
        except (TimeoutError, NatsTimeoutError, NatsError) as error:
            if isinstance(error, MaxPayloadError) or _is_refusal(error):
                raise
            reason = repr(error)
        log.log(logging.WARNING if is_news else logging.DEBUG, "%s: %s; again", what, reason)
        is_news = False
        await asyncio.sleep(_PAUSE_S)


def _is_refusal(error: Exception) -> bool:
    """Whether the server is there, and says no."""
    return isinstance(error, APIError) and error.code is not None and error.code < _SERVER_ERROR


class PatientLog:
    """The decision log, appended to for as long as it takes.

    An entry without an id may be stored twice: what is appended so must be harmless twice.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def append(self, event: Event, *, msg_id: str | None = None) -> int:
        return await until_done(lambda: self._bus.append(event, msg_id=msg_id), "append")

    def read_log(self, start_sequence: int = 1) -> AsyncIterator[LogEntry]:
        return self._bus.read_log(start_sequence)

    async def log_end(self) -> int:
        return await until_done(self._bus.log_end, "the log's end")
