"""The ranks of this node: calls to them, and the end of their incarnations."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_rank import (
    Copied,
    CopyIn,
    CopyOut,
    LoadStaged,
    StageState,
    StateMessage,
    StillMapped,
    Unmap,
    Unpin,
)
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.transport.framing import Peer, close_fds
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.stores import HostCopyStore, VersionStore, pool_of
from phaseloom.statemgr.records.incarnations import HostCopy, Rank, Wpg
from phaseloom.statemgr.records.residency import Residency

log = logging.getLogger(__name__)

CopyOrder = CopyIn | CopyOut | StageState | LoadStaged

_UNMAP_TIMEOUT_S = 5.0


class _NoAnswer(ResourceError):
    """A rank did not answer in time."""


class Ranks:
    """Calls the connected ranks, and ends incarnations."""

    def __init__(
        self,
        ledger: Ledger,
        residency: Residency,
        memory: HostMemory,
        copies: HostCopyStore,
        versions: VersionStore,
        *,
        connected: dict[Rank, Peer[StateMessage]],
        transfer_timeout_s: float,
    ) -> None:
        """Args: connected: the connection of each rank that is here.
        transfer_timeout_s: a rank that takes longer for one copy is lost.
        """
        self._ledger = ledger
        self._residency = residency
        self._memory = memory
        self._copies = copies
        self._versions = versions
        self.connected = connected
        self._transfer_timeout_s = transfer_timeout_s
        # One lock a device: only one switch at a time changes what is there.
        self._device_locks = [asyncio.Lock() for _ in residency.device_budget_bytes]

    # --- calls -----------------------------------------------------------------------------------

    async def order(self, rank: Rank, message: CopyOrder, fds: Sequence[int] = ()) -> Copied:
        """Make a rank copy memory. A rank that has exited, or does not answer in time, is lost.

        Args:   fds: descriptors of the memory to copy to or from; empty: the rank's own extent.
        Raises: ResourceError: the rank is lost, or its copy failed and was rolled back.
        """
        duplicates: list[int] = []
        try:
            with error_boundary(metrics.UNFORESEEN, "request"):
                async with self._ledger.change():
                    # While the manifest is written, the memory may be given up, and another file
                    # may get the number of its descriptor.
                    for fd in fds:
                        duplicates.append(os.dup(fd))
                return await self._order(rank, message, duplicates)
        finally:
            close_fds(duplicates)

    async def _order(self, rank: Rank, message: CopyOrder, fds: list[int]) -> Copied:
        peer = self.connected.get(rank)
        labels = {"node": self._ledger.node, "direction": _direction(message)}
        try:
            with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                answer = await self._call(rank, message, self._transfer_timeout_s, fds)
        except _NoAnswer:
            self.retire(rank.wpg, f"no answer within {self._transfer_timeout_s} s")
            raise
        except PhaseloomError as error:
            if peer is None or not peer.closed.done():
                raise
            self.retire(rank.wpg, "its connection ended")
            raise ResourceError(f"{rank} was lost during {type(message).__name__}") from error
        if not isinstance(answer, Copied):
            order, reply = type(message).__name__, type(answer).__name__
            raise self.broken_protocol(rank, f"it answered {order} with {reply}")
        if not (isinstance(message, CopyOut) and message.whole_at >= 0):
            # With `whole_at` the rank only says whether there is anything to copy.
            metrics.count(metrics.TRANSFER_MOVED, rank.heap_bytes, **labels)
        return answer

    async def unpin(self, rank: Rank) -> None:
        """Have a rank unpin its extent's pages, which are about to be given back; no-op for a rank
        that does not pin them."""
        if rank.pins:
            await self._call(rank, Unpin(), self._transfer_timeout_s)

    async def unmap(self, rank: Rank) -> list[VersionKey] | None:
        """Have a rank unmap the memory that it only keeps for reuse.

        The system gets pages back only once no process has them mapped.

        Returns: the versions that the rank still uses; None: the rank has left or does not say.
        """
        try:
            answer = await self._call(rank, Unmap(), _UNMAP_TIMEOUT_S)
        except PhaseloomError as error:
            log.warning("%s did not unmap host memory: %r", rank, error)
            return None
        return answer.versions if isinstance(answer, StillMapped) else None

    async def _call(
        self, rank: Rank, message: StateMessage, timeout_s: float, fds: Sequence[int] = ()
    ) -> StateMessage:
        """Raises: _NoAnswer: no answer in time. ResourceError: the rank has left or failed."""
        peer = self.connected.get(rank)
        if peer is None:
            raise ResourceError(f"{rank} has lost its rank")
        try:
            async with asyncio.timeout(timeout_s):
                answer, answer_fds = await peer.call(message, fds)
        except TimeoutError:
            raise _NoAnswer(
                f"{rank} did not answer {type(message).__name__} in time",
                code=Code.DEADLINE_EXCEEDED,
            ) from None
        # No answer hands over memory.
        close_fds(answer_fds)
        return answer

    @asynccontextmanager
    async def holding(self, wpg: Wpg) -> AsyncIterator[None]:
        """Keep other switches away from an incarnation's devices within the block."""
        try:
            async with AsyncExitStack() as stack:
                # In the order of the devices, so that no two switches wait for each other.
                for device in sorted(set(wpg.devices)):
                    await stack.enter_async_context(self._device_locks[device])
                yield
        finally:
            self._ledger.announce()

    # --- the end of incarnations -----------------------------------------------------------------

    def retire(self, wpg: Wpg, reason: str) -> None:
        """End an incarnation: cut its ranks off and free its memory. Idempotent."""
        self._residency.lose(wpg)
        for rank in wpg.ranks:
            peer = self.connected.pop(rank, None)
            if peer is not None:
                log.info("%s is over: %s", rank, reason)
                peer.cut(reason)
        for key in self._versions.records.unfinished(wpg.key, wpg.incarnation):
            version = self._versions.records.find(key)
            if version is not None:
                self._versions.drop(version)
        self._memory.drop_pool(pool_of(wpg))
        self.settle(wpg)

    def broken_protocol(self, rank: Rank, reason: str) -> ResourceError:
        """End the incarnation of a rank that broke the protocol. Returns: the error to raise."""
        self.retire(rank.wpg, reason)
        return ResourceError(f"{rank} broke the protocol and was cut off")

    def lose(self, copy: HostCopy, reason: str) -> None:
        """End all incarnations that refer to a host copy whose bytes are lost."""
        for wpg in copy.wpgs:
            self.retire(wpg, reason)

    def settle(self, wpg: Wpg) -> None:
        """Free what an incarnation no longer needs: the memory of a lost incarnation once no seal
        needs it, and the snapshots of a seal that has ended."""
        extents, copies = self._residency.reap(wpg)
        is_kept = not wpg.is_lost and wpg.ranks[0].is_in_extent  # snapshots, for the next seal
        for extent in extents:
            if is_kept:
                self._memory.park(extent, pool_of(wpg))
            else:
                self._memory.free(extent)
        for copy in copies:
            self._copies.free(copy)
        self._ledger.announce()


def _direction(message: CopyOrder) -> str:
    match message:
        case CopyIn() | LoadStaged():
            return "load"
        case StageState():
            return "copy"
    return "offload" if message.release else "copy"
