"""Seals as copies of a state, looked for while other things go on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import LoadedFrom
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.core.hostseals import HostSeal
from phaseloom.statemgr.core.statefile import Section, seal_header
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.seals.imaging import image_bytes, write_image
from phaseloom.statemgr.seals.sealedcopies import SealedCopies

SIZE = 4096
KEY = DeploymentKey("acme", "job", "policy")
SLOTS = [TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)]


async def test_seal_in_host_memory_that_goes_while_it_is_looked_for_is_whole_all_the_same(
    tmp_path: Path,
) -> None:
    node = Node(NodeId("n"), [SIZE], 64 * SIZE, 10.0)
    directory = await asyncio.to_thread(StateDirectory, tmp_path)
    node.residency.register(["token"], KEY, 1, [0], 0)
    (rank,) = node.residency.current(KEY, 1).ranks
    node.residency.register_heap(rank, SIZE, SLOTS, node.memory.reserve(SIZE, "state"))
    content = memoryview(bytearray(b"w" * SIZE))
    header = seal_header(KEY, 1, [Section(SIZE, SLOTS, digest_of(content))])
    num_bytes = image_bytes(header)
    extent = node.memory.reserve(num_bytes, "seal")
    write_image(node.memory[extent].view(num_bytes), header, [content])
    node.seals.add(HostSeal(KEY, 1, extent, num_bytes))

    thread, gate = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(thread)
    thread.submit(gate.wait)
    finding = asyncio.create_task(
        SealedCopies(node, directory).find(rank.wpg, 1, [digest_of(content)])
    )
    await asyncio.sleep(0)  # it has begun, and its thread has not
    node.seals.pop(KEY, 1)
    node.memory.free(extent)
    gate.set()
    (copy,) = await finding
    assert copy.source is LoadedFrom.HOST_SEAL
    memory = memoryview(bytearray(SIZE))
    copy.read(copy.places[0], memory)
    assert memory == content
    node.keeper.close()
    node.memory.close()
