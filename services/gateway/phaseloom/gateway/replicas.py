"""Assigns each tenant to one replica of the gateway, and forwards calls that reach another one.

The replica that holds a tenant's lease serves the tenant, so its models have one session and its
records one writer. Other replicas forward calls to it, and forward them again if it dies: calls
have names, so a repeated call takes effect once. A replica that loses a lease forgets the tenant;
the next holder continues from the records.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import zlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import nats.errors
from aiohttp import web
from yarl import URL

from phaseloom.client import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.leases import Lease, gateway_lease_key
from phaseloom.gateway.tenants import Tenant

log = logging.getLogger(__name__)

_PASSED_ON = "X-Phaseloom-Passed-On"
"""Header of a forwarded call. Such a call is not forwarded again."""
_NOT_HERE = 421
"""HTTP status (Misdirected Request) of a replica that no longer serves the tenant."""
_LEASE_TTL_S = 3.0
_MAX_DIGITS = 12
"""Times with this many digits or more are rejected unread."""
_PAUSE_S = 0.1
_SEARCH_S = 20.0
"""How long a call waits for a replica to serve its tenant."""
LOOK_S = 1.0
"""Interval at which a waiting call checks whether its caller is still connected."""
HUNG_UP = 499
"""HTTP status, for logs, of an answer that nobody reads; nginx uses it too."""
MAX_CALLS = 8192
"""Calls of a tenant that may be open at once."""
MAX_OPEN_BYTES = 256 * 2**20
"""Maximum bytes of the bodies of a tenant's open calls."""
MAX_BODY_BYTES = 64 * 2**20
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=2.0, sock_read=600.0)
_PASSED = ("Content-Type", "Accept", "Authorization", "X-API-Key", "Host", "X-Forwarded-Proto")
_PASSED_BACK = ("Content-Type", "Content-Length")
"""Headers of a streamed answer that are copied."""
ARCHIVE_TYPE = "application/x-tar"
FILE_TYPE = "application/octet-stream"
_CONTENT: web.RequestKey[Any] = web.RequestKey("content")
_MAX_COPIED_BYTES = 2**18
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STREAMS = ("text/event-stream", ARCHIVE_TYPE, FILE_TYPE)


class Seat:
    """One tenant at this replica, which serves it while it holds the tenant's lease."""

    def __init__(
        self,
        tenant: str,
        bus: Bus,
        address: str,
        serve: Callable[[Seat], Coroutine[Any, Any, None]],
    ) -> None:
        """Args: address: URL at which other replicas reach this one.
        serve: sets `tenant` and runs until cancelled."""
        self.name = tenant
        self.tenant: Tenant | None = None
        """None: another replica serves the tenant."""
        self.num_calls = 0
        self.num_bytes = 0
        """Bytes of the bodies of open calls."""
        self._bus = bus
        self._address = address
        self._serve = serve

    @contextmanager
    def opened(self, request: web.Request) -> Iterator[None]:
        """Count a call while it is open.

        Raises: ResourceError: RESOURCE_EXHAUSTED: too many calls are open, or their bodies are too
                large together.
        """
        length = request.content_length
        num_bytes = length if length is not None else MAX_BODY_BYTES * request.can_read_body
        if self.num_calls >= MAX_CALLS or self.num_bytes + num_bytes > MAX_OPEN_BYTES:
            raise ResourceError(
                f"at most {MAX_CALLS} calls of a tenant, with bodies of {MAX_OPEN_BYTES} bytes "
                "together, may be open at once",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="wait for the answers of some calls first",
            )
        self.num_calls += 1
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_calls -= 1
            self.num_bytes -= num_bytes

    async def keep(self) -> None:
        """Serve the tenant whenever no other replica does, until cancelled."""
        key = gateway_lease_key(self.name)
        while True:
            lease = await Lease.acquire(self._bus, key, self._address.encode(), _LEASE_TTL_S)
            log.info("serving %s at %s", self.name, self._address)
            tasks = [asyncio.create_task(self._serve(self)), asyncio.create_task(lease.keep())]
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    log.warning("stopped serving %s: %r", self.name, task.exception())
            finally:
                self.tenant = None
                await lifecycle.end(tasks)
                with suppress(nats.errors.Error):
                    await lease.release()
            await asyncio.sleep(_PAUSE_S)

    async def holder(self) -> str | None:
        """Return the URL of the replica that serves the tenant. None: no other one does at the
        moment."""
        try:
            stored = await self._bus.keys.get(Bucket.LEASES, gateway_lease_key(self.name))
        except nats.errors.Error as error:
            log.info("could not read which replica serves %s: %r", self.name, error)
            return None
        address = None if stored is None else stored.payload.decode()
        return None if address == self._address else address

    async def is_lost_by(self, address: str) -> bool:
        """Return whether another replica now serves the tenant instead of the one at this URL."""
        return self.tenant is not None or (await self.holder() or address) != address


