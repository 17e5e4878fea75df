"""Context switches: offload what is displaced, load what comes in, verify both, undo on failure."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager

from opentelemetry.context import Context
from opentelemetry.trace import Span

from phaseloom.common import telemetry
from phaseloom.common.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.statewire import CopyIn, CopyOut, Switched, SwitchIn, SwitchOut
from phaseloom.statemgr.core.residency import State, Step, Wpg
from phaseloom.statemgr.node import Node

log = logging.getLogger(__name__)

MAX_RESIDUE_BYTES = 64 * 1024
"""What a rank may still hold of a released heap: nothing, give or take the pages at its edges."""


async def switch_in(node: Node, request: SwitchIn) -> Switched:
    """Bring a deployment into device memory in place of what it displaces.

    Raises: ResourceError: stale (ABORTED), no room (RESOURCE_EXHAUSTED, with the numbers, before
            anything moved), a rank lost, a transition not verified. What had been offloaded is
            loaded back then. CallerError: not known, or not ready.
    """
    key, incarnation = request.deployment, request.incarnation
    wpg = node.residency.current(key, incarnation)
    async with node.device_locks[wpg.device]:
        plan = node.residency.plan_switch_in(key, incarnation, request.epoch, request.displaces)
        trace = telemetry.extract({"traceparent": request.traceparent})
        displaced: list[Wpg] = []
        bytes_out = 0
        started = time.monotonic()
        try:
            for other in plan.offload:
                await _offload(node, other, trace)
                displaced.append(other)
                bytes_out += other.heap_bytes
            offloaded = time.monotonic()
            if plan.is_load_needed:
                await _load(node, wpg, trace)
        except PhaseloomError as error:
            log.warning("switch to %s failed, undoing it: %s", wpg, error)
            await _undo(node, displaced, trace)
            raise
        return Switched(
            offload_s=offloaded - started,
            load_s=time.monotonic() - offloaded,
            bytes_out=bytes_out,
            bytes_in=wpg.heap_bytes if plan.is_load_needed else 0,
            displaced=[other.key for other in displaced],
        )


async def switch_out(node: Node, request: SwitchOut) -> Switched:
    """Offload a deployment without another coming in. Raises: as `switch_in`."""
    key, incarnation = request.deployment, request.incarnation
    wpg = node.residency.current(key, incarnation)
    async with node.device_locks[wpg.device]:
        if node.residency.plan_switch_out(key, incarnation, request.epoch) is None:
            return Switched(0.0, 0.0, 0, 0, [])
        started = time.monotonic()
        await _offload(node, wpg, Context())
        return Switched(time.monotonic() - started, 0.0, wpg.heap_bytes, 0, [wpg.key])


async def _offload(node: Node, wpg: Wpg, trace: Context) -> None:
    await node.until(lambda: wpg.prepared is None)
    with _span("offload", node, wpg, trace):
        await _copy_out(node, wpg)


async def _copy_out(node: Node, wpg: Wpg) -> None:
    node.residency.begin_offload(wpg)
    try:
        copied = await node.ask(wpg, CopyOut(release=True))
    except PhaseloomError:
        if wpg.state is not State.LOST:
            node.residency.step(wpg, Step.OFFLOAD_FAILED)
        raise
    if not copied.digest:
        node.retire(wpg, "it offloaded without a digest")
        raise ResourceError(f"{wpg} broke the protocol and was cut off")
    if copied.resident_bytes > MAX_RESIDUE_BYTES:
        node.residency.step(wpg, Step.RELEASE_UNVERIFIED)
        wpg.applied = copied.applied
        await _copy_in(node, wpg, copied.digest)
        raise ResourceError(
            f"{wpg} still holds {copied.resident_bytes} bytes of device memory after its offload",
            code=Code.ABORTED,
        )
    node.residency.finish_offload(wpg, copied.applied, copied.digest)


async def _load(node: Node, wpg: Wpg, trace: Context) -> None:
    with _span("load", node, wpg, trace):
        node.residency.begin_load(wpg)
        await _copy_in(node, wpg, wpg.digest)


async def _copy_in(node: Node, wpg: Wpg, digest: str) -> None:
    try:
        copied = await node.ask(wpg, CopyIn(digest))
        if copied.digest != digest:
            # Its memory holds something else than was asked for, and it did not notice.
            node.retire(wpg, "it loaded another content than it was told to")
            raise ResourceError(f"{wpg} loaded a wrong copy", code=Code.DATA_LOSS)
    except PhaseloomError:
        if wpg.state is not State.LOST:
            wpg.digest = digest
            node.residency.step(wpg, Step.LOAD_FAILED)
        raise
    node.residency.step(wpg, Step.LOAD_VERIFIED)


async def _undo(node: Node, displaced: list[Wpg], trace: Context) -> None:
    """Load back what was offloaded; what cannot be stays whole in host memory."""
    for wpg in displaced:
        try:
            await _load(node, wpg, trace)
        except PhaseloomError as error:
            log.error("%s could not be loaded back: %s", wpg, error)


def _span(name: str, node: Node, wpg: Wpg, trace: Context) -> AbstractContextManager[Span]:
    return telemetry.span(
        name,
        parent=trace,
        tenant=wpg.key.tenant,
        job=wpg.key.job,
        deployment=wpg.key.deployment,
        node=node.name,
        device=wpg.device,
        epoch=wpg.epoch,
        num_bytes=wpg.heap_bytes,
    )
