"""Activations on this node: switch deployments in and out, and run the permitted operations.

Permits of reading operations of one deployment run concurrently. Every other command of a
deployment waits for its lock. Cancels and changes of compute shares never wait, because the
operation that they concern holds the lock.
"""

from __future__ import annotations

import asyncio
import logging
import time

from nats.aio.msg import Msg
from opentelemetry.trace import SpanContext

from phaseloom.common.contract.commands import (
    AdjustClaims,
    CancelOperation,
    CloseActivation,
    OpenActivation,
    Permits,
)
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.events import ActivationOpened, ActivationRefused, ClaimsAdjusted
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.observability import telemetry
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpg import LocalWpg
from phaseloom.worker.agent.wpgs import Append, Wpgs
from phaseloom.worker.core.permits import PermitVerdict, judge_permit
from phaseloom.worker.rank.wire import RunPermits

log = logging.getLogger(__name__)


class Activations:
    def __init__(
        self,
        wpgs: Wpgs,
        state: AgentStateClient,
        *,
        node: str,
        tasks: asyncio.TaskGroup,
        append: Append,
    ) -> None:
        self._wpgs = wpgs
        self._state = state
        self._node = node
        self._tasks = tasks
        self._append = append

    async def open(self, command: OpenActivation, message: Msg) -> None:
        """Switch a deployment in, and report it as opened or refused."""
        key = command.deployment
        async with self._wpgs.locks[key].write(), self._wpgs.state_lock:
            wpg = self._wpgs.get(key, command.incarnation)
            if wpg is None:
                return
            report: ActivationOpened | ActivationRefused
            try:
                # Stays set if the switch fails, because the rank may have died of it.
                wpg.is_switching = True
                report = await self._switch_in(command, wpg, message)
                wpg.is_switching = False
                wpg.epoch = command.epoch
            except PhaseloomError as error:
                wpg.refused_epoch = command.epoch
                report = ActivationRefused(key, command.epoch, command.node, error.info)
        await self._append(report, f"activation:{key}:{command.epoch}:{command.node}")

    async def close(self, command: CloseActivation) -> None:
        """Switch a deployment out."""
        async with self._wpgs.locks[command.deployment].write(), self._wpgs.state_lock:
            await self._state.switch_out(command.deployment, command.incarnation, command.epoch)

    async def run(self, command: Permits) -> bool:
        """Run permits, which are all of one deployment and epoch.

        Returns: False if their activation has not been opened here yet.
        """
        first = command.permits[0]
        key = first.operation.deployment_key
        lock = self._wpgs.locks[key]
        is_mutating = first.kind in MUTATING_KINDS
        permits = RunPermits(command.permits, command.traceparents)
        async with lock.write() if is_mutating else lock.read():
            wpg = self._wpgs.by_deployment.get(key)
            if wpg is None or not wpg.is_up:
                return True
            verdict = judge_permit(
                incarnation=first.incarnation,
                epoch=first.epoch,
                opened_incarnation=wpg.incarnation,
                opened_epoch=wpg.epoch,
                refused_epoch=wpg.refused_epoch,
            )
            if verdict is PermitVerdict.EARLY:
                return False
            if verdict is PermitVerdict.STALE:
                log.info("dropping stale permit of %s", first.operation)
                return True
            wpg.last_span = span_of(command.traceparents[-1])
            if all(permit.kind != "save_state" for permit in command.permits):
                await _run(wpg, permits)
                return True
            # A `save_state` is written while later operations run, so it frees the lock early.
            running = self._tasks.create_task(_run(wpg, permits))
            await wpg.until_devices_freed(permits, running)
        await running
        return True

    async def cancel(self, command: CancelOperation) -> None:
        """Pass a cancel to the ranks at once: the operation to cancel may hold the lock."""
        wpg = self._wpgs.get(command.operation.deployment_key, command.incarnation)
        if wpg is None:
            log.info("cannot cancel %s: its ranks are gone", command.operation)
            return
        try:
            await wpg.cancel(command.operation, keeps_partial=command.keeps_partial)
        except PhaseloomError as error:
            log.info("cannot cancel %s: %s", command.operation, error)

    async def adjust(self, command: AdjustClaims) -> None:
        """Change the compute share of running ranks at once: the operation that gives up units
        holds the lock."""
        key = command.deployment
        wpg = self._wpgs.get(key, command.incarnation)
        if wpg is None:
            return
        try:
            await wpg.adjust(command.units, command.id)
        except PhaseloomError as error:
            # The WPG is dying. Its death is reported, which frees its units.
            log.info("cannot change the compute share of %s: %s", key, error)
            return
        if command.shrinks:
            adjusted = ClaimsAdjusted(key, command.incarnation, command.node, command.id)
            await self._append(adjusted, f"adjusted:{key}:{command.id}")

    async def _switch_in(
        self, command: OpenActivation, wpg: LocalWpg, message: Msg
    ) -> ActivationOpened:
        wpgs, key = self._wpgs.by_deployment, command.deployment
        displaced = [
            wpgs[displaced_key] for displaced_key in command.displaces if displaced_key in wpgs
        ]
        started_s = time.time()
        with telemetry.span(
            "switch",
            parent=telemetry.extract(message.headers),
            links=[w.last_span for w in displaced if w.last_span is not None],
            tenant=key.tenant,
            job=key.job,
            deployment=key.deployment,
            node=self._node,
            device=wpg.devices[0],
            epoch=command.epoch,
        ):
            switched = await self._state.switch_in(
                key,
                command.incarnation,
                command.epoch,
                command.displaces,
                ranks=command.ranks,
                traceparent=telemetry.inject({}).get("traceparent", ""),
            )
        return ActivationOpened(
            deployment=key,
            epoch=command.epoch,
            node=command.node,
            started_unix_s=started_s,
            offload_s=switched.offload_s,
            load_s=switched.load_s,
            bytes_out=switched.bytes_out,
            bytes_in=switched.bytes_in,
            displaced=switched.displaced,
            is_speculative=command.is_speculative,
        )


def span_of(traceparent: str) -> SpanContext:
    """Return the span that a `traceparent` header names; an invalid span if the header is empty."""
    headers = {"traceparent": traceparent} if traceparent else {}
    return telemetry.span_context(telemetry.extract(headers))


async def _run(wpg: LocalWpg, permits: RunPermits) -> None:
    try:
        await wpg.run(permits)
    except PhaseloomError as error:
        # The WPG is dead, or its state differs from what the scheduler assumes. The next
        # incarnation is rebuilt from stored state.
        wpg.kill(error.info)
