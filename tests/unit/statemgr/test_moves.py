"""Host copies that go to NVMe and come back, whoever still looks at their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.incarnations import HostCopy, State
from phaseloom.statemgr.tiering.tiering import Tiering
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import state_directory
from tests.support.threads import Remembering

SIZE = 16 * 4096


@dataclass
class World:
    node: Node
    tiering: Tiering

    def add(self, name: str) -> HostCopy:
        """A frozen deployment whose host copy nobody else has."""
        node, key = self.node, DeploymentKey("acme", "job", name)
        node.records.residency.register(RegisterWpg([name], key, 1, [0], 0))
        (rank,) = node.records.residency.current(key, 1).ranks
        slots = [TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)]
        extent = node.memory.reserve(SIZE, name, may_freeze=True)
        heap = RegisterHeap(SIZE, b"", frozen=True)
        node.records.residency.register_heap(rank, heap, TensorTable.of(slots), extent)
        memory = node.memory[extent].view(SIZE)
        memory[:] = name.encode() * SIZE
        digest = digest_of(memory)
        node.copies.fill(rank, 1, digest)
        assert rank.copy is not None
        return rank.copy


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    files = await asyncio.to_thread(state_directory, directory)
    node = node_on(files, device_bytes=SIZE, host_bytes=2 * SIZE)
    tiering = parts_on(node, nvme_bytes=10 * SIZE).tiering
    async with node.background.running():
        yield World(node, tiering)
        await node.ledger.until(lambda: not node.copies.moves)
        node.validate()
    node.close()


async def test_copy_comes_up_immutable_though_a_thread_forgets_late_what_it_was_given(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        copy = w.add("a")
        await w.tiering._demote(copy)
        assert (copy.state, copy.extent) == (State.DEMOTED, None)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(Remembering())
        await w.tiering._promote(copy)
        assert copy.state is State.HOST
        assert copy.extent is not None
        extent = w.node.memory[copy.extent]
        assert extent.is_frozen
        assert digest_of(extent.readable(SIZE)) == copy.digest
