"""Ranks' states in memory on their way into a checkpoint, and what proves them.

The checksums of a cut are taken right after it, beside what the ranks do next, and are in the
books: what is written is what was cut, also where it is a later life of this daemon that writes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import contained
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, CHECKSUM_BYTES, combined
from phaseloom.statemgr.checkpoints.snapshots import Snapshot
from phaseloom.statemgr.disk.files import NEVER
from phaseloom.statemgr.disk.statefile import names_within
from phaseloom.statemgr.node.digests import checksums_of
from phaseloom.statemgr.node.node import Node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedState:
    """A rank's state."""

    rank: int
    """Among those of all nodes."""
    tensors: list[TensorSlot]
    memory: memoryview
    checksums: bytes = field(repr=False)
    """Of its blocks, as it was when it came here."""

    @property
    def digest(self) -> str:
        return combined(self.checksums)


def check(key: DeploymentKey, held: Sequence[StagedState]) -> None:
    """Whether all of it is as it was: so is what was read from it before. In a thread.

    Raises: ResourceError: DATA_LOSS, with all names.
    """
    for each in held:
        found = checksums_of(each.memory, NEVER)
        for at in range(0, len(each.checksums), CHECKSUM_BYTES):
            if found[at : at + CHECKSUM_BYTES] != each.checksums[at : at + CHECKSUM_BYTES]:
                raise _changed(key, each, at // CHECKSUM_BYTES * BLOCK_BYTES)


def _changed(key: DeploymentKey, held: StagedState, start: int) -> ResourceError:
    end = min(start + BLOCK_BYTES, len(held.memory))
    return ResourceError(
        f"{key} rank {held.rank}, bytes {start} to {end} of its state "
        f"({names_within(held.tensors, start, end)}): the copy for a checkpoint has changed in "
        "host memory since it was made",
        code=Code.DATA_LOSS,
        remedy="save again; if it comes again, the node's memory fails",
        details={"deployment": str(key), "rank": str(held.rank), "offset": str(start)},
    )


class SnapshotSums:
    """`start` it in a task group; `stop` ends what is under way."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._under_way: dict[Snapshot, asyncio.Future[None]] = {}
        self._stopped = threading.Event()
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        self._stopped.set()

    def begin(self, cut: Snapshot) -> asyncio.Future[None]:
        """Take its checksums, in the background."""
        # Now: by the time that the task runs, the cut may be given up.
        memories = [self._node.memory[p.extent].view(p.num_bytes) for p in cut.parts]
        ended = self._under_way[cut] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._run(cut, memories, ended))
        return ended

    async def taken(self, cut: Snapshot) -> None:
        """Wait for them. Raises: PhaseloomError: they cannot be taken."""
        if not cut.has_checksums:
            # The daemon that made it was killed before they were in.
            await asyncio.shield(self._under_way.get(cut) or self.begin(cut))

    async def _run(
        self, cut: Snapshot, memories: list[memoryview], ended: asyncio.Future[None]
    ) -> None:
        try:
            with contained(metrics.UNFORESEEN, "checkpoint"):
                async with self._node.change():
                    for part, memory in zip(cut.parts, memories, strict=True):
                        checksums = await asyncio.to_thread(checksums_of, memory, self._stopped)
                        if self._stopped.is_set():
                            raise ResourceError(f"{cut} is not written: this daemon stops")
                        part.checksums = checksums
            log.info("%s has its checksums", cut)
            ended.set_result(None)
        except PhaseloomError as error:
            ended.set_exception(error)
            # Whoever writes it may never come.
            ended.exception()
        finally:
            memories.clear()
            del self._under_way[cut]
