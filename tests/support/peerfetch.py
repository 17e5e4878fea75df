"""Fetches a weights version as another node's state manager does, into memory of this process."""

from __future__ import annotations

from phaseloom.common.ids import VersionKey
from phaseloom.statemgr.fetching import Fetching, Home
from phaseloom.statemgr.incoming import Incoming
from phaseloom.statemgr.wire import VersionDescription


def fetching(
    key: VersionKey, secret: str, *, site: str = "", endpoint: str = "", timeout_s: float = 10.0
) -> Fetching:
    """A fetch that has not begun; its bytes are in `fetching.incoming.memory` later."""

    async def place(description: VersionDescription) -> Incoming:
        return Incoming(description, memoryview(bytearray(description.num_bytes)))

    return Fetching(key, Home(secret.encode(), endpoint, site, timeout_s), place)


async def fetch(source: str, secret: str, key: VersionKey) -> tuple[str, bytes]:
    """The version's digest and content."""
    running = fetching(key, secret)
    digest = await running.bring(source)
    assert running.incoming is not None
    return digest, bytes(running.incoming.memory)
