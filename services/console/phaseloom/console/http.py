"""The console's HTTP interface: the page, the view and its updates, and the operator's actions.

A caller authenticates with a key: once in the page's address (`/?key=…`), which sets a cookie, or
as `Authorization: Bearer`. The page itself is public; everything under `/api` needs a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import nats.errors
from aiohttp import web

from phaseloom.common.contract import api
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.ids import JobKey, check_name, parse_operation_key
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.transport.services import call_api, call_node_api
from phaseloom.console import page
from phaseloom.console.core.view import Listener
from phaseloom.console.core.wire import Caller
from phaseloom.console.shell import Shell

log = logging.getLogger(__name__)

SHELL = web.AppKey("shell", Shell)
STREAMS = web.AppKey("streams", Counter[Caller])
MAX_STREAMS = 32
"""Event streams that one key may have open. Each page has one."""
_MAX_DIGITS = 15
_NEWS_S = 0.25
"""Interval between two updates of a page."""
_STATUS = {
    Code.NOT_FOUND: 404,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ACTION_HEADER = "X-Phaseloom-Console"
"""Header required by calls that change something. A form on another site cannot send it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

routes = web.RouteTableDef()


class Unauthorized(Exception):
    """The request has no key or an unknown one."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The callers' keys, looked up by hash so that timing does not reveal which keys exist."""

    callers: dict[bytes, Caller]
    cookie: str
    """Name of the cookie. It includes the port, because browsers send a host's cookies to all its
    ports."""

    @classmethod
    def of(cls, operator_key: str, tenants: dict[str, str], port: int) -> Keys:
        callers = {_digest(key): Caller(tenant) for key, tenant in tenants.items()}
        callers[_digest(operator_key)] = Caller(can_act=True)
        return cls(callers, f"phaseloom-console-{port}")

    def caller(self, key: str) -> Caller | None:
        return self.callers.get(_digest(key))

    def of_request(self, request: web.Request) -> Caller:
        """Return the caller that a request's key belongs to. Raises: Unauthorized."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer if scheme == "Bearer" else request.cookies.get(self.cookie, "")
        caller = self.caller(key) if key else None
        if caller is None:
            raise Unauthorized
        return caller


KEYS = web.AppKey("keys", Keys)


def _digest(key: str) -> bytes:
    # A header may have bytes that are not UTF-8.
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def application(shell: Shell, keys: Keys) -> web.Application:
    app = web.Application(middlewares=[_uniform_response], client_max_size=2**16)
    app.add_routes(routes)
    app[SHELL] = shell
    app[KEYS] = keys
    app[STREAMS] = Counter()
    return app


# --- the page -------------------------------------------------------------------------------------


@routes.get("/")
async def _index(request: web.Request) -> web.StreamResponse:
    """Return the page. If the address has a key, set the cookie and redirect to the plain
    address."""
    key = request.query.get("key")
    if key is None:
        return _file(request, page.PAGE)
    keys = request.app[KEYS]
    if keys.caller(key) is None:
        if "text/html" not in request.headers.get("Accept", ""):
            raise Unauthorized
        # The page says that the key is wrong, and where the right one is.
        return _file(request, page.PAGE, status=401)
    answer = web.Response(status=303, headers={"Location": "/"})
    answer.set_cookie(keys.cookie, key, httponly=True, samesite="Strict", path="/")
    return answer


@routes.get("/static/{name}")
async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    if name not in page.TYPES:
        raise web.HTTPNotFound
    return _file(request, name)


def _file(request: web.Request, name: str, status: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-cache"}
    body = page.asset(name)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body, headers = page.compressed(name), {**headers, "Content-Encoding": "gzip"}
    return web.Response(
        body=body, status=status, content_type=page.TYPES[name], charset="utf-8", headers=headers
    )


# --- what there is to see -------------------------------------------------------------------------


@routes.get("/api/me")
async def _me(request: web.Request) -> web.StreamResponse:
    return _json(request, request.app[KEYS].of_request(request))


@routes.get("/api/state")
async def _state(request: web.Request) -> web.StreamResponse:
    tenant = request.app[KEYS].of_request(request).tenant
    return _json(request, request.app[SHELL].view.update(time.time(), tenant=tenant))


@routes.get("/api/jobs")
async def _jobs(request: web.Request) -> web.StreamResponse:
    tenant = request.app[KEYS].of_request(request).tenant
    return _json(request, request.app[SHELL].view.jobs(tenant))


@routes.get("/api/events")
async def _events(request: web.Request) -> web.StreamResponse:
    """Send updates as server-sent events, starting at the cursor `since`.

    A page that reconnects names its last update in `Last-Event-ID`. If that update is no longer
    known, for example after a restart, the first update is the whole view.
    """
    caller = request.app[KEYS].of_request(request)
    view, streams = request.app[SHELL].view, request.app[STREAMS]
    listener = Listener(view, caller.tenant, _cursor(request, view.origin_s))
    if streams[caller] >= MAX_STREAMS:
        raise ResourceError(
            f"a key may have at most {MAX_STREAMS} event streams open",
            code=Code.RESOURCE_EXHAUSTED,
            remedy="close pages of the console",
        )
    answer = web.StreamResponse(
        headers={**_HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
    )
    streams[caller] += 1
    try:
        await answer.prepare(request)
        while request.transport is not None:
            if update := listener.news(time.time()):
                name = f"{update.origin_s}-{update.cursor}".encode()
                await answer.write(b"id: %s\ndata: %s\n\n" % (name, msgspec.json.encode(update)))
            await asyncio.sleep(_NEWS_S)
    except ConnectionResetError:
        pass  # the page was closed
    finally:
        streams[caller] -= 1
    return answer


def _cursor(request: web.Request, origin_s: float) -> int | None:
    text = request.headers.get("Last-Event-ID") or request.query.get("since", "")
    origin, _, number = text.rpartition("-")
    is_number = number.isdecimal() and len(number) <= _MAX_DIGITS
    return int(number) if is_number and origin == str(origin_s) else None


@routes.get("/api/explain/{what}")
async def _explain(request: web.Request) -> web.StreamResponse:
    """Explain the state of a job (`<tenant>.<job>`), or what an operation waits for."""
    caller = request.app[KEYS].of_request(request)
    target = request.match_info["what"]
    client = request.app[SHELL].bus.client
    if target.count(".") < 2:
        job = _visible_job(caller, target)
        status = await call_api(
            client, job.tenant, "job.status", api.JobRequest(job.job), api.JobStatus
        )
        return _json(request, status)
    key = parse_operation_key(target)
    _visible_job(caller, str(key.job_key))
    request_message = api.OperationRequest(key.job, key.deployment, key.slot)
    answer = await call_api(
        client, key.tenant, "operation.explain", request_message, api.Explanation
    )
    return _json(request, answer)


@routes.get("/api/trace/{operation}")
async def _trace(request: web.Request) -> web.StreamResponse:
    """Return the spans of an operation, as `phaseloom trace` shows them."""
    key = parse_operation_key(request.match_info["operation"])
    _visible_job(request.app[KEYS].of_request(request), str(key.job_key))
    return _json(request, await request.app[SHELL].legs(key))


@routes.get("/api/nodes")
async def _nodes(request: web.Request) -> web.StreamResponse:
    """Return the state stored on each node, by tier. A tenant sees its own state and the totals."""
    tenant = request.app[KEYS].of_request(request).tenant
    reports = await request.app[SHELL].reports()
    return _json(
        request, {name: _visible_report(tenant, report) for name, report in reports.items()}
    )


def _visible_report(tenant: str, report: StatusReport | str) -> object:
    if isinstance(report, str):
        return {"error": report}
    if not tenant:
        return report
    return msgspec.structs.replace(
        report,
        deployments=[d for d in report.deployments if d.deployment.tenant == tenant],
        versions=[v for v in report.versions if v.policy.tenant == tenant],
        version_states=[v for v in report.version_states if v.version.policy.tenant == tenant],
        shared_copies=[],
        endpoint="",
    )


# --- what an operator may do ----------------------------------------------------------------------


@routes.post("/api/cancel/{job}")
async def _cancel(request: web.Request) -> web.StreamResponse:
    """End a job now, as `phaseloom cancel` does."""
    job = _visible_job(_operator(request), request.match_info["job"])
    client = request.app[SHELL].bus.client
    request_message = api.JobRequest(job.job, cancelled=True)
    return _json(
        request, await call_api(client, job.tenant, "job.finish", request_message, api.JobStatus)
    )


@routes.post("/api/drain/{what}")
async def _drain(request: web.Request) -> web.StreamResponse:
    """Drain a job or a node. `?undo=1` puts a node back into use."""
    caller, target = _operator(request), request.match_info["what"]
    client = request.app[SHELL].bus.client
    if "." in target:
        job = _visible_job(caller, target)
        request_message = api.JobRequest(job.job)
        answer = await call_api(client, job.tenant, "job.drain", request_message, api.JobStatus)
        return _json(request, answer)
    node = api.DrainNode(check_name(target, "node"), undo=request.query.get("undo") == "1")
    return _json(request, await call_node_api(client, "drain", node, api.NodeStatus))


def _operator(request: web.Request) -> Caller:
    """Return the caller if it may act. Raises: CallerError: PERMISSION_DENIED. Unauthorized."""
    caller = request.app[KEYS].of_request(request)
    if not caller.can_act:
        raise CallerError(
            "this key may read but not change anything",
            code=Code.PERMISSION_DENIED,
            remedy="use the operator's key, which `phaseloom up` prints",
        )
    if _ACTION_HEADER not in request.headers:
        raise CallerError(
            f"the header {_ACTION_HEADER} is missing",
            field=_ACTION_HEADER,
            remedy=f"send the header {_ACTION_HEADER}: 1 with calls that change something",
        )
    return caller


def _visible_job(caller: Caller, text: str) -> JobKey:
    """Parse the name of a job that the caller may see.

    Raises: CallerError: the text is not a job's name, or the job belongs to another tenant.
    """
    tenant, _, job = text.partition(".")
    key = JobKey(check_name(tenant, "tenant"), check_name(job, "job"))
    if caller.tenant not in ("", tenant):
        raise CallerError(
            f"{text} belongs to another tenant",
            code=Code.PERMISSION_DENIED,
            remedy="use that tenant's key, or an operator's",
        )
    return key


# --- answers --------------------------------------------------------------------------------------


def _json(request: web.Request, answer: object) -> web.Response:
    response = web.Response(
        body=msgspec.json.encode(answer),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
    response.enable_compression()
    return response


def _refused(status: int, info: ErrorInfo) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": info}), content_type="application/json"
    )


def malformed(reason: str) -> web.Response:
    """Make the response to a request that cannot be parsed."""
    response = _refused(400, ErrorInfo(Code.INVALID_ARGUMENT, reason))
    response.headers.update(_HEADERS)
    return response


@web.middleware
async def _uniform_response(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return all errors in one form, and add the page's security policy to every response."""
    response = await _answer(request, handler)
    if not response.prepared:
        response.headers.update(_HEADERS)
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Unauthorized:
        info = ErrorInfo(
            Code.PERMISSION_DENIED,
            "the key is missing or unknown",
            remedy="open the address that `phaseloom up` prints; it contains a key",
        )
        return _refused(401, info)
    except PhaseloomError as error:
        is_caller_error = isinstance(error, CallerError)
        return _refused(_STATUS.get(error.info.code, 400 if is_caller_error else 500), error.info)
    except web.HTTPException as error:
        return _refused(error.status, ErrorInfo(Code.NOT_FOUND, error.reason))
    except nats.errors.Error as error:
        log.warning("%s %s: %r", request.method, request.path, error)
        return _refused(
            503, ErrorInfo(Code.UNAVAILABLE, "the mesh does not answer", remedy="try again")
        )
