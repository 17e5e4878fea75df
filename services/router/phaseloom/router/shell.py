"""The router's shell: moves operations into the decision log, opens sessions, answers results.

A router keeps no state of its own. Any number of replicas share each tenant's consumer. If one is
killed, the others receive its unacknowledged operations. An operation is acknowledged only after
its header is in the decision log, which refuses duplicates by message id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, TypeVarTuple

import nats.errors
from msgspec.structs import replace
from nats.aio.msg import Msg
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
    ArchiveCheckpoint,
    Attached,
    Beat,
    Checkpoint,
    CheckpointRequest,
    ExpireCheckpoint,
    Heartbeat,
    JobReport,
    JobRequest,
    JobStatus,
    ListCheckpoints,
    ReadArchive,
    Reported,
    ResultReply,
    ResultRequest,
)
from phaseloom.common.contract.checks import check_report
from phaseloom.common.contract.codec import JSON, MSGPACK, content_type_of, decode
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.events import OperationsQueued, QueuedOperation, SessionOpened
from phaseloom.common.contract.ids import (
    DeploymentKey,
    JobKey,
    OperationKey,
    check_name,
    parse_operation_key,
)
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.observability import metrics, telemetry
from phaseloom.common.process import lifecycle
from phaseloom.common.process.workers import WorkerPool
from phaseloom.common.transport import leases
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.callrates import CallRates
from phaseloom.common.transport.groupcommit import GroupCommit
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.pulling import PullConsumer
from phaseloom.common.transport.services import Encoded, serve_api
from phaseloom.common.transport.stored import Stored
from phaseloom.router.admission import Admission
from phaseloom.router.checkpoints import Checkpoints
from phaseloom.router.core import results, validate
from phaseloom.router.core.limits import Limits

log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")
T = TypeVar("T")

SOURCE = "router"
_OP_PREFIX = f"{streams.PREFIX}.op."
_ACK_WAIT_S = 4.0
_EXTEND_S = 1.0
"""How often a replica extends `_ACK_WAIT_S` for the messages that it has not finished. A replica
that hangs does not, so its messages go to another one."""
_RETRY_DELAY_S = 0.5
_DEADLINE_S = 10.0
"""Processor time of a worker for one payload. The largest valid ones need about 2 s."""
DEFAULT_SESSION_TTL_S = 15.0

_SEARCH_TIMEOUT_S = 8.0
"""Time limit for searching the log for a redelivered operation."""

_BUS_ERRORS = (nats.errors.Error, JetStreamError, TimeoutError)


class Sessions:
    """The newest session number of each job: read on demand, then kept current by a watch."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._newest: dict[str, int] = {}

    async def watch(self) -> None:
        """Follow sessions opened by other replicas, until cancelled."""
        async for change in self._bus.keys.watch(Bucket.SESSIONS):
            if change.stored is None:
                self._newest.pop(change.key, None)
            else:
                session = int(change.stored.payload)
                # The watch may lag behind sessions that this replica opened or read itself.
                self._newest[change.key] = max(session, self._newest.get(change.key, 0))

    async def newest(self, job: JobKey, claimed: int) -> int:
        """Return the newest session number of a job, or 0 if it never had a session.

        Args: claimed: the session named by an operation. If it differs from the cached number, the
                  number is read again.
        """
        key = str(job)
        if self._newest.get(key) != claimed:
            stored = await self._bus.keys.get(Bucket.SESSIONS, key)
            self._newest[key] = int(stored.payload) if stored else 0
        return self._newest[key]

    async def open(self, job: JobKey, *, resumes: bool) -> int:
        """Open a job's next session, which ends all older ones, and return its number.

        Args: resumes: return the newest existing session instead, if there is one.
        """
        key = str(job)
        while True:
            stored = await self._bus.keys.get_raw(Bucket.SESSIONS, key)
            last = 0 if stored is None or stored.is_gone else int(stored.payload)
            if resumes and last:
                self._newest[key] = last
                return last
            try:
                await self._bus.keys.swap(
                    Bucket.SESSIONS, key, str(last + 1).encode(), stored.sequence if stored else 0
                )
            except Conflict:
                continue
            self._newest[key] = last + 1
            return last + 1


