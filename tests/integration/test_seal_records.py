"""The commit record of seals on a real bus: several nodes, one record."""

from __future__ import annotations

import asyncio

from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.events import SealCommitted
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.worker.agent.sealrecords import SealRecords

KEY = DeploymentKey("acme", "sums", "policy")
NODES = [NodeId(f"n{index}") for index in range(4)]


def part(seq: int, node: NodeId = NODES[0], *copies: NodeId) -> SealCommitted:
    return SealCommitted(KEY, seq, node, [], list(copies))


async def test_seal_is_committed_with_the_last_part_and_before_it_the_old_one_stands(
    bus: Bus,
) -> None:
    records = SealRecords(bus)
    assert await records.newest(KEY) == 0
    for node in NODES:
        assert await records.newest(KEY) == 0
        await records.commit(part(3, node), len(NODES))
    assert await records.newest(KEY) == 3
    for node in NODES[1:]:
        await records.commit(part(5, node), len(NODES))
        assert await records.newest(KEY) == 3
    await records.commit(part(5), len(NODES))
    assert await records.newest(KEY) == 5


async def test_parts_that_come_at_once_are_all_taken(bus: Bus) -> None:
    records = SealRecords(bus)
    for seq in (2, 4):
        parts = [part(seq, node, NODES[index - 1]) for index, node in enumerate(NODES)]
        await asyncio.gather(*(records.commit(one, len(NODES)) for one in parts))
        record, _ = await records.read(KEY)
        assert (record.newest, record.is_whole) == (seq, True)
        assert sorted(record.parts, key=lambda p: p.node) == parts


async def test_part_that_is_added_again_changes_nothing(bus: Bus) -> None:
    records = SealRecords(bus)
    await records.commit(part(2), 1)
    before = await records.read(KEY)
    await records.commit(part(2), 1)
    assert await records.read(KEY) == before


async def test_record_of_an_older_release_is_a_committed_seal(bus: Bus) -> None:
    await bus.keys.put(Bucket.SEALS, str(KEY), encode(part(7)))
    records = SealRecords(bus)
    assert await records.newest(KEY) == 7
    await records.commit(part(9), 1)
    assert await records.newest(KEY) == 9
