"""Fetches a weights version as another node's state manager does, into memory of this process."""

from __future__ import annotations

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.versions.fetching import Fetching, Home
from phaseloom.statemgr.versions.incoming import Incoming
from phaseloom.statemgr.versions.wire import VersionDescription
from tests.support.meshcerts import NODE, identity, ticket


def home(*, site: str = "", endpoint: str = "", timeout_s: float = 10.0, node: str = NODE) -> Home:
    """Of a node that this process plays."""
    return Home(identity(node), endpoint, site, timeout_s)


def fetching(key: VersionKey, at: Home | None = None, shown: Ticket | None = None) -> Fetching:
    """A fetch that has not begun; its bytes are in `fetching.incoming.memory` later.

    Args: shown: to the sources; a good ticket where None.
    """

    async def place(description: VersionDescription) -> Incoming:
        return Incoming(description, memoryview(bytearray(description.num_bytes)))

    return Fetching(key, shown or ticket(key), at or home(), place)


async def fetch(source: str, key: VersionKey) -> tuple[str, bytes]:
    """The version's digest and content."""
    running = fetching(key)
    digest = await running.bring(source)
    assert running.incoming is not None
    return digest, bytes(running.incoming.memory)