class Replica:
    """The tenants of this replica, and the connection to other replicas."""

    def __init__(self, keys: Mapping[str, str], seats: Iterable[Seat]) -> None:
        """Args: keys: tenants by API key."""
        self._keys = keys
        self._seats = {seat.name: seat for seat in seats}

    def seat(self, request: web.Request) -> Seat | None:
        """Return the seat of the tenant that a key or signature belongs to, or None."""
        key = request.headers.get("X-API-Key", "")
        key = key or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return self._seats.get(self._keys.get(key, "") or self._signer(request))

    def signature(self, tenant: str, path: str, expires_s: int) -> str:
        """Return the signature with which a path can be read without a key, until it expires."""
        key = min(key for key, name in self._keys.items() if name == tenant)
        signed = f"GET {path} {expires_s}".encode()
        return hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()

    def _signer(self, request: web.Request) -> str:
        """Return the tenant that signed the request's path, or an empty string."""
        tenant = request.match_info.get("tenant", "")
        signature, expires = (request.query.get(name, "") for name in ("signature", "expires"))
        is_number = expires.isdecimal() and expires.isascii() and len(expires) < _MAX_DIGITS
        if tenant not in self._keys.values() or not is_number or request.method != "GET":
            return ""
        expected = self.signature(tenant, request.path, int(expires))
        is_signed = hmac.compare_digest(expected.encode(), signature.encode())
        return tenant if is_signed and time.time() <= int(expires) else ""


REPLICA: web.AppKey[Replica] = web.AppKey("replica", Replica)
PEERS: web.AppKey[aiohttp.ClientSession] = web.AppKey("peers", aiohttp.ClientSession)


def peers() -> aiohttp.ClientSession:
    """Open a session for calls to other replicas; many of them may wait at the same time."""
    return aiohttp.ClientSession(timeout=_TIMEOUT, connector=aiohttp.TCPConnector(limit=0))


async def content_of(request: web.Request) -> bytes:
    """Return the body of a request; a long one is a `bytearray`.

    Raises: CallerError: the caller disconnected or sent invalid HTTP.
    """
    try:
        if _CONTENT not in request:
            request[_CONTENT] = await _read(request)
        content: bytes = request[_CONTENT]
    except (ConnectionResetError, web.RequestPayloadError) as error:
        raise CallerError(
            f"the body arrived incomplete: {error}", field="body", remedy="send it again"
        ) from error
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity" or not content:
        return content
    if encoding not in ("gzip", "deflate"):
        raise CallerError(
            f"a body encoded as {encoding[:64]!r} is not supported",
            field="Content-Encoding",
            remedy="send it without encoding, or as gzip",
        )
    return await asyncio.to_thread(_decompressed, content)


async def _read(request: web.Request) -> bytes | bytearray:
    # aiohttp's own `read` copies the body at its end, which takes 5 ms per 16 MiB.
    content = bytearray()
    while chunk := await request.content.readany():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(content))
    return content if len(content) > _MAX_COPIED_BYTES else bytes(content)


