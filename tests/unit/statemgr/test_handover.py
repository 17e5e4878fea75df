"""What is taken over from a killed daemon: verified, and in time for those who wait for it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap, StateMessage
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.common.transport.framing import Peer
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.ledger import INDEX_HANDLES
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.manifest import encode_manifest, encode_record, manifest_of
from phaseloom.statemgr.records.versions import Version
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import state_directory

SIZE = 4096
SLOT = TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)


class SideBySide(ThreadPoolExecutor):
    """Work ends only where another piece of work is under way, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._meeting = threading.Barrier(number, timeout=10)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def work() -> Any:
            self._meeting.wait()
            return fn(*args, **kwargs)

        return super().submit(work)


def _node(directory: StateDirectory) -> Node:
    return node_on(directory, device_bytes=SIZE, host_bytes=16 * SIZE)


def _filled(node: Node, number: int) -> tuple[int, str]:
    """An extent, and its digest."""
    extent = node.memory.reserve(SIZE, "state", may_freeze=True)
    memory = node.memory[extent].view(SIZE)
    memory[:] = bytes([number]) * SIZE
    return extent, digest_of(memory)


def _content(node: Node, number: int) -> None:
    node.records.residency.register(RegisterWpg([f"token {number}"], _key(number), 1, [0], 0))
    (rank,) = node.records.residency.current(_key(number), 1).ranks
    extent, digest = _filled(node, number)
    heap = RegisterHeap(SIZE, b"", frozen=True)
    node.records.residency.register_heap(rank, heap, TensorTable.of([SLOT]), extent)
    node.copies.fill(rank, 1, digest)


def _version(node: Node, number: int) -> None:
    extent, digest = _filled(node, number)
    key, table = VersionKey(_key(number), 1), TensorTable.of([SLOT])
    assert node.records.versions.take_over(Version(key, SIZE, table, digest, extent, 1))


def _key(number: int) -> DeploymentKey:
    return DeploymentKey("acme", "job", f"d{number}")


async def test_what_is_taken_over_is_verified_side_by_side(tmp_path: Path) -> None:
    """Agent and ranks wait for no more than 30 s, whatever the node has."""
    directory = await asyncio.to_thread(state_directory, tmp_path)
    before, node = _node(directory), _node(directory)
    for number in range(2):
        _content(before, number)
    for number in range(2, 4):
        _version(before, number)
    manifest = manifest_of(before.records)
    index = [os.memfd_create("index") for _ in INDEX_HANDLES]
    os.pwrite(index[0], encode_record(1, encode_manifest(manifest)), 0)
    handles = before.memory.handles()
    adoption = parts_on(node).begin_handover("index")
    adoption.accept([*INDEX_HANDLES, *handles], [*index, *map(os.dup, handles.values())])
    one, other = socket.socketpair()
    agent: Peer[StateMessage] = Peer(one, StateMessage)
    asyncio.get_running_loop().set_default_executor(SideBySide(2))
    with other:
        await adoption.restore(agent)
        assert len(node.records.host_copies.all()) == 2
        assert len(node.records.versions.committed()) == 2
        node.validate()
        await agent.close()
    for each in (before, node):
        each.close()
