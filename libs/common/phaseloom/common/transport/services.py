"""API calls as NATS micro services, with the same code on both sides.

A call is a request on `pl.v1.api.<tenant>.<call>`, in JSON or MessagePack according to
`Content-Type`. The answer has the same type. The answer to a failed call is an `ApiError`, with the
error headers of micro services. The subject alone identifies the tenant: the server lets a tenant
publish only on its own subjects.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import Error as JetStreamError
from nats.micro import add_service
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER, Request
from nats.micro.service import Service

from phaseloom.common.contract.api import ApiError
from phaseloom.common.contract.codec import (
    CONTENT_TYPE,
    JSON,
    MSGPACK,
    check_containers,
    content_type_of,
    decode,
    encode,
)
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    InternalError,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import NodeId, check_name
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import (
    MAX_PAYLOAD_BYTES,
    api_subject,
    node_subject,
    state_subject,
)
from phaseloom.common.process.workers import WorkerPool
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.callrates import CallRates
from phaseloom.common.transport.natsclient import MeshClient

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded:
    """An answer that the handler encodes itself."""

    encode: Callable[[str], Awaitable[bytes]]
    """A function that returns the encoded struct, given the content type."""


ApiHandler = Callable[[str, Any], Awaitable[object]]
"""A function (tenant, decoded request) -> the struct to answer, or `Encoded`. It raises
PhaseloomError to refuse the call."""

_TENANT_TOKEN = 3
_HEADER_CHARS = 200
MAX_REQUEST_BYTES = 256 * 1024
_SMALL_BYTES = 32 * 1024
"""Size up to which every request is decoded in some milliseconds."""
_CHECK_S = 2.0
"""Processor time for the check of a larger request."""
MAX_WAITING = 1024
"""Maximum requests of one tenant that wait for one call. One more is refused."""
_MAX_WAITING_BYTES = 32 * 2**20
"""Maximum bytes of these requests."""


class TenantQueues:
    """Runs a tenant's requests in order, one at a time, and those of several tenants concurrently.

    So one tenant's requests never wait for another's. Each tenant has a task only while it has
    requests.
    """

    def __init__(self, run: Callable[[Request], Awaitable[None]]) -> None:
        self._run = run
        self._waiting: dict[str, deque[Request]] = {}
        self._waiting_bytes: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, tenant: str, request: Request) -> bool:
        """Queue a request. Returns: False: too many of the tenant wait already."""
        waiting = self._waiting.get(tenant)
        if waiting is None:
            waiting = self._waiting[tenant] = deque()
            self._waiting_bytes[tenant] = 0
            task = asyncio.create_task(self._serve(tenant, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        num_bytes = self._waiting_bytes[tenant] + len(request.data)
        if len(waiting) >= MAX_WAITING or (waiting and num_bytes > _MAX_WAITING_BYTES):
            return False
        waiting.append(request)
        self._waiting_bytes[tenant] = num_bytes
        return True

    async def finish(self) -> None:
        """Wait until every request is handled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _serve(self, tenant: str, waiting: deque[Request]) -> None:
        try:
            while waiting:
                request = waiting.popleft()
                self._waiting_bytes[tenant] -= len(request.data)
                try:
                    await self._run(request)
                except nats.errors.Error as error:  # the caller repeats the request or gives up
                    log.debug("cannot answer a request of %s: %r", tenant, error)
                # Most requests wait for nothing. All would run in one step of the loop.
                await asyncio.sleep(0)
        finally:
            del self._waiting[tenant], self._waiting_bytes[tenant]


class ApiService:
    """API calls that are being served."""

    def __init__(self, service: Service, queues: list[TenantQueues], workers: WorkerPool) -> None:
        self._service = service
        self._workers = workers
        self._queues = queues

    async def stop(self) -> None:
        """Accept no further requests, and wait until those accepted are answered."""
        await self._service.stop()
        for queue in self._queues:
            await queue.finish()
        self._workers.close()

    def cancel(self) -> None:
        """Abandon the requests whose handling has begun, because this process no longer leads."""
        for queue in self._queues:
            queue.cancel()
        self._workers.close()


