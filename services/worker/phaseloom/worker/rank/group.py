"""The ranks of a WPG as their leader calls them: each call runs on all of them.

The leader's part runs in its device thread; the agent forwards the other ranks' parts. The backends
may communicate during a call, so the other parts may hang after one part fails. The leader does not
wait for them then, and the WPG cannot continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.rank.computeshare import ComputeShare, whole_device
from phaseloom.worker.rank.wire import RankMessage, RollCall, RunShare, ShareResult, SharesDone

T = TypeVar("T")
PeerShares = list[list[ShareResult]]
"""[rank − 1][operation]"""


class RanksDiverged(Exception):
    """A part of a call failed, so the ranks no longer agree. The exception's cause is the
    failure."""


class GroupLost(Exception):
    """All ranks are alive but cannot reach one another, or a resource that they need.

    The call is not at fault, so the next incarnation decides its outcome. The exception's cause is
    the failure.
    """


@dataclass(frozen=True, slots=True)
class WpgRanks:
    device_thread: ThreadPoolExecutor
    agent: Peer[RankMessage]
    num_ranks: int = 1
    share: ComputeShare = field(default_factory=whole_device)
    """This rank's share of its device."""

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    async def on_device_thread(self, call: Callable[[], T]) -> T:
        """Run `call` in this rank's device thread."""

        def run() -> T:
            self.share.start_work()
            try:
                return call()
            finally:
                self.share.end_work()

        return await asyncio.get_running_loop().run_in_executor(self.device_thread, run)

    async def on_all_ranks(
        self, local_part: Callable[[], T], share: RunShare
    ) -> tuple[T, PeerShares]:
        """Run the leader's part of a call in its device thread, and the other ranks' parts of it.

        Raises: the error of `local_part` if the leader is alone; otherwise RanksDiverged or
                 GroupLost.
        """
        return await self.together(self.on_device_thread(local_part), share)

    async def together(self, local_part: Awaitable[T], share: RunShare) -> tuple[T, PeerShares]:
        """Run a call like `on_all_ranks`, with an awaitable as the leader's part."""
        if self.is_alone:
            return await local_part, []
        local_task = asyncio.ensure_future(local_part)
        peers = asyncio.ensure_future(self.agent.call(share))
        try:
            await asyncio.wait({local_task, peers}, return_when=asyncio.FIRST_EXCEPTION)
            failures = [
                part.exception() for part in (local_task, peers) if part.done() and part.exception()
            ]
            if failures:
                # The agent does not answer if a rank has died.
                await self.agent.call(RollCall())
                first = failures[0]
                is_away = isinstance(first, ResourceError) and first.info.code is Code.UNAVAILABLE
                raise (GroupLost() if is_away else RanksDiverged()) from first
        finally:
            local_task.cancel()
            peers.cancel()
        answer, _ = peers.result()
        assert isinstance(answer, SharesDone), answer
        return local_task.result(), answer.results
