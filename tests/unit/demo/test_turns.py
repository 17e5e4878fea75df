"""Runs take turns, and their logs are read by a clock that stands still meanwhile."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from phaseloom.demo.progress import Progress
from phaseloom.demo.report import figures, read_log, window_of
from phaseloom.demo.turns import Clock, Turn, without_pauses
from tests.support.runlog import shared


async def test_runs_alternate_round_by_round_and_measure_their_rounds() -> None:
    lock, order = asyncio.Lock(), []
    console = Console(file=io.StringIO())

    async def run(name: str) -> Turn:
        async with Turn(lock, Progress(console, name, [name])) as turn:
            for number, barrier in enumerate(("start", "round", "end")):
                order.append(f"{name}{number}")
                sum(range(10**6))
                await turn.at_barrier(barrier)
            order.append(f"{name} ends")
        return turn

    await lock.acquire()
    tasks = [asyncio.create_task(run(name)) for name in ("a", "b", "both")]
    await asyncio.sleep(0)  # all three wait for their turn
    lock.release()
    turns = await asyncio.gather(*tasks)
    assert order == [
        *("a0", "b0", "both0", "a1", "b1", "both1"),
        *("a2", "a ends", "b2", "b ends", "both2", "both ends"),
    ]
    for turn in turns:
        assert len(turn.pauses) == 2
        assert turn.usage.wall_s > 0
        assert turn.usage.processor_s > 0


def test_clock_stands_still_during_pauses() -> None:
    clock = Clock([(10.0, 30.0), (40.0, 45.0)])
    times = [5.0, 10.0, 20.0, 30.0, 35.0, 42.0, 50.0]
    assert [clock.at(time) for time in times] == [5.0, 10.0, 10.0, 10.0, 15.0, 20.0, 25.0]


def test_pause_between_operations_changes_no_figure() -> None:
    log = read_log(shared().recorded())
    end_s = window_of(log.executions)[1]
    moved = without_pauses(log, [(end_s, end_s + 100.0)])
    window = window_of(moved.executions)
    assert figures(moved, window) == figures(log, window_of(log.executions))
    earlier = without_pauses(log, [(0.0, 50.0)])
    assert figures(earlier, window_of(earlier.executions)).seconds == figures(log, window).seconds
