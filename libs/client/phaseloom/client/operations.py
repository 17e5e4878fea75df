"""Operations under way: from the call to the one outcome.

The `seq` and the bytes of an operation are fixed when it is called. A task of its own publishes it
until the server has stored it. Publishing again is harmless, since the server keeps the first
message of a subject. The completion comes over a plain subscription, which may lose messages, so
operations that stay open are asked for by key from time to time and after every reconnect. Nothing
hangs: where the mesh gives no answer for `answer_timeout_s`, open operations end as UNAVAILABLE.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from nats.aio.msg import Msg

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
from phaseloom.common.contract.streams import op_subject, out_subject
from phaseloom.common.observability import telemetry
from phaseloom.common.transport.link import is_subject_taken
from phaseloom.common.transport.natsclient import MeshClient
from phaseloom.common.transport.services import call_api, pub_ack, publish_to_stream

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 16
_MAX_UNSTORED_BYTES = 256 * 1024 * 1024
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


class Part:
    """One operation on the wire; a call that is split has several parts."""

    def __init__(self, key: OperationKey, id: str, kind: str, payload: bytes) -> None:
        self.key = key
        self.id = id
        self.kind = kind
        self.payload = payload
        self.stored = asyncio.Event()
        """Set once the server certainly has the part, or the part has ended."""
        self.is_stored = False
        """Whether the server certainly has it."""
        self.is_told = False
        """Whether the outcome came from the mesh; otherwise this session has ended before."""
        self.stored_s = 0.0
        self.misses = 0
        self.is_awaited = False
        """Whether somebody awaits the handle, or has."""
        self.told: Callable[[Progress], None] | None = None
        """Called with the part's progress; None: nobody wants to know."""
        # An error is a value here, since an outcome that nobody awaits is no unhandled exception.
        self.outcome: asyncio.Future[Result | PhaseloomError] = (
            asyncio.get_running_loop().create_future()
        )

    def __del__(self) -> None:
        """Log a failure that nobody has awaited, once nobody can any more."""
        if self.is_awaited or not (self.is_told and self.outcome.done()):
            return
        error = self.outcome.result()
        if isinstance(error, PhaseloomError):
            log.warning("%s (%s) failed, and nobody awaited it: %s", self.key, self.kind, error)

    @property
    def state(self) -> str:
        """The state of the operation, as far as the controller knows it."""
        if not self.outcome.done():
            return "submitted"
        return "failed" if isinstance(self.outcome.result(), PhaseloomError) else "completed"


