"""A tenant's process in a hostile run: `python -m loadtest.hostile.side ROLE …`.

Both tenants connect first and say `ready`. The flooding one begins after a line on its standard
input; the victim works until its input ends. Each prints its result as JSON.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from loadtest.hostile.floods import FLOODS, OPERATIONS, Flooder, Latencies, generates, victim
from loadtest.hostile.web import long_text, web_victim
from phaseloom.client import connect


async def _flood(name: str, url: str, tenant: str, password: str, job: str) -> int:
    async with Flooder.connected(url, tenant, password, job) as flooder:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        accepted = await FLOODS[name](flooder)
        if name in OPERATIONS:
            first, last = flooder.next_seq, flooder.next_seq + accepted - 1
            if name == "behind_a_gap":  # fill it
                last += await flooder.publish(generates(flooder, 1), first)
            await flooder.ended(last)
        return accepted


async def _victim(url: str, tenant: str, password: str, job: str) -> Latencies:
    async with connect(url, tenant, password) as mesh:
        deployment = (await mesh.attach(job)).deployment("policy")
        return await victim(mesh, deployment, await _stop_with_input())


async def _web_flood(url: str, key: str, model: str) -> int:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return await long_text(url, key, model)


async def _web_victim(url: str, key: str, model: str) -> Latencies:
    return await web_victim(url, key, model, await _stop_with_input())


async def _stop_with_input() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    loop.run_in_executor(None, wait)
    print("ready", flush=True)
    return stop


_ROLES = {"flood": _flood, "victim": _victim, "web-flood": _web_flood, "web-victim": _web_victim}

if __name__ == "__main__":
    result = uvloop.run(_ROLES[sys.argv[1]](*sys.argv[2:]))  # type: ignore[operator]
    print(msgspec.json.encode(result).decode(), flush=True)
