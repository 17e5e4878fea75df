"""A checkpoint that cannot be written for a reason that nobody foresaw."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code, InternalError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap, TakeSnapshot, WriteCheckpoint
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.checkpoints.exporting import MAX_OPERATION_CHARS, Exporter
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.tiering.tiering import Tiering
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import state_directory

SIZE = 64 * 1024
KEY = DeploymentKey("acme", "job", "policy")


async def _offloaded(node: Node, tiering: Tiering) -> Rank:
    """A deployment whose whole state, at 1, is in host memory."""
    residency = node.records.residency
    residency.register(RegisterWpg(["token"], KEY, 1, [0], 0))
    (rank,) = residency.current(KEY, 1).ranks
    extent = await tiering.reserve(SIZE, "state")
    slots = [TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)]
    residency.register_heap(rank, RegisterHeap(SIZE, b""), TensorTable.of(slots), extent)
    residency.fill(rank, 1, digest_of(node.memory[extent].view(SIZE)))
    return rank


@asynccontextmanager
async def exporting(directory: Path) -> AsyncIterator[tuple[Node, Exporter, Rank]]:
    """With a deployment to save."""
    files = await asyncio.to_thread(state_directory, directory)
    node = node_on(files, device_bytes=SIZE, host_bytes=8 * SIZE)
    parts = parts_on(node, checkpoint_root=directory / "checkpoints")
    async with node.background.running():
        yield node, parts.exporter, await _offloaded(node, parts.tiering)
    node.close()


async def test_checkpoint_that_fails_as_nobody_foresaw_fails_alone_and_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that has no thread to give in that moment."""
    async with exporting(tmp_path) as (node, exporter, rank):
        await exporter.take_snapshot(rank, TakeSnapshot("op", "c", 1))
        loop, busy, last = asyncio.get_running_loop(), threading.Event(), ThreadPoolExecutor(1)
        loop.set_default_executor(last)
        last.submit(busy.wait)
        writing = asyncio.create_task(exporter.write(rank, WriteCheckpoint("op", "c", "{}")))
        await asyncio.sleep(0)  # it has asked for a thread to look what there is
        last.shutdown(wait=False)  # which is the last one
        busy.set()
        with pytest.raises(InternalError, match="RuntimeError"):
            await writing
        loop.set_default_executor(ThreadPoolExecutor(4))
        assert "Traceback" in caplog.text
        node.validate()
        await exporter.take_snapshot(rank, TakeSnapshot("op", "c", 1))
        await exporter.write(rank, WriteCheckpoint("op", "c", "{}"))
        assert (tmp_path / "checkpoints" / "acme" / "job" / "policy" / "c").is_dir()


async def test_operation_whose_id_has_no_end_is_refused(tmp_path: Path) -> None:
    async with exporting(tmp_path) as (_, exporter, rank):
        for operation in ("", "x" * (MAX_OPERATION_CHARS + 1)):
            with pytest.raises(CallerError, match=str(MAX_OPERATION_CHARS)) as caught:
                await exporter.take_snapshot(rank, TakeSnapshot(operation, "c", 1))
            info = caught.value.info
            assert (info.code, info.field) == (Code.INVALID_ARGUMENT, "operation")
