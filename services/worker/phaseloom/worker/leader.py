"""The leader of a WPG: from a permit to a stored outcome.

Normal order of an operation: check (incarnation, `prev`, DONE absent) → read the payload from the
operation stream → run → write DONE, first writer wins → append OperationFinished. DONE is the
outcome; everything after it may be done again. Dedup of effects is by (incarnation, seq): in one
life a mutating operation runs once, because the scheduler permits it once and `prev` must match.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from opentelemetry.context import Context

from phaseloom.common import streams, telemetry
from phaseloom.common.arrays import as_lists
from phaseloom.common.bus import AlreadyStored, Bus, Stored
from phaseloom.common.codec import (
    CONTENT_TYPE,
    JSON,
    MSGPACK,
    content_type_of,
    decode,
    encode,
)
from phaseloom.common.errors import Code, ErrorInfo, PhaseloomError, ResourceError
from phaseloom.common.ids import DeploymentKey, VersionKey
from phaseloom.common.messages import (
    MUTATING_KINDS,
    Args,
    Completion,
    Operation,
    OperationFinished,
    Outcome,
    Permit,
    PermitReturned,
    PublishWeights,
    PublishWeightsResult,
    Result,
    SyncWeights,
    SyncWeightsResult,
)
from phaseloom.worker.executor import Executor, Refused
from phaseloom.worker.rankwire import RankConfig
from phaseloom.worker.stateclient import RankStateClient

log = logging.getLogger(__name__)

_AWAY = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
"""How a weights version's source fails that is restarted, or that the network hides."""

MAX_JSON_BYTES = streams.MAX_PAYLOAD_BYTES - 65_536
"""Room is left for headers."""
_TOO_LARGE = ErrorInfo(
    Code.RESOURCE_EXHAUSTED,
    "the result is too large for one message in JSON",
    remedy="send fewer samples at once, or send MessagePack",
)


@dataclass(frozen=True, slots=True)
class _Ran:
    completion: Completion
    dirty: bool
    started_unix_s: float
    duration_s: float


