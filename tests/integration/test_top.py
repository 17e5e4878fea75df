"""What `phaseloom top` reads of a real decision log."""

from __future__ import annotations

from rich.console import Console

from phaseloom.cli.top import Dashboard, catch_up
from phaseloom.common.contract.events import (
    OperationFinished,
    OperationsFinished,
    OperationsQueued,
    QueuedOperation,
)
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.transport.bus import Bus


async def test_board_has_every_event_of_the_logs_last_entry(bus: Bus) -> None:
    queued = [
        QueuedOperation(OperationKey("t", "a", "policy", f"r{i}"), "", "forward") for i in range(4)
    ]
    await bus.log.append(OperationsQueued(queued))
    ended = [
        OperationFinished(one.key, one.kind, Outcome.COMPLETED, 1, 1, 0.0, 0.1)
        for one in queued[:3]
    ]
    await bus.log.append(OperationsFinished(ended))
    dashboard = Dashboard()
    await catch_up(bus, dashboard)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(dashboard.render(0.0))
    assert "1 open, 3 done" in capture.get()
