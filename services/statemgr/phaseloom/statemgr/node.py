"""What the shell's parts share: the books, the memory behind them, and the ranks' connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from phaseloom.common import metrics
from phaseloom.common.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.framing import Peer
from phaseloom.common.ids import NodeId
from phaseloom.common.statewire import Copied, CopyIn, CopyOut, StateMessage
from phaseloom.statemgr.core.books import books_of
from phaseloom.statemgr.core.residency import Rank, Residency, Wpg
from phaseloom.statemgr.core.versions import Version, Versions
from phaseloom.statemgr.keeping import Keeper
from phaseloom.statemgr.memory import HostMemory

log = logging.getLogger(__name__)


class Node:
    """One node's state: pure books in `residency` and `versions`, bytes in `memory`."""

    def __init__(
        self,
        name: NodeId,
        device_budget_bytes: list[int],
        host_budget_bytes: int,
        transfer_timeout_s: float,
    ) -> None:
        self.name = name
        self.residency = Residency(device_budget_bytes)
        self.versions = Versions()
        self.memory = HostMemory(host_budget_bytes)
        self.endpoint = ""
        """host:port where this daemon serves weights versions."""
        self.keeper = Keeper(
            self.memory, lambda: books_of(self.residency, self.versions, self.endpoint)
        )
        self.ranks: dict[Rank, Peer[StateMessage]] = {}
        self.device_locks = [asyncio.Lock() for _ in device_budget_bytes]
        """One switch at a time a device."""
        self.settled = asyncio.Event()
        """What a killed daemon held is taken over or given up: the books may be used."""
        self.on_retired: Callable[[Wpg], None] = lambda wpg: None
        """Called as a life ends, maybe more than once."""
        self._transfer_timeout_s = transfer_timeout_s
        self._changed = asyncio.Event()

    async def ask(self, rank: Rank, message: CopyIn | CopyOut) -> Copied:
        """Let a rank copy. A rank that is gone, or does not answer in time, is lost.

        Raises: ResourceError: it is lost, or it failed and rolled back.
        """
        await self.keeper.record()
        peer = self.ranks.get(rank)
        if peer is None:
            raise ResourceError(f"{rank} has lost its rank")
        labels = {"node": self.name, "direction": _direction(message)}
        try:
            async with asyncio.timeout(self._transfer_timeout_s):
                with metrics.timed(metrics.TRANSFER_DURATION, **labels):
                    answer, _ = await peer.call(message)
        except TimeoutError:
            self.retire(rank.wpg, f"no answer within {self._transfer_timeout_s} s")
            raise ResourceError(
                f"{rank} did not answer {type(message).__name__} in time",
                code=Code.DEADLINE_EXCEEDED,
            ) from None
        except PhaseloomError as error:
            if not peer.closed.done():
                raise
            self.retire(rank.wpg, "its connection ended")
            raise ResourceError(f"{rank} was lost during {type(message).__name__}") from error
        if not isinstance(answer, Copied):
            answered = type(answer).__name__
            self.retire(rank.wpg, f"it answered {type(message).__name__} with {answered}")
            raise ResourceError(f"{rank} broke the protocol and was cut off")
        metrics.count(metrics.TRANSFER_MOVED, rank.heap_bytes, **labels)
        return answer

    @asynccontextmanager
    async def holding(self, devices: Callable[[], set[int]]) -> AsyncIterator[None]:
        """Keep other switches away from these devices; what they are may change while waiting.

        Taken in the order of their numbers, so that two never wait for each other.
        """
        while True:
            wanted = devices()
            async with AsyncExitStack() as stack:
                for device in sorted(wanted):
                    await stack.enter_async_context(self.device_locks[device])
                if devices() <= wanted:
                    yield
                    return

    def retire(self, wpg: Wpg, reason: str) -> None:
        """This life is over: cut its ranks off and free what it held. Idempotent."""
        self.on_retired(wpg)
        self.residency.lose(wpg)
        for rank in wpg.ranks:
            peer = self.ranks.pop(rank, None)
            if peer is not None:
                log.info("%s is over: %s", rank, reason)
                peer.cut(reason)
        for key in self.versions.unfinished(wpg.key, wpg.incarnation):
            self.drop_version(self.versions.find(key))
        self.memory.drop_pool(pool_of(wpg))
        self.settle(wpg)

    def settle(self, wpg: Wpg) -> None:
        """Free the extents of a lost one as soon as no seal needs them; wake those who wait."""
        for extent in self.residency.reap(wpg):
            self.memory.free(extent)
        self.announce()

    def announce(self) -> None:
        """Something changed that somebody may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for a change of the books after which `predicate` holds."""
        while not predicate():
            await self._changed.wait()

    def drop_version(self, version: Version | None) -> None:
        """Free a version's memory now, or when its last user is done."""
        if version is not None:
            dropped = self.versions.drop(version.key)
            if dropped is not None and dropped[1] is not None:
                self._recycle(version, dropped[1])

    def release_version(self, version: Version) -> None:
        """The counterpart of `versions.acquire`."""
        extent = self.versions.release(version)
        if extent is not None:
            self._recycle(version, extent)

    def _recycle(self, version: Version, extent: int) -> None:
        """Park an extent where it may be reused, else free it.

        Whoever wrote it has it mapped. So it only goes back to the same life of the same policy,
        or, where this daemon wrote it, to versions of the same policy.
        """
        writer = next((r.wpg for r in self.ranks if _writes(r.wpg, version)), None)
        if not version.is_committed or (version.incarnation is not None and writer is None):
            self.memory.free(extent)
        else:
            self.memory.park(extent, pool_of(writer) if writer else str(version.key.policy))

    def validate(self) -> None:
        """Raises: AssertionError: the books contradict themselves or one another."""
        self.residency.validate()
        self.versions.validate()
        self.memory.arena.validate()
        owned = [*self.residency.extents(), *self.versions.extents()]
        assert len(owned) == len(set(owned)), "one extent, two owners"
        assert set(owned) == self.memory.arena.extents_in_use(), "an extent without an owner"


def _writes(wpg: Wpg, version: Version) -> bool:
    return wpg.key == version.key.policy and wpg.incarnation == version.incarnation


def _direction(message: CopyIn | CopyOut) -> str:
    if isinstance(message, CopyIn):
        return "load"
    return "offload" if message.release else "copy"


def pool_of(wpg: Wpg) -> str:
    """Where extents come from that this rank may write."""
    return f"{wpg.key}#{wpg.incarnation}"