class _NotNow(Exception):
    """What the operation needs cannot be reached; nothing was changed."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class Leader:
    settings: RankConfig
    bus: Bus
    state: RankStateClient
    executor: Executor
    device_thread: ThreadPoolExecutor

    async def run(self, permit: Permit, traceparent: str) -> None:
        """Returns once the outcome is stored and in the decision log, or the permit's return is.

        Raises: ResourceError: this permit is not for this rank's state; nothing happened.
        """
        parent = telemetry.extract({"traceparent": traceparent} if traceparent else {})
        stored, payload = await asyncio.gather(
            self.bus.get_stored(streams.DONE, streams.done_subject(permit.operation)),
            self.bus.get_stored(
                streams.ops_stream(permit.operation.tenant), streams.op_subject(permit.operation)
            ),
        )
        done = _decoded(stored)
        if done is not None and not (permit.replay and done.outcome is Outcome.COMPLETED):
            await self._append_finished(permit, done, parent)
            return
        self._check_order(permit)
        try:
            ran = await self._execute(permit, payload)
        except _NotNow as later:
            await self._return(permit, later.error)
            return
        if done is None:
            completion = await self._store(permit, ran.completion, payload, parent)
        else:
            completion = done
            await self._compare(permit, done, ran.completion)
            if ran.completion.outcome is not Outcome.COMPLETED:
                # Its outcome stands, but this incarnation does not have its effect.
                completion = replace(done, error=ran.completion.error)
                ran = dataclasses.replace(ran, dirty=True)
        end_s = ran.started_unix_s + ran.duration_s
        attributes = self._attributes(permit)
        telemetry.record("execute", ran.started_unix_s, end_s, parent, **attributes)
        await self._append_finished(permit, completion, parent, ran)

    def _check_order(self, permit: Permit) -> None:
        if permit.kind in MUTATING_KINDS and permit.prev != self.executor.applied:
            raise ResourceError(
                f"{permit.operation} comes after {permit.prev}, this state is at "
                f"{self.executor.applied}",
                code=Code.FAILED_PRECONDITION,
            )

    # --- running --------------------------------------------------------------------------------

    async def _execute(self, permit: Permit, payload: Stored | None) -> _Ran:
        started_s = time.time()
        clock_s = time.perf_counter()
        try:
            operation = self._decode(permit, payload)
        except PhaseloomError as error:
            completion, dirty = _failed(permit, error.info), False
        else:
            completion, dirty = await self._outcome(permit, operation)
        return _Ran(completion, dirty, started_s, time.perf_counter() - clock_s)

    async def _outcome(self, permit: Permit, operation: Operation) -> tuple[Completion, bool]:
        """How it ended, and whether the state is now one that no operation made."""
        try:
            result = await self._run(permit, operation.args)
        except _NotNow:
            raise
        except Refused as refused:
            return _failed(permit, refused.error), False
        except Exception as error:
            return _failed(permit, _info(permit, error)), permit.kind in MUTATING_KINDS
        return Completion(operation.id, Outcome.COMPLETED, result=result), False

    def _decode(self, permit: Permit, payload: Stored | None) -> Operation:
        if payload is None:
            raise ResourceError(
                f"the payload of {permit.operation} is not in its stream", code=Code.DATA_LOSS
            )
        operation: Operation = decode(payload.payload, Operation, _content_type(payload))
        return operation

    async def _run(self, permit: Permit, args: Args) -> Result:
        result: Result
        match args:
            case PublishWeights():
                self.executor.check(args)
                result = await self._publish(permit)
            case SyncWeights():
                self.executor.check(args)
                result = await self._sync(permit, args)
            case _:
                result = await self._in_device_thread(self.executor.run, args)
        if permit.kind in MUTATING_KINDS:
            assert permit.operation.seq is not None
            self.executor.applied = permit.operation.seq
        return result

    async def _publish(self, permit: Permit) -> PublishWeightsResult:
        seq = permit.operation.seq
        assert seq is not None
        version = VersionKey(self.settings.deployment, seq)
        copy = await self.state.create_version(version, self.executor.weight_slots)
        return PublishWeightsResult(seq, copy.digest, copy.num_bytes)

    async def _sync(self, permit: Permit, args: SyncWeights) -> SyncWeightsResult:
        own = self.settings.deployment
        version = VersionKey(DeploymentKey(own.tenant, own.job, args.policy), args.version)
        slots = self.executor.weight_slots
        try:
            digest = await self.state.load_version(version, permit.sources, slots)
        except ResourceError as error:
            if error.info.code in _AWAY:
                raise _NotNow(error.info) from error
            raise
        await self._in_device_thread(self.executor.backend.weights_changed)
        return SyncWeightsResult(args.version, digest)

    async def _in_device_thread(self, call: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.device_thread, call, *args)

    async def _return(self, permit: Permit, error: ErrorInfo) -> None:
        log.warning("permit of %s returned: %s", permit.operation, error.message)
        await self.bus.append(
            PermitReturned(permit.operation, permit.epoch, permit.incarnation, error),
            msg_id=f"returned:{permit.operation}:{permit.id}",
        )

    # --- telling --------------------------------------------------------------------------------

    async def _store(
        self, permit: Permit, completion: Completion, payload: Stored | None, parent: Context
    ) -> Completion:
        """Returns what was written: JSON may not fit where MessagePack would."""
        content_type = _content_type(payload)
        if content_type == JSON and completion.result is not None:
            completion = replace(completion, result=as_lists(completion.result))
            if len(encode(completion, JSON)) > MAX_JSON_BYTES:
                completion = _failed(permit, _TOO_LARGE)
        try:
            await self.bus.publish(
                streams.done_subject(permit.operation),
                completion,
                headers=telemetry.inject({}, parent),
                content_type=content_type,
            )
        except AlreadyStored:
            await self.bus.notice(
                "worker", "outcome dropped", "another was stored first", str(permit.operation)
            )
        return completion

    async def _compare(self, permit: Permit, done: Completion, again: Completion) -> None:
        if done.result != again.result:
            await self.bus.notice(
                "worker",
                "replay differs",
                "the stored outcome stands; the state may not be the one that made it",
                str(permit.operation),
            )

    async def _append_finished(
        self, permit: Permit, completion: Completion, parent: Context, ran: _Ran | None = None
    ) -> None:
        with telemetry.span("complete", parent=parent, **self._attributes(permit)):
            await self.bus.append(
                OperationFinished(
                    key=permit.operation,
                    kind=permit.kind,
                    outcome=completion.outcome,
                    epoch=permit.epoch,
                    incarnation=permit.incarnation,
                    started_unix_s=ran.started_unix_s if ran else time.time(),
                    duration_s=ran.duration_s if ran else 0.0,
                    replay=permit.replay,
                    dirty=ran.dirty if ran else False,
                    error=completion.error,
                ),
                msg_id=f"finished:{permit.operation}:{permit.incarnation}:{permit.id}",
            )

    def _attributes(self, permit: Permit) -> dict[str, Any]:
        key = permit.operation
        return {
            "tenant": key.tenant,
            "job": key.job,
            "deployment": key.deployment,
            "seq": key.slot,
            "kind": permit.kind,
            "node": self.settings.node,
            "device": self.settings.device,
            "epoch": permit.epoch,
        }


def _content_type(payload: Stored | None) -> str:
    """As the operation came, so is its outcome written."""
    return content_type_of(payload.headers if payload else {CONTENT_TYPE: MSGPACK})


def _decoded(stored: Stored | None) -> Completion | None:
    if stored is None:
        return None
    done: Completion = decode(stored.payload, Completion, content_type_of(stored.headers))
    return done


def _failed(permit: Permit, error: ErrorInfo) -> Completion:
    return Completion(permit.operation_id, Outcome.FAILED, error=error)


def _info(permit: Permit, error: Exception) -> ErrorInfo:
    if isinstance(error, PhaseloomError):
        return error.info
    log.error("%s failed", permit.operation, exc_info=error)
    return ErrorInfo(Code.INTERNAL, f"{type(error).__name__}: {error}")
