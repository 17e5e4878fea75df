"""A connection that outlives the daemon: real sockets, and a daemon that is not ready at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_rank import Done, RankHello, StateMessage
from phaseloom.common.transport import framing
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.state.link import StateLink, ask

LATER = ResourceError("no agent has connected", remedy="connect again")
NEVER = CallerError("unknown", code=Code.PERMISSION_DENIED, remedy="be somebody else")


async def _call_after_a_restart(path: Path, *answers: PhaseloomError | None) -> None:
    """Call on a link whose first connection has ended. Raises: what the call does.

    Args: answers: to each greeting after the first one; then everything is answered.
    """
    rest: list[PhaseloomError | None] = [None, *answers]
    peers: list[Peer[StateMessage]] = []

    async def handle(_: StateMessage, fds: list[int]) -> tuple[StateMessage, list[int]]:
        framing.close_fds(fds)
        if rest and (refusal := rest.pop(0)) is not None:
            raise refusal
        return Done(), []

    async def session(peer: Peer[StateMessage]) -> None:
        peers.append(peer)
        peer.handler = handle
        peer.start()
        await asyncio.wait([peer.closed])

    async def greet(peer: Peer[StateMessage]) -> None:
        await ask(peer, RankHello("token"), Done)

    link = StateLink(path, greet, None, reconnect_s=30.0)
    with framing.LocalListener(path) as listener:
        serving = asyncio.create_task(framing.serve(listener, StateMessage, session))
        try:
            await link.connect()
            await peers[0].close()
            async with asyncio.timeout(30):
                await link.ask(RankHello("again"), Done)
        finally:
            await link.close()
            serving.cancel()
            await asyncio.wait([serving])


@pytest.mark.asyncio
async def test_daemon_that_is_not_ready_yet_is_asked_again(short_dir: Path) -> None:
    await _call_after_a_restart(short_dir / "s", LATER, LATER, None)


@pytest.mark.asyncio
async def test_daemon_that_refuses_is_not(short_dir: Path) -> None:
    with pytest.raises(ResourceError, match="PERMISSION_DENIED"):
        await _call_after_a_restart(short_dir / "s", NEVER)