def _decompressed(content: bytes) -> bytes:
    """Decompress a body, in a thread. Raises: CallerError: it is invalid."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib
    try:
        plain = decompressor.decompress(content, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise CallerError(
            f"the body cannot be decompressed: {error}", field="body", remedy="send it again"
        ) from error
    if len(plain) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(plain))
    if not decompressor.eof:
        raise CallerError("the body arrived incomplete", field="body", remedy="send it again")
    return plain


@web.middleware
async def passed_on(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a call here if this replica serves the tenant; otherwise forward it to the one that
    does.

    Raises: ResourceError: no replica serves the tenant, or it has too many open calls.
    """
    seat = request.app[REPLICA].seat(request)
    if seat is None or request.match_info.http_exception is not None:  # there is no such call
        return await handler(request)
    with seat.opened(request):
        return await _answered_somewhere(request, handler, seat)


async def _answered_somewhere(
    request: web.Request, handler: Handler, seat: Seat
) -> web.StreamResponse:
    deadline = time.monotonic() + _SEARCH_S
    while request.transport is not None:
        tenant = seat.tenant
        answer: web.StreamResponse | None = None
        if tenant is not None:
            try:
                answer = await handler(request)
            except PhaseloomError:
                if seat.tenant is tenant:
                    raise
            if answer is not None and seat.tenant is not tenant and not answer.prepared:
                answer = None  # it ended with the lease, which says nothing about the call
        elif _PASSED_ON in request.headers:
            return web.Response(status=_NOT_HERE)
        elif address := await seat.holder():
            answer = await _pass_on_while_served(request, seat, address)
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            raise ResourceError(
                "no replica of the gateway serves this tenant at the moment", remedy="try again"
            )
        await asyncio.sleep(_PAUSE_S)
    return web.Response(status=HUNG_UP)


async def _pass_on_while_served(
    request: web.Request, seat: Seat, address: str
) -> web.StreamResponse | None:
    """Return another replica's answer.

    Returns early with the status `HUNG_UP` if the caller disconnects. None: the replica does not
    answer or has lost its lease (a hung host, for example).
    """
    passing = asyncio.create_task(_pass_on(request, address))
    try:
        while not passing.done():
            await asyncio.wait([passing], timeout=LOOK_S)
            if request.transport is None:
                return web.Response(status=HUNG_UP)
            if not passing.done() and await seat.is_lost_by(address):
                log.warning("%s no longer serves %s", address, seat.name)
                return None
        return passing.result()
    finally:
        await lifecycle.end([passing])


async def _pass_on(request: web.Request, address: str) -> web.StreamResponse | None:
    """Return another replica's answer, or None if it is silent or does not serve the tenant."""
    body = await content_of(request)
    headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
    headers |= {_PASSED_ON: "1", "Content-Length": str(len(body))}
    # The raw path of a request may be a whole URL.
    url = URL(address + request.rel_url.raw_path_qs, encoded=True)
    try:
        async with request.app[PEERS].request(
            request.method, url, headers=headers, data=_pieces(body)
        ) as answer:
            if answer.status == _NOT_HERE:
                return None
            if answer.content_type in _STREAMS:
                return await _stream_on(request, answer)
            return web.Response(
                status=answer.status,
                body=await answer.read(),
                headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")},
            )
    except (aiohttp.ClientError, TimeoutError) as error:
        log.info("%s does not answer: %r", address, error)
        return None


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _MAX_COPIED_BYTES):
        yield bytes(memoryview(content)[start : start + _MAX_COPIED_BYTES])


async def _stream_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    passed_headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
    stream = web.StreamResponse(headers=passed_headers)
    await stream.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await stream.write(chunk)
    except (aiohttp.ClientError, asyncio.CancelledError) as error:
        log.info("a stream ended early: %r", error)
        # Part of the answer is already sent, so close the connection: the caller sees an incomplete
        # answer.
        stream.force_close()
        if request.transport is not None:
            request.transport.abort()
        if isinstance(error, asyncio.CancelledError):
            raise
    return stream
