"""Fetches a weights version as another node's state manager does, into memory of this process."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import Slice
from phaseloom.statemgr.transfer import wire
from phaseloom.statemgr.transfer.assignment import Peer
from phaseloom.statemgr.transfer.fetching import Fetch, Home, Memory, call_once
from phaseloom.statemgr.transfer.served import Incoming
from phaseloom.statemgr.transfer.tensorslices import batches, slices_of_part
from tests.support.meshcerts import NODE, identity, ticket


def home(*, site: str = "", endpoint: str = "", timeout_s: float = 10.0, node: str = NODE) -> Home:
    """Of a node that this process plays."""
    return Home(identity(node), endpoint, site, timeout_s)


def fetch_of(
    key: VersionKey,
    slices: Sequence[Slice],
    memory: memoryview,
    at: Home,
    shown: Ticket | None = None,
    digest: str = "",
) -> Fetch:
    """A fetch of slices that has not begun."""

    def open_with(parts: list[str], session: str | None) -> wire.OpenVersion:
        me = Peer(at.endpoint, "mine")
        return wire.OpenVersion(key, shown or ticket(key), parts, at.site, me, relay=session)

    what = f"slices of version {key}"
    return Fetch(what, open_with, at, Incoming(slices, {}), Memory(memory, digest))


async def fetch(
    source: str, key: VersionKey, at: Home | None = None, shown: Ticket | None = None
) -> tuple[str, bytes]:
    """The digest and content of a whole version. Args: shown: a good ticket where None."""
    at, shown = at or home(), shown or ticket(key)
    asked = wire.DescribeVersion(key, shown)
    described = await call_once(source, asked, wire.VersionDescription, at)
    memory = memoryview(bytearray(described.num_bytes))
    slices = slices_of_part("", described.tensors, described.num_bytes)
    running = fetch_of(key, slices, memory, at, shown, described.digest)
    await running.fetch_all(batches(slices), {"": [source]})
    return described.digest, bytes(memory)
