"""Context switches: offload the displaced deployments, load the new one, verify both, and undo
everything on failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.state_agent import Switched, SwitchIn, SwitchOut
from phaseloom.common.contract.state_rank import CopyIn
from phaseloom.common.observability import telemetry
from phaseloom.statemgr.disk.disk import copy
from phaseloom.statemgr.node.digests import Digests, bad_copy
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import DeviceCopies, DeviceFiles, HostCopyStore
from phaseloom.statemgr.records.incarnations import Rank, State, Step, Wpg
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.tiering.heapfiles import HeapFiles
from phaseloom.statemgr.tiering.sharing import FrozenCopies, layout_of
from phaseloom.statemgr.tiering.tiering import Tiering

log = logging.getLogger(__name__)

Moved = dict[Rank, float]
"""Moved ranks, each with the seconds that its copy took."""

MAX_RESIDUE_BYTES = 64 * 1024
"""Device memory that a rank may still hold after releasing its heap: the pages at its edges."""


@dataclass
class Switcher:
    ledger: Ledger
    residency: Residency
    ranks: Ranks
    tiering: Tiering
    frozen: FrozenCopies
    heap_files: HeapFiles
    digests: Digests
    device_copies: DeviceCopies
    copies: HostCopyStore
    device_files: DeviceFiles = field(default_factory=DeviceFiles)

    async def switch_in(self, request: SwitchIn) -> Switched:
        """Bring a deployment into device memory in place of the deployments that it displaces.

        Its host copies are promoted from NVMe first, while the device still works. Copies that host
        memory has no room for are loaded straight from NVMe.

        Raises: ResourceError: the order is stale (ABORTED), there is no room (RESOURCE_EXHAUSTED,
                with the numbers, before anything moved), a rank is lost, or a transition was not
                verified. After a failure the moved ranks are moved back. CallerError: the
                deployment is unknown or not ready.
        """
        key, incarnation = request.deployment, request.incarnation
        wpg = self.residency.current(key, incarnation)
        displaced = filter(None, map(self.residency.find, request.displaces))
        self.digests.begin(wpg.ranks)
        in_host = self.tiering.in_host(wpg, *displaced, or_straight=True)
        async with in_host, self.ranks.holding(wpg):
            plan = self.residency.plan_switch_in(
                key, incarnation, request.epoch, request.displaces, request.ranks
            )
            trace = telemetry.extract({"traceparent": request.traceparent})
            return await self._switch(wpg, plan.offload, plan.load, trace)

    async def switch_out(self, request: SwitchOut) -> Switched:
        """Offload a deployment without loading another. A deployment on NVMe stays there."""
        key, incarnation = request.deployment, request.incarnation
        wpg = self.residency.current(key, incarnation)
        with self.residency.using(wpg):
            async with self.ranks.holding(wpg):
                ranks = self.residency.plan_switch_out(key, incarnation, request.epoch)
                return await self._switch(wpg, ranks, [], Context())

    async def _switch(
        self, wpg: Wpg, offload: list[Rank], load: list[Rank], trace: Context
    ) -> Switched:
        """Offload one set of ranks and load another; on failure, restore both."""
        offloaded: Moved = {}
        loaded: Moved = {}
        started = time.monotonic()
        try:
            await self._offload(offload, trace, offloaded)
            ended = time.monotonic()
            await self._load(load, trace, loaded)
        except PhaseloomError as error:
            log.warning("undoing the switch of %s, which failed: %s", wpg, error)
            await self._undo(offloaded, loaded, trace)
            raise
        finally:
            self.digests.begin(offload)
        return Switched(
            offload_s=ended - started,
            load_s=time.monotonic() - ended,
            bytes_out=sum(rank.heap_bytes for rank in offload),
            bytes_in=sum(rank.heap_bytes for rank in load),
            displaced=list(dict.fromkeys(rank.wpg.key for rank in offload)),
            copy_s=_longest(offloaded) + _longest(loaded),
        )

    async def _offload(self, ranks: list[Rank], trace: Context, done: Moved) -> None:
        async def offload(rank: Rank) -> None:
            await self.ledger.until(lambda: rank.wpg.prepared is None)
            with self._span("offload", rank, trace):
                done[rank] = await self._copy_out(rank)

        await on_each_device(ranks, offload)

    async def _load(self, ranks: list[Rank], trace: Context, done: Moved) -> None:
        async def load(rank: Rank) -> None:
            if rank.is_in_extent and not rank.is_below:
                await self._spare_seal(rank)
            await self.digests.until_taken(rank)
            with self._span("load", rank, trace):
                self.device_copies.make_way(rank)
                self.residency.begin_load(rank)
                done[rank] = await self._copy_in(rank)

        await on_each_device(ranks, load)

    async def _spare_seal(self, rank: Rank) -> None:
        """Copy the state of a prepared seal out of the extent that a rank is about to change. If
        the seal is being written, wait for its end instead."""
        wpg = rank.wpg
        await self.ledger.until(lambda: wpg.prepared is None or not wpg.prepared.is_writing)
        seal = wpg.prepared
        if seal is None or rank.snapshot is not None:
            return
        seal.is_writing = True  # it must not be written from half a snapshot
        try:
            with self.copies.snapshot_of(rank) as target:
                source = self.copies.bytes_for(rank)
                await asyncio.to_thread(copy, target.view(len(source)), source)
        except BaseException:
            self.residency.end_seal(wpg)
            raise
        finally:
            seal.is_writing = False
            if wpg.is_lost:
                self.residency.end_seal(wpg)
            self.ranks.settle(wpg)

    async def _copy_out(self, rank: Rank) -> float:
        await self.heap_files.choose(rank)
        self.residency.begin_copy_out(rank, release=True)
        try:
            copied = await self.frozen.copy_out(rank, release=True)
        except PhaseloomError:
            if rank.state is not State.LOST:
                self.residency.step(rank, Step.OFFLOAD_FAILED)
            raise
        if copied.resident_bytes > MAX_RESIDUE_BYTES:
            self.residency.step(rank, Step.RELEASE_UNVERIFIED)
            if not rank.frozen and not rank.is_below:
                rank.copied(copied.applied, "")
                await self.digests.until_taken(rank)
            await self._copy_in(rank)
            raise ResourceError(
                f"{rank} still holds {copied.resident_bytes} bytes of device memory after its "
                "offload",
                code=Code.ABORTED,
            )
        self.device_files.take_back(rank)
        self.residency.finish_copy_out(rank, copied.applied, rank.digest)
        return copied.duration_s

    async def _copy_in(self, rank: Rank) -> float:
        digest = rank.digest
        assert digest, "nothing is loaded that cannot be verified"
        try:
            device_memory = self.device_files.lend(rank)
            if rank.is_below:
                copied = await self.heap_files.load(rank)
            else:
                order = CopyIn(digest, layout_of(rank))
                fds = self.frozen.source_of(rank) + device_memory
                copied = await self.ranks.order(rank, order, fds)
            if copied.digest != digest:
                # The rank has loaded other bytes without noticing.
                self.ranks.retire(rank.wpg, "it loaded other bytes than ordered")
                raise ResourceError(f"{rank} loaded a wrong copy", code=Code.DATA_LOSS)
        except PhaseloomError as error:
            if error.info.code is Code.DATA_LOSS:
                # No load of a bad copy can succeed: the next incarnations start from their seals.
                if rank.copy is not None:
                    self.ranks.lose(rank.copy, f"its host copy is bad: {error.info.message}")
                raise bad_copy(rank, error.info.message) from error
            if rank.state is not State.LOST:
                self.device_files.take_back(rank)
                self.residency.step(rank, Step.LOAD_FAILED)
            raise
        self.residency.step(rank, Step.LOAD_VERIFIED)
        return copied.duration_s

    async def _undo(self, offloaded: Moved, loaded: Moved, trace: Context) -> None:
        """Move back the ranks that were moved. One that cannot be loaded stays whole in host
        memory."""

        async def back(rank: Rank) -> None:
            # A rank that was lost meanwhile has no memory.
            if rank.state is State.LOST:
                return
            move = self._offload if rank in loaded else self._load
            try:
                await move([rank], trace, {})
            except PhaseloomError as error:
                log.error("%s could not be moved back: %s", rank, error)

        # Offload first, to make room for the others.
        await on_each_device(list(loaded), back)
        await on_each_device(list(offloaded), back)

    def _span(self, name: str, rank: Rank, trace: Context) -> AbstractContextManager[Span]:
        key = rank.wpg.key
        return telemetry.span(
            name,
            parent=trace,
            tenant=key.tenant,
            job=key.job,
            deployment=key.deployment,
            node=self.ledger.node,
            device=rank.device,
            epoch=rank.wpg.epoch,
            num_bytes=rank.heap_bytes,
        )


async def on_each_device(ranks: list[Rank], work: Callable[[Rank], Awaitable[None]]) -> None:
    """Do the work for every rank: all devices in parallel, the ranks of one device in turn.

    A failure ends the work on its own device only.

    Raises: the first failure, after all work has ended.
    """

    async def in_turn(device: int) -> None:
        for rank in ranks:
            if rank.device == device:
                await work(rank)

    devices = list(dict.fromkeys(rank.device for rank in ranks))
    if len(devices) == 1:
        await in_turn(devices[0])
        return
    for failure in await asyncio.gather(*map(in_turn, devices), return_exceptions=True):
        if failure is not None:
            raise failure


def _longest(moved: Moved) -> float:
    """Seconds of copying on the slowest device."""
    by_device: dict[int, float] = {}
    for rank, seconds in moved.items():
        by_device[rank.device] = by_device.get(rank.device, 0.0) + seconds
    return max(by_device.values(), default=0.0)