async def serve_api(
    bus: Bus,
    service_name: str,
    endpoints: Mapping[str, tuple[Any, ApiHandler]],
    *,
    operators: Mapping[str, tuple[Any, ApiHandler]] | None = None,
    rates: CallRates | None = None,
    max_bytes: Mapping[str, int] | None = None,
) -> ApiService:
    """Serve API calls of all tenants until `stop()` of the returned service.

    Replicas that serve under the same name share the calls.

    Args:   endpoints: name of a call (`job.submit`) -> (request type, handler). One tenant's
                requests of one call are handled one at a time, in order. Tenants do not wait for
                each other.
            operators: the same for calls on subjects that no tenant can reach
                (`pl.v1.node.<call>`). Their handlers get an empty tenant.
            rates: the bound on each tenant's calls; None: no bound.
            max_bytes: maximum size of the requests of calls that take more than
                `MAX_REQUEST_BYTES`. Larger requests are refused before they are decoded, and so are
                those with many lists and objects.
    """
    # nats-py calls utcnow(), which is deprecated since Python 3.12.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        service = await add_service(
            bus.client,
            name=service_name,
            version="1.0.0",
            queue_group=service_name,
        )
    queues = []
    workers = WorkerPool([check_containers.__module__])

    async def add(name: str, subject: str, endpoint: _Endpoint) -> None:
        queues.append(endpoint.queue)
        await service.add_endpoint(name=name, subject=subject, handler=endpoint.accept)

    for call, (kind, handler) in endpoints.items():
        limit = (max_bytes or {}).get(call, MAX_REQUEST_BYTES)
        endpoint = _Endpoint(
            call, kind, handler, _tenant_of, workers=workers, max_bytes=limit, rates=rates
        )
        await add(call.replace(".", "-"), api_subject("*", call), endpoint)
    for call, (kind, handler) in (operators or {}).items():
        endpoint = _Endpoint(
            call, kind, handler, lambda request: "", workers=workers, max_bytes=MAX_PAYLOAD_BYTES
        )
        await add(f"node-{call}", node_subject(call), endpoint)
    return ApiService(service, queues, workers)


def _tenant_of(request: Request) -> str:
    return check_name(request.subject.split(".")[_TENANT_TOKEN], "subject.tenant")


class _Endpoint:
    """One call: queues its requests by tenant, and answers them."""

    def __init__(
        self,
        call: str,
        kind: Any,
        handler: ApiHandler,
        tenant_of: Callable[[Request], str],
        *,
        workers: WorkerPool,
        max_bytes: int,
        rates: CallRates | None = None,
    ) -> None:
        self._workers = workers
        self._rates = rates
        self._call = call
        self._max_bytes = max_bytes
        self._kind = kind
        self._handler = handler
        self._tenant_of = tenant_of
        self.queue = TenantQueues(self._handle)

    async def accept(self, request: Request) -> None:
        try:
            tenant = self._tenant_of(request)
            if self._rates is not None:
                self._rates.admit(tenant)
            if self.queue.add(tenant, request):
                return
            error = ResourceError(
                f"more than {MAX_WAITING} requests or {_MAX_WAITING_BYTES} bytes of {self._call} "
                "wait",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="await the answers of earlier requests first",
            ).info
        except PhaseloomError as refusal:
            error = refusal.info
        await _refuse(request, error, content_type_of(request.headers))

    async def _handle(self, request: Request) -> None:
        call, content_type = self._call, content_type_of(request.headers)
        try:
            tenant = self._tenant_of(request)
            await self._check_size(tenant, request, content_type)
            answer = await self._handler(tenant, decode(request.data, self._kind, content_type))
            if isinstance(answer, Encoded):
                payload = await answer.encode(content_type)
            else:
                payload = encode(answer, content_type)
        except PhaseloomError as error:
            await _refuse(request, error.info, content_type)
        except (nats.errors.Error, JetStreamError) as error:
            log.warning("%s: the bus call failed: %r", call, error)
            info = ResourceError(f"{call}: the bus call failed: {error!r}", remedy="try again").info
            await _refuse(request, info, content_type)
        except Exception:
            # Report a bug to the caller and keep the endpoint running; the traceback is for us.
            log.exception("%s failed", call)
            await _refuse(request, InternalError(f"{call} failed").info, content_type)
        else:
            await request.respond(payload, headers={CONTENT_TYPE: content_type})

    async def _check_size(self, tenant: str, request: Request, content_type: str) -> None:
        if len(request.data) > self._max_bytes:
            raise CallerError(
                f"a request of {self._call} may have at most {self._max_bytes} bytes, "
                f"got {len(request.data)}",
                remedy="send a smaller request",
            )
        if len(request.data) > _SMALL_BYTES:
            await self._workers.run(
                check_containers,
                request.data,
                content_type,
                deadline_s=_CHECK_S,
                what="the request",
                key=tenant,
            )


async def _refuse(request: Request, info: ErrorInfo, content_type: str) -> None:
    answer_type = content_type if content_type in (JSON, MSGPACK) else JSON
    # A header must be a single ASCII line, but the message may quote the caller's input.
    line = " ".join(info.message[:_HEADER_CHARS].split()).encode("ascii", "replace").decode()
    await request.respond_error(
        info.code, line, encode(ApiError(info), answer_type), headers={CONTENT_TYPE: answer_type}
    )