@dataclass(frozen=True, slots=True)
class _Queued:
    header: QueuedOperation
    copy: int
    """Sequence number of this message in the tenant's stream; duplicates have different ones."""
    headers: dict[str, str]


class Router:
    """One replica of the router. It routes within the context of `running`."""

    def __init__(
        self,
        bus: Bus,
        limits: Mapping[str, Limits] | None = None,
        session_ttl_s: float = DEFAULT_SESSION_TTL_S,
    ) -> None:
        """Prepare a replica; `running` starts it.

        Args: limits: limits by tenant; tenants that are missing get the defaults.
              session_ttl_s: time without a heartbeat after which a controller counts as lost.
        """
        self._bus = bus
        self._sessions = Sessions(bus)
        self._checkpoints = Checkpoints(bus)
        self._admission = Admission(bus, limits or {})
        self._rates = CallRates(self._admission.call_rate)
        self._session_ttl_s = session_ttl_s
        self._unfinished: dict[str, Msg] = {}
        """Messages received and neither acknowledged nor returned, by their reply subject."""
        self._workers = WorkerPool([validate.__name__, results.__name__])
        """They decode large payloads."""
        self._queued: GroupCommit[_Queued, int] = GroupCommit(self._append_all)
        self._log_searches: GroupCommit[float, set[OperationKey]] = GroupCommit(self._logged_since)
        """Searches the log once for all operations that are redelivered at the same time."""

    @asynccontextmanager
    async def running(self, tenants: list[str]) -> AsyncIterator[None]:
        """Route within the context. Leaving it waits for every operation already received."""
        for tenant in tenants:
            self._admission.meter(tenant)  # read its usage before the tenant's first operation
        async with self._workers, asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self._sessions.watch(), name="sessions"),
                group.create_task(self._admission.watch(), name="admission"),
                group.create_task(self._extend(), name="extend"),
            ]
            service = await serve_api(
                self._bus,
                SOURCE,
                {
                    "session.attach": (JobRequest, self.attach),
                    "session.heartbeat": (Heartbeat, self.beat),
                    "job.report": (JobReport, self.report),
                    "result.get": (ResultRequest, self.get_result),
                    "checkpoint.list": (ListCheckpoints, self._checkpoints.find),
                    "checkpoint.show": (CheckpointRequest, self._checkpoints.show),
                    "checkpoint.delete": (CheckpointRequest, self._checkpoints.delete),
                    "checkpoint.expire": (ExpireCheckpoint, self._checkpoints.expire),
                    "checkpoint.archive": (ArchiveCheckpoint, self._checkpoints.archive),
                    "checkpoint.read": (ReadArchive, self._checkpoints.read),
                },
                rates=self._rates,
            )
            async with asyncio.TaskGroup() as operations:
                consumers = [await self._consume(tenant, operations) for tenant in tenants]
                pulling = [operations.create_task(consumer.run()) for consumer in consumers]
                try:
                    yield
                finally:
                    await lifecycle.end(pulling)
                    for consumer in consumers:
                        await self._stop_delivery(consumer)
            await service.stop()
            await lifecycle.end(watches)

    async def _consume(self, tenant: str, operations: asyncio.TaskGroup) -> PullConsumer:
        def handle(message: Msg) -> None:
            task = operations.create_task(self._handle(message))
            task.add_done_callback(lambda _: consumer.finished(message))

        consumer = await self._bus.pull(
            streams.ops_stream(tenant), SOURCE, handle, ack_wait_s=_ACK_WAIT_S
        )
        return consumer

    async def _stop_delivery(self, consumer: PullConsumer) -> None:
        """Stop the delivery of new messages; those already delivered are still handled."""
        if self._bus.client.is_connected:
            with suppress(*_BUS_ERRORS):  # if the connection breaks, other replicas get the rest
                await consumer.stop()

    # --- operations -----------------------------------------------------------------------------

    async def _handle(self, message: Msg) -> None:
        """Route one message. If the bus fails, the message is redelivered, here or to another
        replica."""
        self._unfinished[message.reply] = message
        try:
            await self._route(message)
        except (PhaseloomError, *_BUS_ERRORS) as error:
            log.warning("%s will be delivered again: %r", message.subject, error)
            try:
                await message.nak(delay=_RETRY_DELAY_S)
            except _BUS_ERRORS as nak_error:
                # The message stays unacknowledged, so it is delivered again after `_ACK_WAIT_S`.
                log.warning("could not return %s to the stream: %r", message.subject, nak_error)
        finally:
            del self._unfinished[message.reply]

    async def _extend(self) -> None:
        """Keep messages that take long with this replica, until cancelled."""
        while True:
            before = list(self._unfinished.values())
            await asyncio.sleep(_EXTEND_S)
            for message in before:
                if message.reply in self._unfinished:
                    with suppress(*_BUS_ERRORS):  # it may then be routed twice, without effect
                        await message.in_progress()

    async def _route(self, message: Msg) -> None:
        try:
            key = parse_operation_key(message.subject.removeprefix(_OP_PREFIX))
        except CallerError as error:
            await self._dead_letter(message, error)
            return
        parent = telemetry.extract(message.headers)
        with telemetry.span(
            "route", parent=parent, tenant=key.tenant, job=key.job, deployment=key.deployment
        ) as span:
            span.set_attribute("seq", key.slot)
            if message.metadata.num_delivered > 1 and await self._is_logged(key, message):
                log.info("%s is in the decision log already", key)
            elif key.seq is None and await self._is_done(key):
                # The scheduler has forgotten the completed operation and would run this copy again.
                reason = "a copy of a completed operation"
                await self._bus.notice(SOURCE, "dropped", reason, str(key))
                await self._bus.stored.delete(
                    streams.ops_stream(key.tenant), streams.op_subject(key)
                )
            else:
                start_s = time.perf_counter()
                header = await self._header(key, message)
                metrics.measure(metrics.VALIDATION_DURATION, time.perf_counter() - start_s)
                span.set_attribute("kind", header.kind)
                await self._append(header, message)
        await message.ack()

    async def _append(self, header: QueuedOperation, message: Msg) -> None:
        """Append an operation to the decision log, in one entry with others that arrive meanwhile.

        The first entry for an operation counts. A later one (a late copy, or one from a slow
        replica) has no effect, and the scheduler deletes the copy.
        """
        meter = self._admission.meter(header.key.tenant)
        if header.error is None:
            metadata = message.metadata
            try:
                meter.admit(
                    metadata.sequence.stream, metadata.timestamp.timestamp(), len(message.data)
                )
            except ResourceError as error:
                header = replace(header, error=error.info)
        if header.error is not None:
            log.info("refused %s: %s", header.key, header.error.message)
            reason = f"{header.error.code}: {header.error.message} ({header.error.field})"
            await self._bus.notice(SOURCE, "refused", reason, str(header.key))
        log_sequence: int | None = None
        try:
            log_sequence = await self._log(header, message.metadata.sequence.stream)
        finally:
            if header.error is None:
                meter.dropped() if log_sequence is None else meter.logged(log_sequence)

    async def _log(self, header: QueuedOperation, copy: int) -> int:
        log_sequence = await self._queued.add(_Queued(header, copy, telemetry.inject({})))
        code = "OK" if header.error is None else header.error.code
        metrics.count(metrics.OPERATIONS_ROUTED, tenant=header.key.tenant, code=code)
        return log_sequence

    async def _append_all(self, queued: list[_Queued]) -> int:
        first = queued[0]
        if len(queued) == 1:
            msg_id = f"queued:{first.header.key}:{first.copy}"
            return await self._bus.log.append(first.header, msg_id=msg_id, headers=first.headers)
        traceparents = [entry.headers.get("traceparent", "") for entry in queued]
        return await self._bus.log.append(
            OperationsQueued(
                [entry.header for entry in queued], traceparents if any(traceparents) else []
            )
        )

    async def _dead_letter(self, message: Msg, error: CallerError) -> None:
        log.warning("moved %s to the dead letters: %s", message.subject, error)
        await self._bus.notice(SOURCE, "buried", str(error), message.subject)
        await self._bus.bury(SOURCE, message, error.info)
        # No deployment's purge covers a message without a key, so it is deleted here. Deleting by
        # subject would be unsafe: the subject may contain a wildcard.
        with suppress(NotFoundError):  # delivered twice, already deleted
            metadata = message.metadata
            await self._bus.js.delete_msg(metadata.stream, metadata.sequence.stream)

    async def _is_logged(self, key: OperationKey, message: Msg) -> bool:
        """Return whether a redelivered operation is already in the decision log.

        This only saves work. If the search takes too long the answer is no, and the operation is
        appended again, without effect.
        """
        stored_s = message.metadata.timestamp.timestamp()
        try:
            return key in await self._log_searches.add(stored_s)
        except TimeoutError:
            log.warning("could not search the decision log for %s in time", key)
            return False

    async def _logged_since(self, times_s: list[float]) -> set[OperationKey]:
        logged: set[OperationKey] = set()
        async with asyncio.timeout(_SEARCH_TIMEOUT_S):
            async with aclosing(self._bus.log.queued_since(min(times_s))) as queued:
                async for operation in queued:
                    logged.add(operation.key)
        return logged

    async def _is_done(self, key: OperationKey) -> bool:
        stored = await self._bus.stored.get(streams.DONE, streams.done_subject(key))
        return stored is not None

    async def _header(self, key: OperationKey, message: Msg) -> QueuedOperation:
        content_type = content_type_of(message.headers)
        if validate.is_small(message.data):
            header = validate.header(key, message.data, content_type)
        else:
            header = await self._header_by_worker(key, message.data, content_type)
        if header.error is None:
            newest = await self._sessions.newest(key.job_key, header.session)
            try:
                validate.check_session(header.session, newest)
            except (CallerError, validate.SessionOver) as error:
                header = validate.with_error(header, error.info)
        return replace(header, content_type=JSON if content_type == JSON else MSGPACK)

    async def _header_by_worker(
        self, key: OperationKey, payload: bytes, content_type: str
    ) -> QueuedOperation:
        run = partial(
            self._workers.run, deadline_s=_DEADLINE_S, what="the operation", key=key.tenant
        )
        try:
            return await run(validate.header, key, payload, content_type)
        except CallerError as error:
            operation_id = ""
            with suppress(CallerError):  # to scan for the id needs neither much time nor memory
                operation_id = await run(validate.id_of, payload, content_type)
            return validate.with_error(QueuedOperation(key, operation_id, ""), error.info)

    # --- API ------------------------------------------------------------------------------------

    async def attach(self, tenant: str, request: JobRequest) -> Attached:
        """Open a new session of a job and end older ones, or resume the newest.

        Raises: CallerError: the job does not exist or has ended.
        """
        job = JobKey(tenant, check_name(request.job, "job"))
        view = await self._bus.keys.get(Bucket.VIEW, str(job))
        if view is None:
            raise CallerError(
                f"job {request.job} does not exist",
                code=Code.NOT_FOUND,
                field="job",
                remedy="submit it first",
            )
        status: JobStatus = decode(view.payload, JobStatus)
        results.check_attachable(status)
        session = await self._sessions.open(job, resumes=bool(request.numbered))
        # After this entry the scheduler refuses operations of older sessions. A replica that does
        # not know the new session yet may still accept them.
        await self._bus.log.append(SessionOpened(job, session), msg_id=f"session:{job}:{session}")
        # Read the streams only now: older sessions are over and can no longer add operations.
        subjects = f"{streams.PREFIX}.op.{job}.>"
        stored_ops = await self._bus.stored.subjects(streams.ops_stream(tenant), subjects)
        done_subjects = f"{streams.PREFIX}.done.{job}.>"
        stored_outcomes = await self._bus.stored.subjects(streams.DONE, done_subjects)
        # In threads: a job may have tens of thousands of operations.
        operations = await asyncio.to_thread(results.stored_seqs, stored_ops)
        outcomes = await asyncio.to_thread(results.stored_seqs, stored_outcomes)
        status, fillers = await asyncio.to_thread(
            results.attach_status, job, status, operations, outcomes, request.numbered
        )
        for filler in fillers:
            await self._log(filler, 0)
        stored = await self._bus.keys.get(Bucket.CHECKPOINTS, str(job))
        checkpoint: Checkpoint | None = decode(stored.payload, Checkpoint) if stored else None
        return Attached(session=session, status=status, checkpoint=checkpoint)

    async def report(self, tenant: str, request: JobReport) -> Reported:
        """Store values that a controller reports, such as its reward.

        Raises: CallerError: a value is invalid, or the job does not exist.
        """
        check_report(request.job, request.step, request.values)
        job = JobKey(tenant, request.job)
        stored = await self._bus.keys.get(Bucket.VIEW, str(job))
        if stored is None:
            raise CallerError(
                f"job {request.job} does not exist",
                code=Code.NOT_FOUND,
                field="job",
                remedy="submit it first",
            )
        run = request.run or decode(stored.payload, JobStatus).run
        if run:  # the scheduler before this version names no run
            check_name(run, "run")
        await self._bus.publish(streams.report_subject(job, run), request)
        return Reported()

    async def beat(self, tenant: str, request: Heartbeat) -> Beat:
        """Renew a session's lease. When it expires, the scheduler considers the controller lost.

        Raises: CallerError: the session never existed. ResourceError: ABORTED: it is over.
        """
        job = JobKey(tenant, check_name(request.job, "job"))
        newest = await self._sessions.newest(job, request.session)
        validate.check_session(request.session, newest)
        await leases.renew_session(self._bus, job, request.session, self._session_ttl_s)
        return Beat(self._session_ttl_s)

    async def get_result(self, tenant: str, request: ResultRequest) -> ResultReply | Encoded:
        """Return an operation's completion or, if it is still open, its id."""
        deployment = DeploymentKey(tenant, request.job, request.deployment)
        key = parse_operation_key(f"{deployment}.{request.slot}")
        done = await self._bus.stored.get(streams.DONE, streams.done_subject(key))
        if done is not None:
            return Encoded(partial(self._reply, tenant, done))
        stored = await self._bus.stored.get(streams.ops_stream(tenant), streams.op_subject(key))
        if stored is None:
            return ResultReply()
        payload, content_type = stored.payload, content_type_of(stored.headers)
        return ResultReply(
            stored_id=await self._call(tenant, validate.id_of, payload, content_type)
        )

    async def _reply(self, tenant: str, done: Stored, content_type: str) -> bytes:
        stored_type = content_type_of(done.headers)
        return await self._call(tenant, results.reply, done.payload, stored_type, content_type)

    async def _call(
        self, tenant: str, function: Callable[[bytes, *Ts], T], payload: bytes, *arguments: *Ts
    ) -> T:
        """Call a function with a stored payload, in a worker process if the payload is large."""
        if validate.is_small(payload):
            return function(payload, *arguments)
        return await self._workers.run(
            function, payload, *arguments, deadline_s=_DEADLINE_S, what="the message", key=tenant
        )
