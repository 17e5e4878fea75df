"""Tenants' requests take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors

from phaseloom.common.transport.services import MAX_WAITING, TenantQueues


class Request:
    def __init__(self, name: str, data: bytes = b"") -> None:
        self.name = name
        self.data = data


class Handler:
    """Handles a request when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    async def run(self, request: Any) -> None:
        self.started.append(request.name)
        await self.gates.setdefault(request.name, asyncio.Event()).wait()

    def let(self, *names: str) -> None:
        for name in names:
            self.gates.setdefault(name, asyncio.Event()).set()


def add(queues: TenantQueues, tenant: str, *names: str) -> None:
    for name in names:
        request: Any = Request(name)
        assert queues.add(tenant, request)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenant_with_many_requests_delays_no_other_tenant() -> None:
    handler = Handler()
    queues = TenantQueues(handler.run)

    add(queues, "acme", *(f"a{n}" for n in range(100)))
    add(queues, "globex", "g0")
    await settle()

    assert handler.started == ["a0", "g0"]
    handler.let("g0", *(f"a{n}" for n in range(100)))
    await queues.finish()
    assert [name for name in handler.started if name != "g0"] == [f"a{n}" for n in range(100)]


async def test_requests_that_wait_for_nothing_run_in_turn_with_those_of_other_tenants() -> None:
    handler = Handler()
    queues = TenantQueues(handler.run)
    handler.let("a0", "a1", "a2", "g0", "g1")
    add(queues, "acme", "a0", "a1", "a2")
    add(queues, "globex", "g0", "g1")
    await queues.finish()
    assert handler.started == ["a0", "g0", "a1", "g1", "a2"]


async def test_requests_of_a_tenant_above_the_bound_are_refused_and_those_of_others_are_not() -> (
    None
):
    handler = Handler()
    queues = TenantQueues(handler.run)
    add(queues, "acme", *(f"a{n}" for n in range(MAX_WAITING)))
    late: Any = Request("late")
    assert not queues.add("acme", late)
    add(queues, "globex", "g0")

    large = TenantQueues(handler.run)
    first: Any = Request("first", bytes(40 * 2**20))
    second: Any = Request("second", bytes(1))
    assert large.add("acme", first)
    assert not large.add("acme", second)

    queues.cancel()
    large.cancel()
    await queues.finish()
    await large.finish()
    assert not handler.started, "a cancelled queue starts nothing"


async def test_request_that_cannot_be_answered_does_not_end_the_queue() -> None:
    handled = []

    async def run(request: Any) -> None:
        handled.append(request.name)
        raise nats.errors.ConnectionClosedError

    queues = TenantQueues(run)
    add(queues, "acme", "a0", "a1")
    await queues.finish()
    add(queues, "acme", "a2")
    await queues.finish()
    assert handled == ["a0", "a1", "a2"]
