"""The ranks of a WPG as their leader calls them: one call at a time, on all of them or on none.

The leader's own part runs in its device thread; the other ranks' parts are asked of them through
the agent. The backends may talk to one another meanwhile, so where one part fails the others may
never return. Then nobody waits for them, and the WPG cannot go on.
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
SharesOfOthers = list[list[ShareResult]]
"""[rank − 1][operation]"""


class Broken(Exception):
    """A part of a call failed, so the ranks do not agree any more. The exception's cause is the
    failure."""


class GroupLost(Exception):
    """All ranks are alive and cannot reach one another, or a resource that they need.

    The call is not at fault: its outcome is left to the next incarnation. The exception's cause is
    the failure.
    """


@dataclass(frozen=True, slots=True)
class Ranks:
    device_thread: ThreadPoolExecutor
    agent: Peer[RankMessage]
    num_ranks: int = 1
    share: ComputeShare = field(default_factory=whole_device)
    """This rank's share of its device."""

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    async def here(self, call: Callable[[], T]) -> T:
        """Run `call` in this rank's device thread."""

        def run() -> T:
            self.share.begin()
            try:
                return call()
            finally:
                self.share.end()

        return await asyncio.get_running_loop().run_in_executor(self.device_thread, run)

    async def everywhere(self, own: Callable[[], T], share: RunShare) -> tuple[T, SharesOfOthers]:
        """Run the leader's part of a call in its device thread, and the other ranks' parts of it.

        Raises: the error of `own`, where the leader is alone; else Broken or GroupLost.
        """
        return await self.together(self.here(own), share)

    async def together(self, own: Awaitable[T], share: RunShare) -> tuple[T, SharesOfOthers]:
        """Run a call as `everywhere` does, where the leader's part is several calls in its device
        thread."""
        if self.is_alone:
            return await own, []
        here = asyncio.ensure_future(own)
        others = asyncio.ensure_future(self.agent.call(share))
        try:
            await asyncio.wait({here, others}, return_when=asyncio.FIRST_EXCEPTION)
            failures = [
                part.exception() for part in (here, others) if part.done() and part.exception()
            ]
            if failures:
                # The agent does not answer where a rank has died.
                await self.agent.call(RollCall())
                raise _end_of(failures[0]) from failures[0]
        finally:
            here.cancel()
            others.cancel()
        answer, _ = others.result()
        assert isinstance(answer, SharesDone), answer
        return here.result(), answer.results


def _end_of(failure: BaseException | None) -> Exception:
    """The exception for a call, from its first failure."""
    is_away = isinstance(failure, ResourceError) and failure.info.code is Code.UNAVAILABLE
    return GroupLost() if is_away else Broken()
