"""Submitted operations, from the call to the outcome.

The call fixes an operation's `seq` and bytes. A background task publishes them until the server has
stored them. Publishing twice is harmless, because the server keeps only the first message of each
subject.

The completion arrives over a plain subscription, which may lose messages. So the outcomes of open
operations are also requested by key, periodically and after every reconnect. No operation stays
open forever: if the mesh does not answer for `answer_timeout_s`, open operations end as
UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from nats.aio.msg import Msg

from phaseloom.client.contact import Contact
from phaseloom.client.hooks import Hooks, OperationEnded
from phaseloom.common.contract import api
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, content_type_of, decode
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import After, Completion, Outcome, Progress, Result
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES, op_subject, out_subject
from phaseloom.common.observability import telemetry
from phaseloom.common.transport.link import is_subject_taken
from phaseloom.common.transport.natsclient import MeshClient
from phaseloom.common.transport.services import call_api, pub_ack, publish_to_stream

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 16
_MAX_UNSTORED_BYTES = 256 * 1024 * 1024
_MAX_OPERATION_BYTES = MAX_PAYLOAD_BYTES - 4096
"""The rest of a message is for its headers, which count as well."""
_ACK_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
_CHECK_EVERY_S = 2.0
_STALE_S = 5.0
_MAX_MISSES = 3
_PROGRESS = ".progress"
_UNFINISHED = {
    Outcome.CANCELLED: (Code.ABORTED, "was cancelled"),
    Outcome.EXPIRED: (Code.DEADLINE_EXCEEDED, "expired"),
}

R_co = TypeVar("R_co", covariant=True)


class OperationPart:
    """One operation on the wire. A call that was split has several parts."""

    def __init__(self, key: OperationKey, id: str, kind: str, payload: bytes) -> None:
        self.key = key
        self.id = id
        self.kind = kind
        self.payload = payload
        self.stored = asyncio.Event()
        """Set once the server is known to have stored the part, or the part has ended."""
        self.is_stored = False
        self.is_reported = False
        """Whether the mesh reported the outcome. Otherwise this session ended first."""
        self.stored_s = 0.0
        self.misses = 0
        self.is_awaited = False
        self.on_progress: Callable[[Progress], None] | None = None
        # An error is stored as a value: asyncio warns about exceptions that nobody retrieves.
        self.outcome: asyncio.Future[Result | PhaseloomError] = (
            asyncio.get_running_loop().create_future()
        )

    def __del__(self) -> None:
        """Log a failure that nobody awaited, once nobody can await it."""
        if self.is_awaited or not (self.is_reported and self.outcome.done()):
            return
        error = self.outcome.result()
        if isinstance(error, PhaseloomError):
            log.warning("%s (%s) failed and nobody awaited it: %s", self.key, self.kind, error)

    @property
    def state(self) -> str:
        """The operation's state that this controller knows."""
        if not self.outcome.done():
            return "submitted"
        return "failed" if isinstance(self.outcome.result(), PhaseloomError) else "completed"