class OperationHandle(Generic[R_co]):
    """An operation that was submitted. Await the handle for the result, as often as you like.

    Awaiting a failed operation raises its PhaseloomError; a failure that nobody awaits is logged as
    a warning. To stop waiting cancels nothing; `cancel` cancels the operation.
    """

    def __init__(
        self, parts: list[Part], merge: Callable[[list[Result]], R_co], outbox: Outbox
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
        """This operation, or its last part, as another operation's `after` names it."""
        return self.refs[-1]

    @property
    def refs(self) -> list[After]:
        return [After(part.key.deployment, int(part.key.slot)) for part in self._parts]

    async def stored(self) -> None:
        """Wait until the mesh has the operation for good.

        Raises: PhaseloomError: this session does not know that the operation was stored. It may
                have been, where an acknowledgement was lost.
        """
        for part in self._parts:
            await part.stored.wait()
            if not part.is_stored:
                why = part.outcome.result()
                assert isinstance(why, PhaseloomError), "what has a result was stored"
                raise why

    def done(self) -> bool:
        return all(part.outcome.done() for part in self._parts)

    @property
    def is_lost(self) -> bool:
        """Whether this session ended before it knew the outcome.

        The operation may still run, or may never have been stored. Awaiting the handle raises the
        reason why the session ended.
        """
        return any(part.outcome.done() and not part.is_told for part in self._parts)

    async def cancel(self) -> None:
        """Ask the mesh to end the operation, and return when the mesh has taken note of it.

        An operation without a permit ends at once. A `generate` or `forward` that runs is stopped.
        A mutating operation that runs goes on to its end. Await the handle for the outcome: the
        result where the operation was faster, else ABORTED.

        Raises: PhaseloomError: the mesh refused, or gave no answer.
        """
        await self._cancel(keeps_partial=False)

    async def stop(self) -> None:
        """Ask the mesh to end a `generate` that runs with the tokens that it has by then.

        Awaiting the handle then gives the result. An unfinished sample has the stop_reason
        `partial`; `continued` makes the prompt that continues it, token for token. An operation
        that does not run yet is cancelled, as by `cancel`: awaiting it raises ABORTED.

        Raises: PhaseloomError: the mesh refused, or gave no answer.
        """
        await self._cancel(keeps_partial=True)

    async def _cancel(self, *, keeps_partial: bool) -> None:
        for part in self._parts:
            key = part.key
            request = api.CancelRequest(key.job, key.deployment, key.slot, keeps_partial)
            await self._outbox.ask_of("operation.cancel", part, request)

    async def explain(self) -> api.Explanation:
        """Explain what the operation waits for, its place in the order, its predicted start, and
        why.

        The answer is about the first open part of an operation that was split.

        Raises: PhaseloomError: the mesh refused, or gave no answer.
        """
        part = next((p for p in self._parts if not p.outcome.done()), self._parts[-1])
        key = part.key
        request = api.OperationRequest(key.job, key.deployment, key.slot)
        answer = await self._outbox.ask_of("operation.explain", part, request)
        return answer or api.Explanation(part.key, part.kind, part.state)

    async def _result(self) -> R_co:
        for part in self._parts:
            part.is_awaited = True
        results = []
        for part in self._parts:
            # Shielded, so that a waiter that is cancelled does not cancel the outcome of others.
            outcome = await asyncio.shield(part.outcome)
            if isinstance(outcome, PhaseloomError):
                raise outcome
            results.append(outcome)
        return self._merge(results)


class Lost(ResourceError):
    """It is not known here how a request ended: the caller must make it again."""


async def outcome_of(handle: OperationHandle[R_co]) -> R_co:
    """The result of an operation.

    Raises: PhaseloomError: how the operation ended; Lost: the session of its job ended before.
    """
    try:
        return await handle
    except PhaseloomError as error:
        if not handle.is_lost:
            raise
        raise Lost(
            f"how {handle.key} ended is not known here: {error.info.message}", remedy="ask again"
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
        self._client = client
        self._job = job
        self.start = start
        """Runs a coroutine in the background, for as long as the connection lasts."""
        self._answer_timeout_s = answer_timeout_s
        self._window = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._open: dict[str, Part] = {}
        self._unstored_bytes = 0
        self._answered_s = time.monotonic()
        self._wake = asyncio.Event()
        self._ended: PhaseloomError | None = None
        """The reason why nothing more can be submitted; None: the session goes on."""
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether the session is over: nothing is open, and nothing more can be submitted."""
        return self._closed.is_set()

    async def closed(self, within_s: float) -> bool:
        """Whether the session has ended; waits for the end for `within_s` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._closed.wait()
        return self.is_closed

    def check_room(self, num_bytes: int) -> None:
        """Check, before an operation gets a `seq`, that the session can take it.

        Raises: PhaseloomError: the session is over. ResourceError: RESOURCE_EXHAUSTED: too many
                bytes wait to be stored.
        """
        if self._ended:
            raise self._ended
        if self._unstored_bytes + num_bytes > _MAX_UNSTORED_BYTES:
            raise ResourceError(
                f"{self._unstored_bytes} bytes of operations wait to be published",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="await some of the handles first",
            )

    def submit(self, part: Part) -> None:
        self._open[out_subject(part.key)] = part
        self._unstored_bytes += len(part.payload)
        self.start(self._deliver(part, len(part.payload)))

    def end(self, error: PhaseloomError) -> None:
        """End the session: take no more operations, and fail the open ones with this error."""
        self._ended = self._ended or error
        for part in list(self._open.values()):
            self._resolve(part, error)
        self._closed.set()
        self._wake.set()

    def expect_end(self) -> None:
        """Note that this program ends the job, and knows that open operations end with it."""
        for part in self._open.values():
            part.is_awaited = True

    def reconnected(self) -> None:
        """Ask for the outcomes of open operations at once, since completions may have been
        missed."""
        self._wake.set()

    def on_completion(self, message: Msg) -> None:
        """Take a message from the job's `out` subjects."""
        self._answered_s = time.monotonic()
        part = self._open.get(message.subject)
        if part is None:
            if message.subject.endswith(_PROGRESS):
                self._tell_progress(message)
            return
        try:
            completion = decode(message.data, Completion, content_type_of(message.headers))
        except CallerError as error:
            self._tell(part, InternalError(f"its completion cannot be read: {error}"))
            return
        self._complete(part, completion)

    def _tell_progress(self, message: Msg) -> None:
        part = self._open.get(message.subject.removesuffix(_PROGRESS))
        if part is None or not (self.hooks or part.told):
            return
        try:
            progress = decode(message.data, Progress, content_type_of(message.headers))
            if part.told is not None:
                part.told(progress)
        except (CallerError, ValueError) as error:
            log.warning("progress on %s cannot be read: %s", message.subject, error)
            return
        self.hooks.tell(progress)

    # --- publishing -----------------------------------------------------------------------------

    async def _deliver(self, part: Part, num_bytes: int) -> None:
        # Tasks start, and this semaphore lets them in, in the order of the calls.
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
                    # Later operations would wait behind the gap for ever.
                    self._resolve(part, error)
                    self.end(error)
        part.payload = b""
        self._unstored_bytes -= num_bytes

    async def _publish(self, part: Part) -> None:
        """Publish an operation until it is stored, its outcome is known, or the timeout is over.

        Raises: PhaseloomError: the operation was not stored, or another session's operation has its
                `seq`.
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
                may_pass = error.info.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
                if not may_pass or time.monotonic() + pause_s > deadline:
                    raise
                log.info("%s is published again in %.2f s: %s", part.key, pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _try_publish(self, part: Part) -> bool:
        """Publish an operation once. Returns: whether the server certainly has it.

        Raises: ResourceError: UNAVAILABLE or RESOURCE_EXHAUSTED: try again; ABORTED: another
                session's operation has this `seq`.
        """
        if not self._client.is_connected and self._client.denial is None:
            raise ResourceError("there is no connection to NATS", remedy="is the mesh up?")
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
                remedy="wait until operations complete, or ask for a larger stream",
            )
        reply = await self._ask(part)
        if reply.stored_id is None:
            return False
        if reply.stored_id != part.id:
            raise self._lose_session(part)
        return True

    # --- outcomes -------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ask for the outcomes of operations that stay open, until the session ends.

        Cancelling this task is not enough to end it: on Python 3.11 a request that is answered at
        the moment of its cancellation swallows the cancellation.
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
        try:
            for name in {part.key.deployment: None for part in self._open.values()}:
                await self._check_deployment(name, min_age_s)
        except CallerError as error:
            self.end(error)
        except ResourceError as error:
            silent_s = time.monotonic() - self._answered_s
            if silent_s > self._answer_timeout_s:
                self.end(
                    ResourceError(
                        f"the mesh gave no answer for {silent_s:.0f} s: {error.info.message}",
                        remedy="see whether its NATS servers run and have room on their disks; "
                        "attach again when it is up: what was stored will still run",
                    )
                )

    async def settle(self) -> None:
        """Wait for the outcomes of all stored operations after the job has ended.

        They may still be on their way when the end of the job is known.
        """
        deadline = time.monotonic() + self._answer_timeout_s
        for part in [part for part in self._open.values() if part.stored.is_set()]:
            pause_s = _FIRST_PAUSE_S
            while not part.outcome.done() and time.monotonic() < deadline:
                try:
                    await self._look_up(part)
                except ResourceError as error:
                    log.info("the outcome of %s is asked for again: %s", part.key, error)
                await asyncio.wait([part.outcome], timeout=pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _check_deployment(self, name: str, min_age_s: float) -> None:
        """Ask for the outcomes of a deployment's operations in order, up to the first that still
        runs.

        Later operations end later, so nothing is lost by stopping there.
        """
        oldest = time.monotonic() - min_age_s
        while (part := self._first_open(name)) and part.stored.is_set() and part.stored_s <= oldest:
            await self._look_up(part)
            if not part.outcome.done():
                return

    def _first_open(self, name: str) -> Part | None:
        return next((p for p in self._open.values() if p.key.deployment == name), None)

    async def _look_up(self, part: Part) -> None:
        reply = await self._ask(part)
        if reply.completion is not None:
            self._complete(part, reply.completion)
        elif reply.stored_id is None:
            # The operation may end while the router reads first one place, then the other: only
            # repeated absence is a loss.
            part.misses += 1
            if part.misses >= _MAX_MISSES:
                lost = ResourceError(
                    f"{part.key} was stored and is gone", code=Code.DATA_LOSS, remedy="attach again"
                )
                self._tell(part, lost)

    async def _ask(self, part: Part) -> api.ResultReply:
        key = part.key
        request = api.ResultRequest(key.job, key.deployment, key.slot)
        reply = await call_api(self._client, key.tenant, "result.get", request, api.ResultReply)
        self._answered_s = time.monotonic()
        return reply

    def _complete(self, part: Part, completion: Completion) -> None:
        if completion.id and completion.id != part.id:
            self._resolve(part, self._lose_session(part))
        elif completion.outcome is Outcome.COMPLETED and completion.result is not None:
            self._tell(part, completion.result)
        elif completion.outcome in _UNFINISHED and completion.error is None:
            # Who cancels an operation knows that.
            part.is_awaited |= completion.outcome is Outcome.CANCELLED
            code, what = _UNFINISHED[completion.outcome]
            self._tell(part, ResourceError(f"{part.key} {what}", code=code))
        elif completion.error is not None:
            error = to_exception(completion.error)
            if error.info.code is Code.ABORTED and error.info.field == "session":
                self._ended = self._ended or error
            self._tell(part, error)
        else:
            self._tell(part, InternalError(f"{part.key}: {completion.outcome}, without a why"))

    def _lose_session(self, part: Part) -> ResourceError:
        error = ResourceError(
            f"another session took {part.key}", code=Code.ABORTED, remedy="attach again"
        )
        self._ended = self._ended or error
        return error

    def _tell(self, part: Part, outcome: Result | PhaseloomError) -> None:
        """Give an operation the outcome that the mesh knows of."""
        if not part.outcome.done():
            part.is_stored = part.is_told = True
        self._resolve(part, outcome)

    def _resolve(self, part: Part, outcome: Result | PhaseloomError) -> None:
        self._open.pop(out_subject(part.key), None)
        if part.outcome.done():
            return
        part.outcome.set_result(outcome)
        part.stored.set()
        error = outcome if isinstance(outcome, PhaseloomError) else None
        self.hooks.tell(OperationEnded(part.key, part.kind, error))

    # --- cancelling and explaining --------------------------------------------------------------

    async def ask_of(
        self, call: str, part: Part, request: api.OperationRequest
    ) -> api.Explanation | None:
        """Call `operation.cancel` or `.explain`, as soon as the operation is stored.

        Returns: the answer; None: the operation has ended meanwhile.
        Raises:  PhaseloomError: the mesh refused; UNAVAILABLE: no answer came in time.
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
                    return None  # the operation was faster, and its outcome is on its way
                # The operation has not reached the scheduler yet, or nobody is there to answer.
                may_pass = error.info.code in (Code.NOT_FOUND, Code.UNAVAILABLE)
                if not may_pass or time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.wait([part.outcome], timeout=pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return None

    async def _has_ended(self, part: Part) -> bool:
        """Whether the mesh knows an operation's outcome, which this session then learns too."""
        with suppress(ResourceError):  # without an answer, nothing is known
            await self._look_up(part)
        return part.outcome.done()
