"""Turns of measurement on request, over standard input and output, for the programs beside this."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable


async def take_turns(
    call: Callable[[], Awaitable[object]], name: str, what: str, versions: dict[str, str]
) -> None:
    """Describe the program, then do every turn that is asked for, until the input ends."""
    _say({"name": name, "what": what, "versions": versions})
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        _say(await _turn(call, asked["in_flight"], asked["count"]))


async def _turn(
    call: Callable[[], Awaitable[object]], in_flight: int, count: int
) -> dict[str, object]:
    numbers = iter(range(count))
    times_s: list[float] = []

    async def keep_calling() -> None:
        for _ in numbers:
            started_s = time.perf_counter()
            await call()
            times_s.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(keep_calling())
    return {"times_s": times_s, "wall_s": time.perf_counter() - started_s}


def _say(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)