class OperationHandle(Generic[R_co]):
    """A submitted operation. Await the handle for the result, any number of times.

    Awaiting a failed operation raises its PhaseloomError. A failure that nobody awaits is logged as
    a warning. Cancelling the waiting task does not cancel the operation; `cancel` does.
    """

    def __init__(
        self, parts: list[OperationPart], merge: Callable[[list[Result]], R_co], outbox: Outbox
    ) -> None:
        self._parts = parts
        self._merge = merge
        self._outbox = outbox

    def __await__(self) -> Generator[Any, None, R_co]:
        return self._result().__await__()

    @property
    def key(self) -> str:
        """`<tenant>.<job>.<deployment>.<seq>` of the operation, or of its last part."""
        return str(self._parts[-1].key)

    @property
    def job(self) -> str:
        return self._parts[-1].key.job

    @property
    def kind(self) -> str:
        """The operation's kind, such as `forward_backward`."""
        return self._parts[-1].kind

    @property
    def seq(self) -> int:
        return self.ref.seq

    @property
    def ref(self) -> After:
        """A reference to this operation, or to its last part, for the `after` of another
        operation."""
        return self.refs[-1]

    @property
    def refs(self) -> list[After]:
        return [After(part.key.deployment, int(part.key.slot)) for part in self._parts]

    async def stored(self) -> None:
        """Wait until the mesh has durably stored the operation.

        Raises: PhaseloomError: this session cannot confirm that the operation was stored. It may
                have been stored if only the acknowledgement was lost.
        """
        for part in self._parts:
            await part.stored.wait()
            if not part.is_stored:
                reason = part.outcome.result()
                assert isinstance(reason, PhaseloomError), "an operation with a result was stored"
                raise reason

    def done(self) -> bool:
        return all(part.outcome.done() for part in self._parts)

    @property
    def is_lost(self) -> bool:
        """Whether this session ended before it learnt the outcome.

        The operation may still run, or may never have been stored. Awaiting the handle raises the
        reason why the session ended.
        """
        return any(part.outcome.done() and not part.is_reported for part in self._parts)

    async def cancel(self) -> None:
        """Cancel the operation, and return once the mesh has accepted the request.

        An operation without a permit ends at once. A running `generate` or `forward` is stopped. A
        running mutating operation continues to its end. Await the handle for the outcome: the
        result if the operation finished first, otherwise ABORTED.

        Raises: PhaseloomError: the mesh refused or did not answer.
        """
        await self._cancel(keeps_partial=False)

    async def stop(self) -> None:
        """Stop a running `generate`, and keep the tokens already sampled.

        Awaiting the handle then returns the result. An unfinished sample has the stop_reason
        `partial`; `continued` makes the prompt that continues it, token for token. An operation
        that is not running yet is cancelled, as by `cancel`: awaiting it raises ABORTED.

        Raises: PhaseloomError: the mesh refused or did not answer.
        """
        await self._cancel(keeps_partial=True)

    async def _cancel(self, *, keeps_partial: bool) -> None:
        for part in self._parts:
            key = part.key
            request = api.CancelRequest(key.job, key.deployment, key.slot, keeps_partial)
            await self._outbox.call_when_stored("operation.cancel", part, request)

    async def explain(self) -> api.Explanation:
        """Explain what the operation waits for, its position in the order, and its predicted start.

        For an operation that was split, the answer is about its first open part.

        Raises: PhaseloomError: the mesh refused or did not answer.
        """
        part = next((p for p in self._parts if not p.outcome.done()), self._parts[-1])
        key = part.key
        request = api.OperationRequest(key.job, key.deployment, key.slot)
        answer = await self._outbox.call_when_stored("operation.explain", part, request)
        return answer or api.Explanation(part.key, part.kind, part.state)

    async def _result(self) -> R_co:
        for part in self._parts:
            part.is_awaited = True
        results = []
        for part in self._parts:
            # Shielded: cancelling one waiter must not cancel the outcome that others await.
            outcome = await asyncio.shield(part.outcome)
            if isinstance(outcome, PhaseloomError):
                raise outcome
            results.append(outcome)
        return self._merge(results)


class Lost(ResourceError):
    """The session ended before the outcome of a request was known. The caller must repeat the
    request."""


async def outcome_of(handle: OperationHandle[R_co]) -> R_co:
    """Return the result of an operation.

    Raises: PhaseloomError: the operation failed. Lost: its job's session ended before the outcome
            was known.
    """
    try:
        return await handle
    except PhaseloomError as error:
        if not handle.is_lost:
            raise
        raise Lost(
            f"the outcome of {handle.key} is unknown: {error.info.message}",
            remedy="repeat the request",
        ) from error


