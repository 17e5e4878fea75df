"""A cut: a copy of every rank's state in memory of its own, made between two operations."""

from __future__ import annotations

import asyncio

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.state_rank import StageState, TakeSnapshot
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.checkpoints.snapshots import Snapshot, SnapshotPart
from phaseloom.statemgr.checkpoints.staging import Staging
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.residency.residency import Rank, State, Wpg
from phaseloom.statemgr.tiering.switching import on_each_device
from phaseloom.statemgr.tiering.tiering import Tiering

_STEP_BYTES = 4 * 1024 * 1024


async def cut_state(
    node: Node, tiering: Tiering, apart: Staging, wpg: Wpg, request: TakeSnapshot
) -> Snapshot:
    """Copy every rank's state aside; it is in the books then.

    Raises: CallerError: FAILED_PRECONDITION: another seq was applied last. ResourceError: no host
            memory, with the numbers; a rank is lost; DATA_LOSS: a host copy is bad.
    """
    async with apart.room(wpg) as extents:
        await _copy_aside(node, tiering, wpg, extents, request.seq)
        if wpg.is_lost:
            raise ResourceError(f"{wpg} is over", code=Code.ABORTED)
        parts = [
            SnapshotPart(extent, each.extent_bytes, each.table)
            for each, extent in zip(wpg.ranks, extents, strict=True)
        ]
        extents.clear()  # from here on they are the cut's
        cut = cut_of(wpg, request, parts)
        node.cuts.add(cut)
        for part in parts:
            node.cuts.give_back(part.extent)
    return cut


def cut_of(wpg: Wpg, request: TakeSnapshot, parts: list[SnapshotPart]) -> Snapshot:
    return Snapshot(
        wpg.key,
        wpg.incarnation,
        request.operation,
        request.name,
        request.seq,
        parts,
        rank_offset=wpg.rank_offset,
        num_ranks=wpg.num_ranks,
    )


async def _copy_aside(node: Node, tiering: Tiering, wpg: Wpg, extents: list[int], seq: int) -> None:
    targets = dict(zip(wpg.ranks, extents, strict=True))

    async def copy(rank: Rank) -> None:
        extent = node.memory[targets[rank]]
        if rank.state is State.RESIDENT:
            applied = (await node.ask(rank, StageState(), [extent.fd])).applied
        else:
            applied = rank.applied
            source, target = node.copy_of(rank), extent.view(rank.extent_bytes)
            await asyncio.to_thread(_copy, source, target)
            await _check_copied(rank, target)
        if applied != seq:
            raise CallerError(
                f"{rank} has applied {applied}, not {seq}",
                code=Code.FAILED_PRECONDITION,
                field="seq",
                remedy="cut between operations, at the seq that was applied last",
            )

    async with tiering.in_host(wpg), node.holding(lambda: set(wpg.devices)):
        node.residency.check_sealable(wpg)
        await on_each_device(wpg.ranks, copy)


async def _check_copied(rank: Rank, target: memoryview) -> None:
    """Raises: ResourceError: DATA_LOSS: what was copied is not what its digest says."""
    if rank.digest and await asyncio.to_thread(digest_of, target) != rank.digest:
        raise ResourceError(
            f"the host copy of {rank} is bad: it is not what its digest says",
            code=Code.DATA_LOSS,
            remedy="start a new incarnation, from its last seal",
            details={"deployment": str(rank.wpg.key), "rank": str(rank.index)},
        )


def _copy(source: memoryview, target: memoryview) -> None:
    """In steps: each holds the interpreter."""
    for start in range(0, len(source), _STEP_BYTES):
        target[start : start + _STEP_BYTES] = source[start : start + _STEP_BYTES]
