"""Sessions of the Tinker SDK: start, heartbeat, end, and lists of sessions and training runs."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any, TypeVar

import nats.errors
from aiohttp import web

from phaseloom.client import CallerError, PhaseloomError
from phaseloom.gateway.checkpoints import checkpoint_row, clean_up_all, timestamp
from phaseloom.gateway.http import PREFIX, body_of, page_of, tenant_of
from phaseloom.gateway.models import context_of
from phaseloom.gateway.records import (
    CallRecord,
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
    SplitRecord,
)
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.calls import lora_fields, metadata_of
from phaseloom.gateway.tinker.requests import CreateSession, OfPath, OfSession
from phaseloom.gateway.tinker.training import finish

log = logging.getLogger(__name__)

_Made = TypeVar("_Made", SessionRecord, ModelRecord)

routes = web.RouteTableDef()


@routes.post(PREFIX + "/client/config")
async def client_config(request: web.Request) -> web.Response:
    # The parts of a large batch must arrive in order: one that is split moves the later numbers.
    return web.json_response({"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False})


@routes.post(PREFIX + "/client/dynamic_config")
async def dynamic_config(request: web.Request) -> web.Response:
    return web.json_response({})


@routes.post(PREFIX + "/telemetry")
async def telemetry(request: web.Request) -> web.Response:
    """Accept and discard the SDK's telemetry, which is meant for another service."""
    return web.json_response({"status": "accepted"})


@routes.get(PREFIX + "/healthz")
async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@routes.get(PREFIX + "/get_server_capabilities")
async def capabilities(request: web.Request) -> web.Response:
    models = [
        {
            "model_name": model.name,
            "max_context_length": context_of(model),
            "trainable": True,
            "sampleable": True,
        }
        for model in await tenant_of(request).bases()
    ]
    return web.json_response({"supported_models": models})


@routes.post(PREFIX + "/create_session")
async def create_session(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, CreateSession)
    body.check()
    session = SessionRecord(
        tenant.name,
        uuid.uuid4().hex,
        metadata_of(body.user_metadata),
        body.display_name or "",
        time.time(),
    )
    await tenant.book.put(session)
    tenant.beats[session.id] = time.monotonic()
    return web.json_response({"type": "create_session", "session_id": session.id})


@routes.post(PREFIX + "/session_heartbeat")
async def heartbeat(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, OfSession)
    if tenant.book.find(SessionRecord, tenant.name, body.session_id) is None:
        return web.json_response({"detail": "the session is over"}, status=410)
    tenant.beats[body.session_id] = time.monotonic()
    return web.json_response({"type": "session_heartbeat"})


@routes.post(PREFIX + "/sessions/{session}/finish")
async def finish_session(request: web.Request) -> web.Response:
    tenant, session = tenant_of(request), request.match_info["session"]
    await _end_session(tenant, tenant.book.get(SessionRecord, tenant.name, session))
    return web.json_response({})


async def _end_session(tenant: Tenant, session: SessionRecord) -> None:
    """End a session and its models. Checkpoints stay."""
    for model in tenant.book.all(ModelRecord, tenant.name):
        if model.id.startswith(f"{session.id}:"):
            await finish(tenant, model)
    calls: list[CallRecord | SplitRecord] = [*tenant.book.all(CallRecord, tenant.name)]
    calls += tenant.book.all(SplitRecord, tenant.name)
    for call in calls:
        if call.id.startswith(f"{session.id}:"):
            await tenant.book.drop(call)
    await tenant.book.drop(session)
    tenant.beats.pop(session.id, None)


async def end_silent_sessions(tenant: Tenant, silent_s: float) -> None:
    """End sessions without a heartbeat for `silent_s` seconds. Runs until cancelled.

    Their programs are gone, and their models would occupy the mesh. For sessions of an earlier
    gateway the time counts from this gateway's start. The loop also removes files of expired
    checkpoints.
    """
    while True:
        now = time.monotonic()
        for session in tenant.book.all(SessionRecord, tenant.name):
            if now - tenant.beats.setdefault(session.id, now) > silent_s:
                try:
                    await _end_session(tenant, session)
                except (PhaseloomError, nats.errors.Error) as error:
                    log.warning("could not end session %s yet: %s", session.id, error)
        await clean_up_all(tenant)
        await asyncio.sleep(silent_s / 4)


@routes.get(PREFIX + "/sessions")
async def list_sessions(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    page, _ = page_of(request, _newest(tenant.book.all(SessionRecord, tenant.name)))
    return web.json_response({"sessions": [session.id for session in page]})


@routes.get(PREFIX + "/sessions/{session}")
async def get_session(request: web.Request) -> web.Response:
    tenant, session = tenant_of(request), request.match_info["session"]
    record = tenant.book.get(SessionRecord, tenant.name, session)
    of = f"{session}:"
    models = [row.id for row in tenant.book.all(ModelRecord, tenant.name)]
    samplers = [row.id for row in tenant.book.all(SamplerRecord, tenant.name)]
    return web.json_response(
        {
            "training_run_ids": [name for name in models if name.startswith(of)],
            "sampler_ids": [name for name in samplers if name.startswith(of)],
            "user_metadata": record.metadata or None,
            "display_name": record.display_name or None,
        }
    )


@routes.get(PREFIX + "/training_runs")
async def list_runs(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    if "project_id" in request.query:
        raise CallerError(
            "projects are not supported", field="project_id", remedy="list all training runs"
        )
    page, cursor = page_of(request, _newest(tenant.book.all(ModelRecord, tenant.name)))
    runs = [_run(tenant, model) for model in page]
    return web.json_response({"training_runs": runs, "cursor": cursor})


@routes.get(PREFIX + "/training_runs/{run}")
async def get_run(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    model = tenant.book.get(ModelRecord, tenant.name, request.match_info["run"])
    return web.json_response(_run(tenant, model))


@routes.post(PREFIX + "/weights_info")
async def weights_info(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, OfPath)
    saved = tenant.book.get(CheckpointRecord, tenant.name, body.tinker_path or body.path)
    return web.json_response({"base_model": saved.base, **lora_fields(saved.adapter)})


def _run(tenant: Tenant, model: ModelRecord) -> dict[str, Any]:
    saved = tenant.book.all(CheckpointRecord, tenant.name)
    rows = [
        checkpoint_row(checkpoint, {})
        for checkpoint in sorted(saved, key=lambda checkpoint: checkpoint.saved_s)
        if checkpoint.model == model.id
    ]
    newest = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in rows}
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.tenant,
        **lora_fields(model.adapter),
        "corrupted": False,
        "last_request_time": timestamp(tenant.asked_s.get(model.id, model.made_s)),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": model.metadata or None,
    }


def _newest(records: list[_Made]) -> list[_Made]:
    return sorted(records, key=lambda record: record.made_s, reverse=True)
