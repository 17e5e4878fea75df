"""Shared parts of all HTTP calls: the caller's tenant, the body, and the form of errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import msgspec
import nats.errors
from aiohttp import web

from phaseloom.client import CallerError, Code, PhaseloomError
from phaseloom.common.contract.errors import to_exception, unexpected_error
from phaseloom.common.process.workers import WorkerPool
from phaseloom.gateway.core.bodies import decoded, fields_of
from phaseloom.gateway.replicas import MAX_BODY_BYTES, REPLICA, Handler, content_of
from phaseloom.gateway.tenants import Tenant

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_STATUS = {
    Code.NOT_FOUND: 404,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
}
"""HTTP status by error code. Other mistakes of a caller are 400; everything else is 500."""

PREFIX = "/api/v1"
"""Prefix of every path of the Tinker API."""
_TINKER = "/api/"
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's names for errors."""
INLINE_BYTES = 2**18
"""A larger body is decoded by a worker process."""
_DECODE_S = 10.0
"""Processor time that decoding a body may take."""
WORKERS: web.AppKey[WorkerPool] = web.AppKey("workers", WorkerPool)
_MAX_MESSAGE_CHARS = 2000
_PAGE = 100
"""Number of listed items if a request does not specify it."""


class Unauthorized(Exception):
    """The request has no API key, or an unknown one."""


def tenant_of(request: web.Request) -> Tenant:
    """Return the tenant that a request's key belongs to. Raises: Unauthorized."""
    seat = request.app[REPLICA].seat(request)
    if seat is None:
        raise Unauthorized
    assert seat.tenant is not None, "the call is passed on where another replica serves the tenant"
    return seat.tenant


async def worked_out(
    request: web.Request,
    function: Callable[[bytes, *Ts], T],
    content: bytes,
    *arguments: *Ts,
    inline_bytes: int = INLINE_BYTES,
) -> T:
    """Apply a function to the body of a request, in a worker process if it is large.

    Raises: PhaseloomError: what the function raised. CallerError: the body takes too long or too
            much memory. ResourceError: the tenant has too many large calls at once.
    """
    if len(content) > inline_bytes:
        pool, tenant = request.app[WORKERS], tenant_of(request).name
        return await pool.run(
            function, content, *arguments, deadline_s=_DECODE_S, what="the body", key=tenant
        )
    try:
        return function(content, *arguments)
    except PhaseloomError:
        raise
    except Exception as error:
        log.exception("%s %s", request.method, request.path)
        raise to_exception(unexpected_error(error)) from error


async def body_of(request: web.Request, kind: type[T]) -> T:
    """Return the JSON body of a request. Raises: CallerError: as `decoded`."""
    content = await content_of(request) or b"{}"
    if len(content) <= INLINE_BYTES:
        return decoded(content, kind)
    short = await worked_out(request, fields_of, content, kind.__module__, kind.__qualname__)
    return msgspec.json.decode(short, type=kind)


def page_of(request: web.Request, items: list[T]) -> tuple[list[T], dict[str, int]]:
    """Select the items of a request's `limit` and `offset`, and return them with their position.

    Raises: CallerError: one of them is not a number.
    """
    limit, offset = _number(request, "limit", _PAGE), _number(request, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise CallerError(
            f"expected a number of 0 or more, got {text!r}", field=name, remedy="use 0 or more"
        )
    return int(text)


def status_of(error: PhaseloomError) -> int:
    is_callers = isinstance(error, CallerError)
    return _STATUS.get(error.info.code, 400 if is_callers else 500)


def error_body(path: str, status: int, message: str, field: str) -> dict[str, Any]:
    """Build the body of an error, in the form of the API that the path belongs to."""
    if path.startswith(_TINKER):
        return {"detail": message, "field": field}
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field or None, "code": None}}


def refused(path: str, status: int, message: str, field: str) -> web.Response:
    return web.json_response(error_body(path, status, message, field), status=status)


@web.middleware
async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every error in the form of the API that was called."""

    def refuse(status: int, message: str, field: str = "") -> web.Response:
        message = message[:_MAX_MESSAGE_CHARS]  # it may quote what the caller sent
        log.info("%s %s: %d: %s", request.method, request.path, status, message)
        return refused(request.path, status, message, field)

    try:
        return await handler(request)
    except Unauthorized:
        return refuse(401, "there is no such API key")
    except PhaseloomError as error:
        return refuse(status_of(error), str(error), error.info.field or "")
    except web.HTTPException as error:
        return refuse(error.status, _told_of(request, error))
    except nats.errors.Error as error:
        log.warning("%s %s: %r", request.method, request.path, error)
        return refuse(503, "the mesh gives no answer")
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return refuse(500, "the gateway failed; its log says why")


def _told_of(request: web.Request, error: web.HTTPException) -> str:
    match error:
        case web.HTTPMethodNotAllowed():
            return f"use {' or '.join(sorted(error.allowed_methods))} for {request.path}"
        case web.HTTPNotFound():
            return f"there is no {request.path}; docs/gateway.md lists what is served"
        case web.HTTPRequestEntityTooLarge():
            return f"a request has at most {MAX_BODY_BYTES} bytes; send it in parts"
    return error.reason