async def call_api(
    client: Client,
    tenant: str,
    call: str,
    request: object,
    answer: type[T],
    *,
    timeout_s: float = 5.0,
) -> T:
    """Make one API call. Returns: its answer, decoded as the type `answer`.

    Raises: PhaseloomError: the error returned by the service. ResourceError: UNAVAILABLE: there was
            no answer (no service serves the call, there is no connection, or the time expired). The
            call may have taken effect.
    """
    return await _called(client, api_subject(tenant, call), request, answer, timeout_s)


async def call_node_api(
    client: Client, call: str, request: object, answer: type[T], *, timeout_s: float = 5.0
) -> T:
    """Like `call_api`, for operators' calls, which have no tenant."""
    return await _called(client, node_subject(call), request, answer, timeout_s)


async def _called(
    client: Client, subject: str, request: object, answer: type[T], timeout_s: float
) -> T:
    message = await request_reply(
        client,
        subject,
        encode(request),
        timeout_s=timeout_s,
        headers={CONTENT_TYPE: MSGPACK},
    )
    headers = message.headers or {}
    content_type = content_type_of(headers)
    if ERROR_CODE_HEADER in headers:
        if message.data:
            error: ApiError = decode(message.data, ApiError, content_type)
            raise to_exception(error.error)
        raise to_exception(ErrorInfo(Code.INTERNAL, headers.get(ERROR_HEADER, "the call failed")))
    decoded: T = decode(message.data, answer, content_type)
    return decoded


async def request_reply(
    client: Client, subject: str, payload: bytes, *, timeout_s: float, headers: dict[str, str]
) -> Msg:
    """Make a NATS request. Returns: the answer.

    Raises: ResourceError: UNAVAILABLE: there was no answer, for any reason. CallerError: the
            payload exceeds the server's limit. PERMISSION_DENIED: the server no longer accepts the
            client.
    """
    _check_known(client)
    pending_answer = client.request(subject, payload, timeout=timeout_s, headers=headers)
    return await _answer(pending_answer, subject, len(payload))


async def publish_to_stream(
    client: MeshClient, subject: str, payload: bytes, *, timeout_s: float, headers: dict[str, str]
) -> Msg:
    """Publish a message to a stream. Returns: the server's answer, for `pub_ack`.

    Raises: see `request_reply`. UNAVAILABLE is also raised as soon as the connection is lost.
    """
    _check_known(client)
    pending_answer = client.ask_server(subject, payload, timeout_s, headers)
    return await _answer(pending_answer, subject, len(payload))


def _check_known(client: Client) -> None:
    if isinstance(client, MeshClient) and client.denial is not None:
        raise to_exception(client.denial)


async def _answer(pending_answer: Awaitable[Msg], subject: str, num_bytes: int) -> Msg:
    try:
        return await pending_answer
    except nats.errors.MaxPayloadError:
        raise CallerError(
            f"{num_bytes} bytes exceed the size of one message",
            remedy="send fewer samples at once",
        ) from None
    except (nats.errors.Error, OSError) as error:
        raise ResourceError(f"no answer on {subject}: {error!r}", remedy="try again") from error


async def node_report(client: Client, node: str, *, timeout_s: float) -> StatusReport:
    """Request a report of the state on a node from its agent.

    Raises: ResourceError: UNAVAILABLE: there was no answer, for any reason. CallerError: the agent
            has another version, so its answer cannot be decoded.
    """
    subject = state_subject(NodeId(node))
    message = await request_reply(client, subject, b"", timeout_s=timeout_s, headers={})
    report: StatusReport = decode(message.data, StatusReport)
    return report


async def answer_requests(
    client: Client, subject: str, answer: Callable[[Msg], Awaitable[object]]
) -> None:
    """Answer the requests on a subject in MessagePack, concurrently, until cancelled.

    If an answer cannot be sent, it is dropped: the requester repeats the request or gives up.

    Args:   answer: a function message -> the struct to answer; it must not raise.
    """

    async def reply(message: Msg) -> None:
        payload = encode(await answer(message))
        try:
            await client.publish(message.reply, payload, headers={CONTENT_TYPE: MSGPACK})
        except nats.errors.Error as error:
            log.debug("cannot send an answer on %s: %r", subject, error)

    async with asyncio.TaskGroup() as tasks:

        async def on_message(message: Msg) -> None:
            if message.reply:
                tasks.create_task(reply(message))

        subscription = await client.subscribe(subject, cb=on_message)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with suppress(nats.errors.Error):  # a closing connection ends the subscription itself
                await subscription.unsubscribe()


def pub_ack(message: Msg) -> dict[str, Any]:
    """Decode a JetStream PubAck: `{"stream": …, "seq": …}` or `{"error": {…}}`."""
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    return answer
