"""What the mesh is measured against makes every durable hop that the mesh makes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from loadtest.rawchain import TENANT, raw_chain
from phaseloom.common.contract import streams
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import Credentials


async def test_raw_chain_stores_every_hop_of_an_operation(short_dir: Path) -> None:
    async with raw_chain(short_dir, b"payload") as controller:
        for _ in range(3):
            await controller.call()

        credentials = msgspec.json.decode(
            (short_dir / "nats" / "credentials.json").read_bytes(), type=Credentials
        )
        bus = await Bus.open(credentials.bus, "test")
        for seq in (1, 2, 3):
            key = f"{TENANT}.raw.policy.{seq}"
            operation = await bus.stored.get(streams.ops_stream(TENANT), f"pl.v1.op.{key}")
            done = await bus.stored.get(streams.DONE, f"pl.v1.done.{key}")
            assert operation is not None
            assert operation.payload == b"payload"
            assert done is not None
        # The outcome goes ahead of the end's entry in the log.
        async with asyncio.timeout(10):
            while await bus.log.end() < 6:
                await asyncio.sleep(0.01)
        assert sorted(await bus.stored.subjects(streams.SCHED, "pl.v1.sched.>")) == [
            "pl.v1.sched.finished",
            "pl.v1.sched.queued",
        ]
        await bus.close()
