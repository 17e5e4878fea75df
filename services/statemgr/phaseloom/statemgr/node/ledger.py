"""The ledger: every change of what this node holds passes through it.

It keeps the agent's handles and the manifest up to date, which outlive this process, and wakes
those who wait for a change. A handle is the number under which the agent keeps a duplicate of a
descriptor. The manifest is in two memfds that are written in turn, the *index*.

Invariants: before anything leaves this process (an answer, an order to a rank), `Ledger.change`
has recorded it, so that the next daemon finds every promise in the manifest. A handle is with the
agent before the manifest names its extent, and is dropped only after the manifest no longer does.
An agent that does not accept handles in time is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from phaseloom.common.contract.errors import PhaseloomError, ResourceError
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.state_agent import KeepHandles
from phaseloom.common.contract.state_rank import StateMessage
from phaseloom.common.transport.framing import MAX_FDS, Peer, close_fds
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.records.manifest import Manifest, encode_manifest, encode_record

log = logging.getLogger(__name__)

INDEX_HANDLES = (-1, -2)
"""Handles of the index's two memfds. Extents have positive handles."""
_KEEP_TIMEOUT_S = 10.0


class Ledger:
    """The daemon's record of changes; see the module."""

    def __init__(self, node: NodeId, memory: HostMemory, describe: Callable[[], Manifest]) -> None:
        """Args: describe: returns the manifest of what the node holds now."""
        self.node = node
        self.index = secrets.token_hex(8)
        """Name of this set of handles. An agent with handles of another name has none of these."""
        self.settled = asyncio.Event()
        """Set once everything that a killed daemon held is taken over or given up. The records are
        usable from then on."""
        self._changed = asyncio.Event()
        self._memory = memory
        self._describe = describe
        self._fds = [os.memfd_create("phaseloom: index", os.MFD_CLOEXEC) for _ in INDEX_HANDLES]
        self._generation = 0
        self._written = b""
        self._agent: Peer[StateMessage] | None = None
        self._kept_handles: set[int] = set()
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[AsyncExitStack]:
        """Bring the manifest up to date when the block ends, however it ends.

        Memory and files that the older manifest names must outlast it. The caller frees them in
        callbacks that it pushes on the stack, which run once the new manifest is written.
        """
        async with AsyncExitStack() as after_recording:
            try:
                yield after_recording
            finally:
                await self._record()

    def announce(self) -> None:
        """Wake everyone in `until`, because something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until `predicate` holds; each `announce` evaluates it again."""
        while not predicate():
            await self._changed.wait()

    async def until_settled(self, timeout_s: float) -> None:
        """Wait until the records are usable. Raises: ResourceError: not in time."""
        try:
            await asyncio.wait_for(self.settled.wait(), timeout_s)
        except TimeoutError:
            raise ResourceError(
                f"{self.node} is still taking over the state of its previous daemon",
                remedy="retry, or ask another node",
            ) from None

    # --- what the agent keeps ---

    def attach(self, agent: Peer[StateMessage]) -> None:
        """Let this agent keep the handles from now on. Handles that it kept before are void."""
        self._agent, self._kept_handles = agent, set()
        self.index = secrets.token_hex(8)

    def take_over(
        self,
        agent: Peer[StateMessage],
        index: str,
        fds: list[int],
        generation: int,
        kept_handles: set[int],
    ) -> None:
        """Continue with the index of the previous daemon, whose handles this agent keeps.

        Args: fds: the two memfds of the index.
              generation: of the newest record in them.
              kept_handles: the handles that the agent keeps.
        """
        close_fds(self._fds)
        self._fds, self._generation, self._written = fds, generation, b""
        self.index, self._agent, self._kept_handles = index, agent, kept_handles

    def detach(self, agent: Peer[StateMessage]) -> None:
        """Forget the agent if it is the attached one. Nothing is recorded until another one
        comes."""
        if self._agent is agent:
            self._agent, self._kept_handles = None, set()

    def close(self) -> None:
        close_fds(self._fds)
        self._fds = []

    async def _record(self) -> None:
        """Bring the agent's handles and the manifest up to date. Raises nothing.

        If another agent comes meanwhile, it has none of the handles, so it gets all of them.
        """
        async with self._lock:
            while (agent := self._agent) is not None:
                # The index's memfds go last (their handles are negative): the manifest names the
                # others.
                missing = sorted(self._handles().keys() - self._kept_handles, reverse=True)
                await self._send_handles(agent, keep=missing, drop=[])
                self._write()
                dropped = sorted(self._kept_handles - self._handles().keys())
                await self._send_handles(agent, keep=[], drop=dropped)
                if self._agent is agent:
                    return

    def _handles(self) -> dict[int, int]:
        return self._memory.handles() | dict(zip(INDEX_HANDLES, self._fds, strict=True))

    async def _send_handles(
        self, agent: Peer[StateMessage], keep: list[int], drop: list[int]
    ) -> None:
        for start in range(0, max(len(keep), bool(drop)), MAX_FDS):
            if self._agent is not agent:
                return
            # Looked up now: an extent may be freed while one before it was on its way.
            handles = self._handles()
            batch = [handle for handle in keep[start : start + MAX_FDS] if handle in handles]
            message = KeepHandles(self.index, batch, drop)
            try:
                async with asyncio.timeout(_KEEP_TIMEOUT_S):
                    await agent.call(message, [handles[handle] for handle in batch])
            except (PhaseloomError, TimeoutError) as error:
                if not agent.closed.done():
                    log.error("cutting the agent off because it does not keep handles: %s", error)
                    agent.cut("it does not keep handles")
                self.detach(agent)
                return
            if self._agent is agent:
                self._kept_handles |= set(batch)
                self._kept_handles -= set(drop)

    def _write(self) -> None:
        payload = encode_manifest(self._describe())
        if payload == self._written:
            return
        record = memoryview(encode_record(self._generation + 1, payload))
        fd = self._fds[(self._generation + 1) % len(self._fds)]
        offset = 0
        try:
            while offset < len(record):
                offset += os.pwrite(fd, record[offset:], offset)
        except OSError as error:
            # The older record stands. The next daemon verifies its claims.
            log.error("the manifest cannot be updated: %s", error)
            return
        self._generation += 1
        self._written = payload
