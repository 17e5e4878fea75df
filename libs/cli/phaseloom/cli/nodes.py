"""Emptying a node: `phaseloom drain NODE`."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from phaseloom.common.contract.api import DrainNode, NodeStatus
from phaseloom.common.transport.bus import Bus, BusConfig, connect
from phaseloom.common.transport.services import call_node_api

_PAUSE_S = 0.2


async def drain(settings: BusConfig, request: DrainNode, timeout_s: float, console: Console) -> int:
    """Ask for it, tell what it waits for whenever that changes, and end once the node is empty and
    nobody counts on a copy there: it may be switched off.

    Returns: 1 where it is not within the timeout; the node goes on being drained.
    Raises:  PhaseloomError: what the scheduler refuses.
    """
    bus = Bus(await connect(settings.url, "drain", settings.user, settings.password))
    try:
        status: NodeStatus = await call_node_api(bus.client, "drain", request, NodeStatus)
        if request.undo:
            said = "counts as gone until it is back" if status.is_gone else "may be used"
            console.print(f"{status.node}: {said}", markup=False)
            return 0
        return await _wait(bus, status, timeout_s, console)
    finally:
        await bus.close()


async def _wait(bus: Bus, status: NodeStatus, timeout_s: float, console: Console) -> int:
    until_s = time.monotonic() + timeout_s
    told: list[str] = []

    def tell(*lines: str) -> None:
        for line in lines:
            console.print(f"{status.node}: {line}", soft_wrap=True, markup=False)

    while status.deployments or status.waits_for:
        if status.waits_for != told:
            told = status.waits_for
            tell(*told)
        if not (status.is_draining or status.is_gone):
            tell("it is not drained any more")
            return 1
        if time.monotonic() > until_s:
            tell(f"something counts on it after {timeout_s:g} s still; it goes on being drained")
            return 1
        await asyncio.sleep(_PAUSE_S)
        request = DrainNode(status.node)
        status = await call_node_api(bus.client, "status", request, NodeStatus)
    tell("nothing is on it, it may be switched off")
    return 0
