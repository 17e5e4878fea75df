"""Which answers of the bus pass when its server is back, and which stand."""

from __future__ import annotations

import nats.errors
import pytest
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.link import AlreadyStored
from phaseloom.common.transport.retry import until_done


def not_stored(cause: Exception | None, code: Code = Code.UNAVAILABLE) -> ResourceError:
    error = ResourceError("it was not stored", code=code)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        nats.errors.TimeoutError(),
        TimeoutError(),
        nats.errors.NoRespondersError(),
        nats.errors.ConnectionReconnectingError(),
        nats.errors.OutboundBufferLimitError(),
        ServiceUnavailableError(code=503),
        APIError(code=500),
        not_stored(nats.errors.TimeoutError()),
    ],
    ids=repr,
)
async def test_call_is_repeated_while_the_server_is_away(error: Exception) -> None:
    failures = [error, error]

    async def call() -> str:
        if failures:
            raise failures.pop()
        return "stored"

    assert await until_done(call, "it") == "stored"
    assert not failures


@pytest.mark.parametrize(
    "error",
    [
        AlreadyStored("subject"),
        Conflict("key"),
        NotFoundError(code=404),
        APIError(code=400),
        nats.errors.MaxPayloadError(),
        not_stored(nats.errors.MaxPayloadError()),
        not_stored(None, Code.RESOURCE_EXHAUSTED),
        CallerError("wrong"),
        ValueError("ours"),
    ],
    ids=repr,
)
async def test_answer_of_the_server_stands(error: Exception) -> None:
    num_calls = 0

    async def call() -> None:
        nonlocal num_calls
        num_calls += 1
        raise error

    with pytest.raises(type(error)):
        await until_done(call, "it")
    assert num_calls == 1