class Outbox:
    """The open operations of one session of a job."""

    def __init__(
        self,
        client: MeshClient,
        job: JobKey,
        start: Callable[[Coroutine[Any, Any, None]], None],
        answer_timeout_s: float,
        hooks: Hooks | None = None,
    ) -> None:
        self.hooks = hooks or Hooks()
        self.contact = Contact(answer_timeout_s)
        """Whether the mesh answers. All sessions of a connection share one."""
        self._client = client
        self._job = job
        self.start = start
        """Starts a coroutine in the background. It runs until it ends or the connection closes."""
        self._answer_timeout_s = answer_timeout_s
        self._window = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._open: dict[str, OperationPart] = {}
        self._unstored_bytes = 0
        self._answered_s = time.monotonic()
        self._wake = asyncio.Event()
        self._ended: PhaseloomError | None = None
        """Why nothing more can be submitted; None while the session is open."""
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the session is over: no operation is open, and none can be submitted."""
        return self._closed.is_set()

    @property
    def is_ending(self) -> bool:
        """Whether nothing more can be submitted, though operations may still be open."""
        return self._ended is not None

    async def closed(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for the session to end, and return whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._closed.wait()
        return self.is_closed

    def check_room(self, *sizes: int) -> None:
        """Check that the session accepts operations of these sizes. Call it before assigning a
        `seq`: later operations would wait forever for one that cannot be sent.

        Raises: PhaseloomError: the session is over. CallerError: an operation is too large for one
                message. ResourceError: RESOURCE_EXHAUSTED: too many bytes are waiting to be stored.
        """
        if self._ended:
            raise self._ended
        num_bytes = sum(sizes)
        if max(sizes) > _MAX_OPERATION_BYTES:
            raise CallerError(
                f"an operation must have at most {_MAX_OPERATION_BYTES} bytes, got {max(sizes)}",
                field="args",
                remedy="send fewer or shorter samples at once",
            )
        if self._unstored_bytes + num_bytes > _MAX_UNSTORED_BYTES:
            raise ResourceError(
                f"{self._unstored_bytes} bytes of operations are still waiting to be published",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="await some of the handles first",
            )

    def submit(self, part: OperationPart) -> None:
        self._open[out_subject(part.key)] = part
        self._unstored_bytes += len(part.payload)
        self.start(self._deliver(part, len(part.payload)))

    def end(self, error: PhaseloomError) -> None:
        """End the session: refuse new operations, and fail the open ones with this error."""
        self._ended = self._ended or error
        for part in list(self._open.values()):
            self._resolve(part, error)
        self._closed.set()
        self._wake.set()

    def expect_end(self) -> None:
        """Do not log the failures of open operations: this program is ending the job itself."""
        for part in self._open.values():
            part.is_awaited = True

    def reconnected(self) -> None:
        """Request the outcomes of open operations now, since completions may have been missed."""
        self._wake.set()

    def on_completion(self, message: Msg) -> None:
        """Handle a message on one of the job's `out` subjects."""
        self._answered_s = time.monotonic()
        part = self._open.get(message.subject)
        if part is None:
            if message.subject.endswith(_PROGRESS):
                self._on_progress(message)
            return
        try:
            completion = decode(message.data, Completion, content_type_of(message.headers))
        except CallerError as error:
            self._resolve_reported(part, InternalError(f"cannot decode its completion: {error}"))
            return
        self._complete(part, completion)

    def _on_progress(self, message: Msg) -> None:
        part = self._open.get(message.subject.removesuffix(_PROGRESS))
        if part is None or not (self.hooks or part.on_progress):
            return
        try:
            progress = decode(message.data, Progress, content_type_of(message.headers))
            if part.on_progress is not None:
                part.on_progress(progress)
        except (CallerError, ValueError) as error:
            log.warning("cannot decode progress on %s: %s", message.subject, error)
            return
        self.hooks.emit(progress)

    # --- publishing -----------------------------------------------------------------------------

    async def _deliver(self, part: OperationPart, num_bytes: int) -> None:
        # Tasks start in the order of the calls, and the semaphore admits them in that order.
        async with self._window:
            key = part.key
            with telemetry.span(
                "submit",
                tenant=key.tenant,
                job=key.job,
                deployment=key.deployment,
                seq=key.slot,
                kind=part.kind,
            ):
                try:
                    await self._publish(part)
                except PhaseloomError as error:
                    # Later operations would wait forever for the missing number.
                    self._resolve(part, error)
                    self.end(error)
        part.payload = b""
        self._unstored_bytes -= num_bytes

    async def _publish(self, part: OperationPart) -> None:
        """Publish an operation until it is stored, its outcome is known, or the timeout expires.

        Raises: PhaseloomError: the operation was not stored, or an operation of another session has
                its `seq`.
        """
        deadline = time.monotonic() + self._answer_timeout_s
        pause_s = _FIRST_PAUSE_S
        while not part.outcome.done():
            try:
                if await self._try_publish(part):
                    part.stored_s = time.monotonic()
                    part.is_stored = True
                    part.stored.set()
                    return
            except ResourceError as error:
                is_transient = error.info.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
                if not is_transient or time.monotonic() + pause_s > deadline:
                    raise
                log.info("publishing %s again in %.2f s: %s", part.key, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _try_publish(self, part: OperationPart) -> bool:
        """Publish an operation once. Returns: whether the server is known to have stored it.

        Raises: ResourceError: UNAVAILABLE or RESOURCE_EXHAUSTED: try again. ABORTED: an operation
                of another session has this `seq`.
        """
        if not self._client.is_connected and self._client.denial is None:
            raise ResourceError("not connected to NATS", remedy="check that the mesh is up")
        message = await publish_to_stream(
            self._client,
            op_subject(part.key),
            part.payload,
            timeout_s=_ACK_TIMEOUT_S,
            headers=telemetry.inject({CONTENT_TYPE: MSGPACK}),
        )
        self._answered_s = time.monotonic()
        error = pub_ack(message).get("error")
        if error is None:
            return True
        if not is_subject_taken(error.get("err_code"), error.get("description")):
            raise ResourceError(
                f"{part.key} was not stored: {error.get('description')}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="wait until operations complete, or have the operator enlarge the stream",
            )
        reply = await self._request_result(part)
        if reply.stored_id is None:
            return False
        if reply.stored_id != part.id:
            raise self._lose_session(part)
        return True

    # --- outcomes -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Request the outcomes of operations that stay open, until the session ends.

        The loop also checks `is_closed` because cancelling this task does not reliably end it: on
        Python 3.11, a request whose answer arrives at the moment of the cancellation swallows it.
        """
        while not self.is_closed:
            try:
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            was_cut_off = self._wake.is_set()
            self._wake.clear()
            await self._check(0.0 if was_cut_off else _STALE_S)

    async def _check(self, min_age_s: float) -> None:
        if not self._open:
            self._answered_s = time.monotonic()
            return
        begun_s = time.monotonic()
        try:
            for name in {part.key.deployment: None for part in self._open.values()}:
                await self._check_deployment(name, min_age_s)
        except CallerError as error:
            self.end(error)
        except ResourceError as error:
            if error.info.code is Code.UNAVAILABLE:
                self.contact.silent(error.info.message, begun_s)
            silent_s = time.monotonic() - self._answered_s
            if silent_s > self._answer_timeout_s:
                self.end(
                    ResourceError(
                        f"the mesh has not answered for {silent_s:.0f} s: {error.info.message}",
                        remedy="check that its NATS servers run and have free disk space; attach "
                        "again when it is up: stored operations will still run",
                    )
                )

    async def settle(self) -> None:
        """Wait for the outcomes of all stored operations after the job has ended.

        Completions may arrive after the end of the job is known.
        """
        deadline = time.monotonic() + self._answer_timeout_s
        for part in [part for part in self._open.values() if part.stored.is_set()]:
            pause_s = _FIRST_PAUSE_S
            while not part.outcome.done() and time.monotonic() < deadline:
                try:
                    await self._look_up(part)
                except ResourceError as error:
                    log.info("requesting the outcome of %s again: %s", part.key, error)
                await asyncio.wait([part.outcome], timeout=pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _check_deployment(self, name: str, min_age_s: float) -> None:
        """Request the outcomes of a deployment's operations in order, up to the first one still
        running.

        Later operations end later, so there is nothing to learn behind it.
        """
        oldest = time.monotonic() - min_age_s
        while (part := self._first_open(name)) and part.stored.is_set() and part.stored_s <= oldest:
            await self._look_up(part)
            if not part.outcome.done():
                return

    def _first_open(self, name: str) -> OperationPart | None:
        return next((p for p in self._open.values() if p.key.deployment == name), None)

    async def _look_up(self, part: OperationPart) -> None:
        reply = await self._request_result(part)
        if reply.completion is not None:
            self._complete(part, reply.completion)
        elif reply.stored_id is None:
            # The router reads the operation and its completion one after the other, so it may miss
            # an operation that ends in between. Only repeated absence counts as a loss.
            part.misses += 1
            if part.misses >= _MAX_MISSES:
                lost = ResourceError(
                    f"{part.key} was stored but is gone", code=Code.DATA_LOSS, remedy="attach again"
                )
                self._resolve_reported(part, lost)

    async def _request_result(self, part: OperationPart) -> api.ResultReply:
        key = part.key
        request = api.ResultRequest(key.job, key.deployment, key.slot)
        reply = await call_api(self._client, key.tenant, "result.get", request, api.ResultReply)
        self._answered_s = time.monotonic()
        self.contact.answered()
        return reply

    def _complete(self, part: OperationPart, completion: Completion) -> None:
        if completion.id and completion.id != part.id:
            self._resolve(part, self._lose_session(part))
        elif completion.outcome is Outcome.COMPLETED and completion.result is not None:
            self._resolve_reported(part, completion.result)
        elif completion.outcome in _UNFINISHED and completion.error is None:
            # The caller cancelled it, so an unawaited handle needs no warning.
            part.is_awaited |= completion.outcome is Outcome.CANCELLED
            code, description = _UNFINISHED[completion.outcome]
            self._resolve_reported(part, ResourceError(f"{part.key} {description}", code=code))
        elif completion.error is not None:
            error = to_exception(completion.error)
            if error.info.code is Code.ABORTED and error.info.field == "session":
                self._ended = self._ended or error
            self._resolve_reported(part, error)
        else:
            self._resolve_reported(
                part, InternalError(f"{part.key} ended as {completion.outcome} without a reason")
            )

    def _lose_session(self, part: OperationPart) -> ResourceError:
        error = ResourceError(
            f"another session submitted {part.key}", code=Code.ABORTED, remedy="attach again"
        )
        self._ended = self._ended or error
        return error

    def _resolve_reported(self, part: OperationPart, outcome: Result | PhaseloomError) -> None:
        if not part.outcome.done():
            part.is_stored = part.is_reported = True
        self._resolve(part, outcome)

    def _resolve(self, part: OperationPart, outcome: Result | PhaseloomError) -> None:
        self._open.pop(out_subject(part.key), None)
        if part.outcome.done():
            return
        part.outcome.set_result(outcome)
        part.stored.set()
        error = outcome if isinstance(outcome, PhaseloomError) else None
        self.hooks.emit(OperationEnded(part.key, part.kind, error))

    # --- cancelling and explaining --------------------------------------------------------------

    async def call_when_stored(
        self, call: str, part: OperationPart, request: api.OperationRequest
    ) -> api.Explanation | None:
        """Call `operation.cancel` or `operation.explain` once the operation is stored.

        Returns: the answer; None: the operation has ended meanwhile.
        Raises:  PhaseloomError: the mesh refused. UNAVAILABLE: no answer arrived in time.
        """
        key = part.key
        deadline = time.monotonic() + self._answer_timeout_s
        pause_s = _FIRST_PAUSE_S
        while not part.outcome.done():
            try:
                if part.stored.is_set():
                    return await call_api(self._client, key.tenant, call, request, api.Explanation)
            except PhaseloomError as error:
                if error.info.code is Code.FAILED_PRECONDITION and await self._has_ended(part):
                    return None  # the operation ended first, and its outcome is on its way
                # The operation has not reached the scheduler yet, or no service answers.
                is_transient = error.info.code in (Code.NOT_FOUND, Code.UNAVAILABLE)
                if not is_transient or time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.wait([part.outcome], timeout=pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return None

    async def _has_ended(self, part: OperationPart) -> bool:
        with suppress(ResourceError):  # without an answer, nothing is known
            await self._look_up(part)
        return part.outcome.done()
