"""Weights versions as a rank's client reads them, in one call."""

from __future__ import annotations

from collections.abc import Sequence

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.layouts import LayoutCache


async def open_version(
    client: RankStateClient,
    key: VersionKey,
    sources: list[str],
    slots: Sequence[TensorSlot],
    ticket: Ticket | None = None,
) -> tuple[memoryview, str]:
    """A whole version of these tensors, verified, and its digest.

    Raises: as `RankVersions.open`; CallerError: it is of another model.
    """
    opened = await client.versions.open(key, sources, ticket)
    LayoutCache().paired(opened.table, slots)
    return opened.memory, opened.described.digest


async def load_version(
    client: RankStateClient,
    key: VersionKey,
    sources: list[str],
    slots: Sequence[TensorSlot],
    ticket: Ticket | None = None,
) -> str:
    """Copy a version over these slots of the heap. Returns: its digest. Raises: likewise."""
    opened = await client.versions.open(key, sources, ticket)
    await client.versions.load(opened, slots)
    return opened.described.digest
