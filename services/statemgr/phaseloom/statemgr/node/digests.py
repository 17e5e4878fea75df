"""Digests of host copies, taken beside what the device does next.

An offload ends when the bytes are in host memory and the device's are given back. The copy is
*dirty* then: whole, with no digest, which is taken here, after the switch. Who needs it (a load)
waits for it; who reads the copy anyhow, to write it to disk, takes it there. After a kill of the
daemon the next one takes it. Invariant: no rank runs on its copy before the digest is in, so the
bytes stand still.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum, combined
from phaseloom.statemgr.memory.extents import HostMemory
from phaseloom.statemgr.residency.residency import Rank, Residency, State


class Digests:
    """`start` it in a task group; `stop` ends what is under way."""

    def __init__(
        self,
        residency: Residency,
        memory: HostMemory,
        change: Callable[[], AbstractAsyncContextManager[object]],
    ) -> None:
        """Args: change: `Node.change`, which brings the index up to date."""
        self._residency = residency
        self._memory = memory
        self._change = change
        self._under_way: dict[Rank, asyncio.Future[None]] = {}
        self._stopped = threading.Event()
        self._tasks: asyncio.TaskGroup

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        self._stopped.set()

    def begin(self, ranks: Iterable[Rank]) -> None:
        """Take the digests of those that are offloaded and dirty, in the background."""
        for rank in ranks:
            is_open = rank.is_dirty and rank not in self._under_way
            if is_open and rank.state is State.HOST and not self._stopped.is_set():
                self._begin(rank)

    async def taken(self, rank: Rank) -> None:
        """Wait until its host copy has its digest. Raises: ResourceError: it is lost."""
        while rank.is_dirty:
            if rank.state is State.LOST or self._stopped.is_set():
                raise ResourceError(f"{rank} was lost before the digest of its host copy was taken")
            await asyncio.shield(self._under_way.get(rank) or self._begin(rank))

    async def ended(self, rank: Rank) -> None:
        """Nothing reads its host copy for that any more: to read memory that was given back takes
        it again."""
        while (ending := self._under_way.get(rank)) is not None:
            await asyncio.shield(ending)

    def _begin(self, rank: Rank) -> asyncio.Future[None]:
        assert rank.extent is not None
        # Now: by the time that the task runs, the rank may be lost and its extent freed.
        memory = self._memory[rank.extent].view(rank.extent_bytes)
        ended = self._under_way[rank] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._run(rank, memory, ended))
        return ended

    async def _run(self, rank: Rank, memory: memoryview, ended: asyncio.Future[None]) -> None:
        copy = rank.num_copies
        try:
            checksums = await asyncio.to_thread(checksums_of, memory, self._stopped)
            # What it returns when stopped is not all of them.
            digest = "" if self._stopped.is_set() else combined(checksums)
            # Of a lost one there is nothing to say; one that was written meanwhile has its own,
            # and may have been loaded and copied out again since.
            is_same = rank.is_dirty and rank.num_copies == copy
            if digest and is_same and rank.state is not State.LOST:
                async with self._change():
                    self._residency.digested(rank, digest)
        finally:
            del self._under_way[rank]
            ended.set_result(None)
            self.begin([rank])


def checksums_of(memory: memoryview, stopped: threading.Event) -> bytes:
    """Of its blocks; once it is stopped, of no more of them. Long: run it in a thread."""
    checksums = []
    for start in range(0, len(memory), BLOCK_BYTES):
        if stopped.is_set():
            break
        checksums.append(checksum(memory[start : start + BLOCK_BYTES]))
    return b"".join(checksums)
