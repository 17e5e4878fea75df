"""The address where a killed state manager served versions belongs to somebody else meanwhile."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tests.support.statedaemon import POLICY, MiB, daemon, start


async def test_port_that_somebody_took_meanwhile_costs_no_state(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        rank = await start(d, POLICY, MiB)
        await d.agent.switch_in(POLICY, 1, 1, [])
        content = rank.run(3)
        endpoint = await d.endpoint()
        host, _, port = endpoint.rpartition(":")
        await d.kill()
        with socket.create_server((host, int(port))):
            await d.launch()
            assert await d.endpoint() != endpoint
            assert rank.digest() == content
        # Other nodes know this one.
        async with asyncio.timeout(30):
            while await d.endpoint() != endpoint:
                pass
        with socket.create_connection((host, int(port))):
            await d.agent.switch_out(POLICY, 1, 1)
