"""What all calls over HTTP have in common: who calls, what a body is, how errors are told."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import nats.errors
from aiohttp import web

from phaseloom.client import CallerError, Code, PhaseloomError
from phaseloom.gateway.tenants import Tenant, Tenants

log = logging.getLogger(__name__)

T = TypeVar("T")
TENANTS: web.AppKey[Tenants] = web.AppKey("tenants", Tenants)

_STATUS = {
    Code.NOT_FOUND: 404,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
}
"""Codes that have a status of their own. Other mistakes of a caller are 400, all else is 500."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Unauthorized(Exception):
    """The request has no API key, or nobody's."""


def tenant_of(request: web.Request) -> Tenant:
    """The tenant whose key the request has. Raises: Unauthorized."""
    key = request.headers.get("X-API-Key", "")
    key = key or request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    tenant = request.app[TENANTS].of_key(key)
    if tenant is None:
        raise Unauthorized
    return tenant


async def body_of(request: web.Request, kind: type[T]) -> T:
    """The JSON body. Raises: CallerError: naming the field that is at fault."""
    try:
        return msgspec.json.decode(await request.read() or b"{}", type=kind)
    except msgspec.DecodeError as error:
        what, _, where = str(error).partition(" - at `$")
        raise CallerError(what, field=where.strip("`.")) from error


def status_of(error: PhaseloomError) -> int:
    is_callers = isinstance(error, CallerError)
    return _STATUS.get(error.info.code, 400 if is_callers else 500)


def answers(refused: Callable[[int, str, str], dict[str, Any]]) -> Callable[[Handler], Handler]:
    """Have errors told in the way of an API.

    Args: refused: makes the body, of a status, a message and a field.
    """

    def wrap(handler: Handler) -> Handler:
        async def answered(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Unauthorized:
                return web.json_response(refused(401, "there is no such API key", ""), status=401)
            except PhaseloomError as error:
                status = status_of(error)
                log.info("%s %s: %d: %s", request.method, request.path, status, error)
                body = refused(status, str(error), error.info.field or "")
                return web.json_response(body, status=status)
            except nats.errors.Error as error:
                log.warning("%s %s: %r", request.method, request.path, error)
                return web.json_response(refused(503, "the mesh gives no answer", ""), status=503)

        return answered

    return wrap
