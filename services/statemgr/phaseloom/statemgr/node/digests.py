"""Digests of host copies, taken in the background while the device works on.

An offload ends when the bytes are in host memory and the device memory is released. The host copy
is then *dirty*: whole, but without a digest. The digest is taken here, after the switch, and a load
waits for it. A write to disk reads all bytes anyway and takes the digest itself. If the daemon is
killed, the next one takes it.

Invariant: no rank is loaded from its copy before the digest is taken, so the bytes do not change
meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.tensors.blockhash import (
    BLOCK_BYTES,
    checksum,
    combine_checksums,
    digest_in_threads,
    digest_of,
)
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.records.incarnations import HostCopy, Rank, State
from phaseloom.statemgr.records.residency import Residency

_SMALL_BYTES = 64 * 1024
"""Bytes that are hashed faster than a thread wakes up, such as a manifest."""


class Digests:
    """The digests that are being taken."""

    def __init__(
        self,
        background: Background,
        residency: Residency,
        memory: HostMemory,
        change: Callable[[], AbstractAsyncContextManager[object]],
    ) -> None:
        """Args: change: `Ledger.change`, which brings the manifest up to date."""
        self._background = background
        self._residency = residency
        self._memory = memory
        self._change = change
        self._under_way: dict[Rank, asyncio.Future[None]] = {}
        self._stopped = background.stopped

    def begin(self, ranks: Iterable[Rank]) -> None:
        """Start to take the digests of ranks that are offloaded and dirty."""
        for rank in ranks:
            is_open = rank.is_dirty and rank not in self._under_way and not self._stopped.is_set()
            if is_open and rank.copy is not None and rank.state is rank.copy.state is State.HOST:
                self._begin(rank)

    async def until_taken(self, rank: Rank) -> None:
        """Wait until the rank's host copy has its digest.

        Raises: ResourceError: the rank is lost, or the daemon stops.
        """
        while rank.is_dirty or rank.state is State.LOST:
            if rank.state is State.LOST or self._stopped.is_set():
                raise ResourceError(f"{rank} was lost before the digest of its host copy was taken")
            await asyncio.shield(self._under_way.get(rank) or self._begin(rank))

    async def until_ended(self, rank: Rank) -> None:
        """Wait until nothing reads the rank's host copy for its digest.

        Call this before giving back the copy's memory: a later read would occupy it again.
        """
        while (ending := self._under_way.get(rank)) is not None:
            await asyncio.shield(ending)

    def _begin(self, rank: Rank) -> asyncio.Future[None]:
        copy = rank.copy
        assert copy is not None
        assert copy.extent is not None
        # The view is made now: when the task runs, the rank may be lost and its extent freed.
        memory = self._memory[copy.extent].view(copy.num_bytes)
        ended = self._under_way[rank] = asyncio.get_running_loop().create_future()
        self._background.start(self._run(rank, copy, memory, ended))
        return ended

    async def _run(
        self, rank: Rank, copy: HostCopy, memory: memoryview, ended: asyncio.Future[None]
    ) -> None:
        begun = copy.num_writes
        try:
            checksums = await asyncio.to_thread(checksums_of, memory, self._stopped)
            # Some checksums are missing if it was stopped.
            digest = "" if self._stopped.is_set() else combine_checksums(checksums)
            # Ignore it if the rank is lost, or if a write to disk digested the copy, which was
            # then loaded and copied out again.
            is_same = rank.is_dirty and copy.num_writes == begun
            if digest and is_same and rank.state is not State.LOST:
                async with self._change():
                    self._residency.digested(rank, digest)
        finally:
            del self._under_way[rank]
            ended.set_result(None)
            self.begin([rank])


async def has_digest(memory: memoryview, digest: str) -> bool:
    """Whether the memory has this digest. An empty digest matches nothing."""
    if len(memory) <= _SMALL_BYTES:
        return bool(digest) and digest_of(memory) == digest
    return bool(digest) and await asyncio.to_thread(digest_in_threads, memory) == digest


def bad_copy(rank: Rank, reason: str) -> ResourceError:
    """The error to raise if a rank's host copy is bad."""
    return ResourceError(
        f"the host copy of {rank} is bad: {reason}",
        code=Code.DATA_LOSS,
        remedy="start a new incarnation, from its last seal",
        details={"deployment": rank.wpg.key, "rank": rank.index},
    )


def checksums_of(memory: memoryview, stopped: threading.Event) -> bytes:
    """Checksums of the memory's blocks, joined; incomplete once `stopped` is set.

    Blocking and slow: run it in a thread.
    """
    checksums = []
    for start in range(0, len(memory), BLOCK_BYTES):
        if stopped.is_set():
            break
        checksums.append(checksum(memory[start : start + BLOCK_BYTES]))
    return b"".join(checksums)
