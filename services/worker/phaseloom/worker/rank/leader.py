"""The leader of a WPG: from a permit to a stored outcome.

Steps of an operation:
- check its incarnation and `prev`, and that DONE has no outcome of it yet
- read its payload from the operation stream
- run it
- write its outcome to DONE; the first writer wins
- append OperationFinished to the decision log

DONE holds the authoritative outcome; every later step may be repeated. A mutating operation runs
once per (incarnation, seq), because the scheduler permits it once and `prev` must match. Several
reading operations may be permitted at once and wait in the `DeviceQueue`; a mutating one runs
alone. Calls on the bus are repeated until it answers, so a restart of its server only costs time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import nats.errors
from msgspec.structs import replace
from opentelemetry.context import Context

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import CONTENT_TYPE, JSON, decode, encode
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import (
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
    unexpected_error,
)
from phaseloom.common.contract.events import StateSnapshotTaken
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import MUTATING_KINDS, kind_for
from phaseloom.common.contract.operations import (
    Args,
    Completion,
    DeleteCheckpoint,
    DrawnTokens,
    LoadState,
    Operation,
    OptimStep,
    Outcome,
    Progress,
    PublishWeights,
    Result,
    SaveState,
    SyncWeights,
)
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.streaming import as_lists, messages
from phaseloom.common.observability import telemetry
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.retry import until_done
from phaseloom.common.transport.stored import Stored
from phaseloom.worker.rank.calls import DeviceCall, check_numbers
from phaseloom.worker.rank.devicequeue import DeviceQueue
from phaseloom.worker.rank.executor import (
    Executor,
    OperationDeferred,
    OperationRefused,
    unavailable_error,
)
from phaseloom.worker.rank.group import GroupLost, RanksDiverged, WpgRanks
from phaseloom.worker.rank.namedweights import WeightsReader
from phaseloom.worker.rank.outcomes import (
    Outcomes,
    PermitRun,
    content_type_for,
    decoded,
    failed,
    get_all,
)
from phaseloom.worker.rank.stateops import StateOperations, state_share
from phaseloom.worker.rank.wire import (
    AdjustShare,
    CancelRun,
    DevicesFreed,
    Payload,
    PrefetchWeights,
    RankConfig,
    RunPermits,
)
from phaseloom.worker.state.client import RankStateClient

log = logging.getLogger(__name__)

_PROGRESS_S = 0.5
"""Seconds between two progress reports of a `generate`."""

_CANCELLED = ErrorInfo(Code.ABORTED, "the operation was cancelled")
_PARTIAL = ErrorInfo(
    Code.FAILED_PRECONDITION,
    "a forward_backward since the last optim_step did not complete, so the partial gradients are "
    "dropped",
    remedy="send the batch again, or set allow_partial on the optim_step",
)


@dataclass(slots=True)
class _PermitBatch:
    """The permits of one message."""

    first: CommandId
    on_devices: set[OperationKey]
    """The operations that still need devices or state."""
    has_saves: bool


@dataclass(slots=True)
class Leader:
    settings: RankConfig
    bus: Bus
    state: RankStateClient
    executor: Executor
    ranks: WpgRanks
    queue: DeviceQueue
    _reading: set[OperationKey] = field(default_factory=set)
    """The reading operations that run on the devices."""
    _outcomes: Outcomes = field(init=False)
    _state_operations: StateOperations = field(init=False)
    _weights: WeightsReader = field(init=False)
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a `save_state`. One runs at a time: each needs as much host memory as the state,
    and the job must be able to fall back to the previous one."""

    def __post_init__(self) -> None:
        self._outcomes = Outcomes(self.settings, self.bus)
        self._state_operations = StateOperations(
            self.settings, self.bus, self.state, self.executor, self.ranks, self._outcomes
        )
        self._weights = WeightsReader(self.state, self.executor)

    async def run(self, message: RunPermits) -> None:
        """Run permits. Return when the decision log has every outcome or the return of its permit.

        Raises: ResourceError: a permit does not match this rank's state, and nothing happened; or
                 the ranks
                cannot continue, even if outcomes were stored.
        """
        operations = [permit.operation for permit in message.permits]
        self._outcomes.unended.update(operations)
        for permit in message.permits:
            self.ranks.share.request(permit.units, permit.id)
        dones, payloads = await asyncio.gather(
            get_all(self.bus, streams.DONE, [streams.done_subject(key) for key in operations]),
            get_all(
                self.bus,
                streams.ops_stream(self.settings.deployment.tenant),
                [streams.op_subject(key) for key in operations],
            ),
        )
        lost = [i for i, stored in enumerate(payloads) if stored is None and dones[i] is None]
        if lost:
            # A server of the cluster may lag, so ask again before reporting the loss of a payload.
            subjects = [streams.op_subject(operations[i]) for i in lost]
            stream = streams.ops_stream(self.settings.deployment.tenant)
            again = await get_all(self.bus, stream, subjects, must_exist=True)
            for i, stored in zip(lost, again, strict=True):
                payloads[i] = stored
        traceparents = message.traceparents or [""] * len(operations)
        has_saves = any(permit.kind == "save_state" for permit in message.permits)
        batch = _PermitBatch(message.permits[0].id, set(operations), has_saves)
        runs = [
            self._run_one(permit, traceparent, done, payload, batch)
            for permit, traceparent, done, payload in zip(
                message.permits, traceparents, dones, payloads, strict=True
            )
        ]
        try:
            if len(runs) == 1:
                await runs[0]
            else:
                await asyncio.gather(*runs)
        except GroupLost as lost:
            raise ResourceError(f"the ranks cannot reach one another: {lost.__cause__}") from lost

    async def _run_one(
        self,
        permit: Permit,
        traceparent: str,
        stored: Stored | None,
        payload: Stored | None,
        batch: _PermitBatch,
    ) -> None:
        parent = telemetry.extract({"traceparent": traceparent} if traceparent else {})
        # Add log lines of the run to the operation's trace.
        with telemetry.use_context(parent):
            try:
                is_save = permit.kind == "save_state"
                async with self._saving if is_save else contextlib.nullcontext():
                    await self._run_permit(
                        permit, traceparent, parent, stored, payload, batch=batch
                    )
                await self._release_devices(permit.operation, batch)
            finally:
                self._outcomes.unended.discard(permit.operation)

    async def _run_permit(
        self,
        permit: Permit,
        traceparent: str,
        parent: Context,
        stored: Stored | None,
        payload: Stored | None,
        *,
        batch: _PermitBatch,
    ) -> None:
        done = decoded(stored)
        if done is not None and not (
            permit.replay and (done.outcome is Outcome.COMPLETED or permit.partial)
        ):
            await self._outcomes.log_end(permit, done, parent)
            return
        self._check_order(permit)
        is_reading = permit.kind not in MUTATING_KINDS
        if is_reading:
            self._reading.add(permit.operation)
        try:
            ran = await self._execute(permit, payload, traceparent, batch)
        except OperationDeferred as later:
            await self._outcomes.return_permit(permit, later.error)
            return
        finally:
            self._reading.discard(permit.operation)
        if not is_reading and self.queue.is_cancelled(permit.operation):
            await self._outcomes.notice(
                "cancel ignored", "it changes state, and had already run", permit.operation
            )
        await self._outcomes.store_and_log(permit, payload, done, ran, parent)
        if ran.saved is not None and ran.saved.keep:
            await self._state_operations.prune(ran.saved)
        if ran.broken is not None:
            raise ResourceError(
                f"the ranks of the WPG failed and cannot continue: {ran.broken.__cause__!r}"
            )

    def cancel(self, cancel: CancelRun) -> None:
        self.queue.cancel(cancel.operation, keeps_partial=cancel.keeps_partial)

    async def prefetch(self, hint: PrefetchWeights) -> None:
        """Fetch this rank's share of a version. Raises: PhaseloomError: it is unavailable."""
        await self._state_operations.weights.prefetch(hint)

    async def adjust(self, adjust: AdjustShare) -> None:
        """Wait until the rank uses these compute units.

        That is at the next boundary of its work, or immediately if it has none.
        """
        self.ranks.share.request(adjust.units, adjust.command)
        applied = asyncio.ensure_future(self.ranks.share.until_applied())
        # An empty call queued behind the running one is a boundary as well, in case that has none.
        queued_boundary = asyncio.ensure_future(self.ranks.on_device_thread(lambda: None))
        try:
            await asyncio.wait({applied, queued_boundary}, return_when=asyncio.FIRST_COMPLETED)
            if queued_boundary.done():
                queued_boundary.result()
        finally:
            applied.cancel()
            queued_boundary.cancel()

    def _check_order(self, permit: Permit) -> None:
        if permit.kind not in MUTATING_KINDS:
            return
        if permit.prev != self.executor.applied:
            raise ResourceError(
                f"{permit.operation} requires the state at seq {permit.prev}, got seq "
                f"{self.executor.applied}",
                code=Code.FAILED_PRECONDITION,
            )
        if self._reading:
            raise ResourceError(
                f"{permit.operation} would change state that {len(self._reading)} running "
                f"operations read",
                code=Code.FAILED_PRECONDITION,
            )

    async def report_progress(self) -> None:
        """Publish the progress of each running `generate` until cancelled. No service depends on
        it."""
        reported: dict[OperationKey, int] = {}
        while True:
            await asyncio.sleep(_PROGRESS_S)
            calls = [call for call in self.queue.running if call.num_total]
            for call in calls:
                if reported.get(call.key) != call.num_done:
                    await self._publish_progress(call)
            reported = {call.key: call.num_done for call in calls}

    async def log_gathered_tails(self) -> None:
        """Append to the decision log which tails are gathered on fewer ranks, until cancelled."""
        while True:
            event = await self.queue.gathered_tails.get()
            msg_id = f"gathered:{event.operations[0]}:{event.incarnation}:{event.epoch}"
            await until_done(partial(self.bus.log.append, event, msg_id=msg_id), "append")

    async def publish_tokens(self) -> None:
        """Publish the new tokens of streaming operations until cancelled."""
        while True:
            call, tokens = await self.queue.new_tokens.get()
            for message in messages(tokens):
                await self._publish_progress(call, message)

    async def _publish_progress(
        self, call: DeviceCall, tokens: list[DrawnTokens] | None = None
    ) -> None:
        content_type = call.payload.content_type
        shown_tokens = tokens or []
        if content_type == JSON:
            shown_tokens = [as_lists(entry) for entry in shown_tokens]
        weights_seq = self.executor.applied if shown_tokens else 0
        progress = Progress(call.key, call.num_done, call.num_total, shown_tokens, weights_seq)
        subject = streams.progress_subject(call.key)
        try:
            await self.bus.client.publish(
                subject, encode(progress, content_type), headers={CONTENT_TYPE: content_type}
            )
        except nats.errors.Error as error:
            log.debug("progress of %s not published: %r", call.key, error)

    # --- running --------------------------------------------------------------------------------

    async def _execute(
        self, permit: Permit, payload: Stored | None, traceparent: str, batch: _PermitBatch
    ) -> PermitRun:
        started_s, clock_s = time.time(), time.perf_counter()
        try:
            call = self._call(permit, payload, traceparent)
        except PhaseloomError as error:
            return PermitRun(failed(permit, error.info), started_s, time.perf_counter() - clock_s)
        ran = await self._outcome(call, batch)
        if not ran.duration_s:
            ran.started_unix_s, ran.duration_s = started_s, time.perf_counter() - clock_s
        return ran

    async def _outcome(self, call: DeviceCall, batch: _PermitBatch) -> PermitRun:
        permit, args = call.permit, call.operation.args
        is_mutating = permit.kind in MUTATING_KINDS

        def ended(completion: Completion, **details: Any) -> PermitRun:
            return PermitRun(
                completion, call.started_unix_s, call.duration_s, share=call.share, **details
            )

        try:
            if isinstance(args, OptimStep) and permit.partial and not args.allow_partial:
                self.executor.check(args)
                share = replace(state_share(call), zero_gradients=True)
                await self.ranks.on_all_ranks(self.executor.backend.zero_gradients, share)
                return ended(failed(permit, _PARTIAL))
            result = await self._run(call, batch)
        except (OperationDeferred, GroupLost):
            raise
        except OperationRefused as refused:
            return ended(failed(permit, refused.error))
        except RanksDiverged as broken:
            error = _error_info(permit, broken.__cause__ or broken)
            return ended(failed(permit, error), is_dirty=is_mutating, broken=broken)
        except Exception as error:
            return ended(failed(permit, _error_info(permit, error)), is_dirty=is_mutating)
        if result is None:
            cancelled = Completion(call.operation.id, Outcome.CANCELLED, error=_CANCELLED)
            return ended(cancelled)
        if is_mutating:
            assert permit.operation.seq is not None
            self.executor.applied = permit.operation.seq
        return ended(
            Completion(call.operation.id, Outcome.COMPLETED, result=result),
            num_tokens=kind_for(args).num_tokens_done(args, result),
            steps=call.steps,
            saved=args if isinstance(args, SaveState) else None,
        )

    def _call(self, permit: Permit, payload: Stored | None, traceparent: str) -> DeviceCall:
        if payload is None:
            raise ResourceError(
                f"the payload of {permit.operation} is not in its stream", code=Code.DATA_LOSS
            )
        content_type = content_type_for(payload)
        operation: Operation = decode(payload.payload, Operation, content_type)
        raw = Payload(permit.operation, payload.payload, content_type)
        return DeviceCall(permit, operation, raw, traceparent)

    async def _run(self, call: DeviceCall, batch: _PermitBatch) -> Result | None:
        args = call.operation.args
        if not kind_for(args).moves_state:
            try:
                call.version = await self._weights.read(args, call.permit)
            except PhaseloomError as error:
                raise unavailable_error(error.info) from error
            result = await self.queue.run(call)
            check_numbers(result)
            return result
        self.executor.check(args)
        return await self._move_state(call, args, batch)

    async def _move_state(self, call: DeviceCall, args: Args, batch: _PermitBatch) -> Result | None:
        match args:
            case PublishWeights():
                return await self._state_operations.publish(call, args)
            case SyncWeights():
                return await self._state_operations.sync(call, args)
            case SaveState():
                if self.queue.is_cancelled(call.key):
                    return None
                return await self._state_operations.save(
                    call, args, lambda: self._free_devices(call.permit, batch)
                )
            case DeleteCheckpoint():
                return await self._state_operations.delete(args)
            case _:
                assert isinstance(args, LoadState)
                return await self._state_operations.load(call, args)

    async def _free_devices(self, permit: Permit, batch: _PermitBatch) -> None:
        """Free the devices for other operations after a save's state has been copied."""
        if permit.replay:
            return  # a replay runs the later operations in order
        self._reading.discard(permit.operation)
        self._outcomes.unended.discard(permit.operation)
        event = StateSnapshotTaken(permit.operation, permit.epoch, permit.incarnation)
        msg_id = f"snapshot:{permit.operation}:{permit.incarnation}:{permit.id}"
        # Free the devices first, so that the next permit finds the agent's lock free.
        await self._release_devices(permit.operation, batch)
        await until_done(lambda: self.bus.log.append(event, msg_id=msg_id), "append")

    async def _release_devices(self, operation: OperationKey, batch: _PermitBatch) -> None:
        """Record that an operation no longer needs devices; notify the agent after the batch's last
        one."""
        if operation in batch.on_devices:
            batch.on_devices.remove(operation)
            if batch.has_saves and not batch.on_devices:
                await self.ranks.agent.call(DevicesFreed(batch.first))


def _error_info(permit: Permit, error: BaseException) -> ErrorInfo:
    if isinstance(error, PhaseloomError):
        return error.info
    log.error("%s failed", permit.operation, exc_info=error)
    return unexpected_error(error)
