"""The router's shell: it moves operations into the decision log, opens sessions, answers results.

A router keeps nothing that the bus does not have. Any number of replicas share each tenant's
consumer, and one that is killed leaves its unacknowledged operations to the others. An operation is
acknowledged only after its header is in the decision log; a repeat is refused there by its message
id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

import nats.errors
from msgspec.structs import replace
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
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
    InternalError,
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
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.observability import metrics, telemetry
from phaseloom.common.process import lifecycle
from phaseloom.common.transport import leases
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.groupcommit import GroupCommit
from phaseloom.common.transport.keys import Conflict
from phaseloom.common.transport.services import serve_api
from phaseloom.router.admission import Admission
from phaseloom.router.checkpoints import Checkpoints
from phaseloom.router.core import results, validate
from phaseloom.router.core.limits import Limits

log = logging.getLogger(__name__)

SOURCE = "router"
_OP_PREFIX = f"{streams.PREFIX}.op."
_ACK_WAIT_S = 10.0
_RETRY_DELAY_S = 0.5
_MAX_ACK_PENDING = 64
"""The most operations in hand over all replicas; each may hold a payload of the largest size."""

DEFAULT_SESSION_TTL_S = 15.0

_LOOK_BACK_S = 8.0
"""How long the log is searched for an operation that is delivered again. It is less than
`_ACK_WAIT_S`, so that this replica still has the message when the search ends."""

_BUS_ERRORS = (nats.errors.Error, JetStreamError, TimeoutError)


class Sessions:
    """The newest session of each job, read when it is needed and kept fresh by watching."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._newest: dict[str, int] = {}

    async def watch(self) -> None:
        """Follow the sessions that other replicas give out, until cancelled."""
        async for change in self._bus.keys.watch(Bucket.SESSIONS):
            if change.stored is None:
                self._newest.pop(change.key, None)
            else:
                session = int(change.stored.payload)
                # The watch may lag behind the sessions that this replica itself gave out or read.
                self._newest[change.key] = max(session, self._newest.get(change.key, 0))

    async def newest(self, job: JobKey, claimed: int) -> int:
        """The newest session of a job; 0: none was given out.

        It is read again where it differs from the session that an operation claims.
        """
        key = str(job)
        if self._newest.get(key) != claimed:
            stored = await self._bus.keys.get(Bucket.SESSIONS, key)
            self._newest[key] = int(stored.payload) if stored else 0
        return self._newest[key]

    async def give(self, job: JobKey, *, resumes: bool) -> int:
        """Give out a job's next session number; every older session is over from now on.

        Args: resumes: give the newest number once more, where there is one.
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
    """The operation's sequence in the tenant's stream."""
    headers: dict[str, str]


class Router:
    """One replica of the router, which routes while the block of `running` lasts."""

    def __init__(
        self,
        bus: Bus,
        limits: Mapping[str, Limits] | None = None,
        session_ttl_s: float = DEFAULT_SESSION_TTL_S,
    ) -> None:
        """A replica that does nothing yet.

        Args: limits: the bounds of each tenant; a tenant without any has the default ones.
              session_ttl_s: how long a controller that has sent a heartbeat counts as alive.
        """
        self._bus = bus
        self._sessions = Sessions(bus)
        self._checkpoints = Checkpoints(bus)
        self._admission = Admission(bus, limits or {})
        self._session_ttl_s = session_ttl_s
        self._queued: GroupCommit[_Queued, int] = GroupCommit(self._append_all)
        self._again: GroupCommit[float, set[OperationKey]] = GroupCommit(self._logged_since)
        """One search of the log for all operations that are delivered again at once."""

    @asynccontextmanager
    async def running(self, tenants: list[str]) -> AsyncIterator[None]:
        """Route while the block lasts. Leaving it waits until every operation in hand is done."""
        for tenant in tenants:
            self._admission.meter(tenant)  # so that it is read before the tenant's first operation
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self._sessions.watch(), name="sessions"),
                group.create_task(self._admission.watch(), name="admission"),
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
                    "checkpoint.archive": (CheckpointRequest, self._checkpoints.archive),
                    "checkpoint.read": (ReadArchive, self._checkpoints.read),
                },
            )
            async with asyncio.TaskGroup() as operations:

                def take(message: Msg) -> None:
                    operations.create_task(self._take(message))

                subscriptions = [
                    await self._bus.consume(
                        streams.ops_stream(tenant),
                        f"{_OP_PREFIX}{tenant}.>",
                        SOURCE,
                        take,
                        shared=True,
                        max_ack_pending=_MAX_ACK_PENDING,
                        ack_wait_s=_ACK_WAIT_S,
                    )
                    for tenant in tenants
                ]
                try:
                    yield
                finally:
                    for subscription in subscriptions:
                        await self._stop_taking(subscription)
            await service.stop()
            await lifecycle.end(watches)

    async def _stop_taking(self, subscription: Subscription) -> None:
        """Take the messages that were delivered already, and no more."""
        if self._bus.client.is_connected:
            with suppress(*_BUS_ERRORS):  # cut off now: the rest is delivered elsewhere
                await subscription.drain()  # type: ignore[no-untyped-call]

    # --- operations -----------------------------------------------------------------------------

    async def _take(self, message: Msg) -> None:
        """Route one message; where the bus fails, it comes again, here or elsewhere."""
        try:
            await self._route(message)
        except (PhaseloomError, *_BUS_ERRORS) as error:
            log.warning("%s is put back: %r", message.subject, error)
            await self._put_back(message)

    async def _put_back(self, message: Msg) -> None:
        try:
            await message.nak(delay=_RETRY_DELAY_S)
        except _BUS_ERRORS as error:
            # The message is not acknowledged either: it comes again after the acknowledgement wait.
            log.warning("%s could not be put back: %r", message.subject, error)

    async def _route(self, message: Msg) -> None:
        try:
            key = parse_operation_key(message.subject.removeprefix(_OP_PREFIX))
        except CallerError as error:
            await self._bury(message, error)
            return
        parent = telemetry.extract(message.headers)
        with telemetry.span(
            "route", parent=parent, tenant=key.tenant, job=key.job, deployment=key.deployment
        ) as span:
            span.set_attribute("seq", key.slot)
            if message.metadata.num_delivered > 1 and await self._is_logged(key, message):
                log.info("%s is in the decision log already", key)
            elif key.seq is None and await self._is_done(key):
                await self._drop(key)
            else:
                began_s = time.perf_counter()
                header = await self._header(key, message)
                metrics.measure(metrics.VALIDATION_DURATION, time.perf_counter() - began_s)
                span.set_attribute("kind", header.kind)
                await self._append(header, message)
        await message.ack()

    async def _append(self, header: QueuedOperation, message: Msg) -> None:
        """Append an operation to the decision log, together with others that come now.

        The first entry for an operation decides. A later entry, for a late copy or from a replica
        that was slow, has no effect, and the scheduler deletes the copy.
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
        place: int | None = None
        try:
            place = await self._log(header, message.metadata.sequence.stream)
        finally:
            if header.error is None:
                meter.dropped() if place is None else meter.logged(place)

    async def _log(self, header: QueuedOperation, copy: int) -> int:
        place = await self._queued.add(_Queued(header, copy, telemetry.inject({})))
        code = "OK" if header.error is None else header.error.code
        metrics.count(metrics.OPERATIONS_ROUTED, tenant=header.key.tenant, code=code)
        return place

    async def _append_all(self, queued: list[_Queued]) -> int:
        """Append the operations that came since the last append, in one entry."""
        first = queued[0]
        if len(queued) == 1:
            msg_id = f"queued:{first.header.key}:{first.copy}"
            return await self._bus.log.append(first.header, msg_id=msg_id, headers=first.headers)
        traceparents = [one.headers.get("traceparent", "") for one in queued]
        return await self._bus.log.append(
            OperationsQueued(
                [one.header for one in queued], traceparents if any(traceparents) else []
            )
        )

    async def _drop(self, key: OperationKey) -> None:
        """Delete a late copy of a reading operation without order.

        The scheduler keeps nothing of such an operation once it is done, so it could not tell the
        copy from a new one.
        """
        reason = "a copy of an operation that is done"
        await self._bus.notice(SOURCE, "dropped", reason, str(key))
        await self._bus.stored.delete(streams.ops_stream(key.tenant), streams.op_subject(key))

    async def _bury(self, message: Msg, error: CallerError) -> None:
        log.warning("buried %s: %s", message.subject, error)
        await self._bus.notice(SOURCE, "buried", str(error), message.subject)
        await self._bus.bury(SOURCE, message, error.info)
        # Nobody else deletes a message without a key, since no deployment's purge covers it. It is
        # not deleted by its subject, which may hold a wildcard.
        with suppress(NotFoundError):  # it was delivered twice
            metadata = message.metadata
            await self._bus.js.delete_msg(metadata.stream, metadata.sequence.stream)

    async def _is_logged(self, key: OperationKey, message: Msg) -> bool:
        """Whether an operation that is delivered again is in the decision log already.

        This only saves work: where the log since then is too long to be read, the answer is no, and
        the operation is appended once more.
        """
        stored_s = message.metadata.timestamp.timestamp()
        try:
            return key in await self._again.add(stored_s)
        except TimeoutError:
            log.warning("whether %s is in the decision log could not be found out in time", key)
            return False

    async def _logged_since(self, times_s: list[float]) -> set[OperationKey]:
        logged: set[OperationKey] = set()
        async with asyncio.timeout(_LOOK_BACK_S):
            async with aclosing(self._bus.log.queued_since(min(times_s))) as queued:
                async for operation in queued:
                    logged.add(operation.key)
        return logged

    async def _is_done(self, key: OperationKey) -> bool:
        stored = await self._bus.stored.get(streams.DONE, streams.done_subject(key))
        return stored is not None

    async def _header(self, key: OperationKey, message: Msg) -> QueuedOperation:
        """The header of an operation for the decision log, with the error where it is refused."""
        content_type = content_type_of(message.headers)
        try:
            operation = validate.read(key, message.data, content_type)
            newest = await self._sessions.newest(key.job_key, operation.session)
            validate.check_session(operation.session, newest)
        except (CallerError, validate.SessionOver, InternalError) as error:
            header = validate.refused(key, message.data, content_type, error.info)
        else:
            header = replace(validate.queued(key, operation), num_bytes=len(message.data))
        return replace(header, content_type=JSON if content_type == JSON else MSGPACK)

    # --- API ------------------------------------------------------------------------------------

    async def attach(self, tenant: str, request: JobRequest) -> Attached:
        """Open a new session of a job and end every older one, or go on with the newest.

        Raises: CallerError: no such job, or it has ended.
        """
        job = JobKey(tenant, check_name(request.job, "job"))
        view = await self._bus.keys.get(Bucket.VIEW, str(job))
        if view is None:
            raise CallerError(
                f"there is no job {request.job!r}",
                code=Code.NOT_FOUND,
                field="job",
                remedy="submit it first",
            )
        status: JobStatus = decode(view.payload, JobStatus)
        results.check_attachable(status)
        session = await self._sessions.give(job, resumes=bool(request.numbered))
        # From this place of the log on, the scheduler refuses operations of older sessions, which a
        # replica that does not know of this session yet may still let pass.
        await self._bus.log.append(SessionOpened(job, session), msg_id=f"session:{job}:{session}")
        # The streams are read after the older sessions are over, which can add nothing any more.
        wanted = f"{streams.PREFIX}.op.{job}.>"
        operations = results.stored_seqs(
            await self._bus.stored.subjects(streams.ops_stream(tenant), wanted)
        )
        outcomes = results.stored_seqs(
            await self._bus.stored.subjects(streams.DONE, f"{streams.PREFIX}.done.{job}.>")
        )
        status, fillers = results.attach_status(job, status, operations, outcomes, request.numbered)
        for filler in fillers:
            await self._log(filler, 0)
        stored = await self._bus.keys.get(Bucket.CHECKPOINTS, str(job))
        checkpoint: Checkpoint | None = decode(stored.payload, Checkpoint) if stored else None
        return Attached(session=session, status=status, checkpoint=checkpoint)

    async def report(self, tenant: str, request: JobReport) -> Reported:
        """Store what a controller measures.

        Raises: CallerError: a value is not valid, or there is no such job.
        """
        check_report(request.job, request.step, request.values)
        job = JobKey(tenant, request.job)
        if await self._bus.keys.get(Bucket.VIEW, str(job)) is None:
            raise CallerError(
                f"there is no job {request.job}",
                code=Code.NOT_FOUND,
                field="job",
                remedy="submit it first",
            )
        await self._bus.publish(streams.report_subject(job), request)
        return Reported()

    async def beat(self, tenant: str, request: Heartbeat) -> Beat:
        """Renew a session's lease. When it runs out, the scheduler takes the controller for lost.

        Raises: CallerError: the session was never given out. ResourceError: ABORTED: it is over.
        """
        job = JobKey(tenant, check_name(request.job, "job"))
        newest = await self._sessions.newest(job, request.session)
        validate.check_session(request.session, newest)
        await leases.renew_session(self._bus, job, request.session, self._session_ttl_s)
        return Beat(self._session_ttl_s)

    async def get_result(self, tenant: str, request: ResultRequest) -> ResultReply:
        """Answer with the completion of an operation or, where there is none yet, with the
        operation's id."""
        deployment = DeploymentKey(tenant, request.job, request.deployment)
        key = parse_operation_key(f"{deployment}.{request.slot}")
        done = await self._bus.stored.get(streams.DONE, streams.done_subject(key))
        if done is not None:
            completion: Completion = decode(done.payload, Completion, content_type_of(done.headers))
            return ResultReply(stored_id=completion.id, completion=completion)
        stored = await self._bus.stored.get(streams.ops_stream(tenant), streams.op_subject(key))
        if stored is None:
            return ResultReply()
        identity = validate.identify(stored.payload, content_type_of(stored.headers))
        return ResultReply(stored_id=identity.id)
