"""Calls on the bus that outlast a restart of the NATS server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from nats.js.errors import APIError

from phaseloom.common.contract.errors import Code, ResourceError

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
_SERVER_ERROR = 500

T = TypeVar("T")


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent call until the server has answered it.

    Unbounded: whoever must not wait for ever is ended from outside, an agent by its lease, a rank
    by its agent. Raises: what the server refused the call with.
    """
    is_news = True
    while True:
        try:
            return await call()
        except (nats.errors.Error, TimeoutError, ResourceError) as error:
            if not _is_away(error):
                raise
            log.log(logging.WARNING if is_news else logging.DEBUG, "trying again: %r", error)
            is_news = False
        await asyncio.sleep(_PAUSE_S)


def _is_away(error: Exception) -> bool:
    """Whether it passes once the server is back."""
    if isinstance(error, ResourceError):
        cause = error.__cause__
        away = error.info.code is Code.UNAVAILABLE
        return away and not isinstance(cause, nats.errors.MaxPayloadError)
    if isinstance(error, APIError):
        return error.code is None or error.code >= _SERVER_ERROR
    return not isinstance(error, nats.errors.MaxPayloadError)
