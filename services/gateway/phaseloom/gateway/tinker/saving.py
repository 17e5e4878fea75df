"""Calls of the Tinker API that save and load weights."""

from __future__ import annotations

import re
import time
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import CallerError, Code, outcome_of
from phaseloom.common.contract import operations as ops
from phaseloom.gateway.checkpoints import clean_up, ttl_of
from phaseloom.gateway.encryption import recipients_of
from phaseloom.gateway.futures import Answer, Promise
from phaseloom.gateway.http import PREFIX, tenant_of
from phaseloom.gateway.models import POLICY, SAMPLER
from phaseloom.gateway.records import CheckpointRecord, ModelRecord, SamplerRecord
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.calls import (
    Begun,
    Opened,
    answer_with,
    kept_call,
    metadata_of,
    numbered_body,
    open_model,
    refused,
)
from phaseloom.gateway.tinker.requests import LoadWeights, SaveWeights
from phaseloom.gateway.tinker.training import new_model

_MAX_NAME_CHARS = 256
"""Maximum characters of a checkpoint's name."""
_KEPT_VERSIONS = 4
"""Unnamed sampler weights that are kept per model: the newest ones."""

_REFUSED_SAVE, _REFUSED_LOAD = ops.SaveState(""), ops.LoadState("")
"""Operations that the mesh refuses, because they have no name."""

routes = web.RouteTableDef()


@routes.post(PREFIX + "/save_weights")
async def save_weights(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await numbered_body(request, SaveWeights, _REFUSED_SAVE)
    return await answer_with(await save_promise(tenant, body))


@routes.post(PREFIX + "/save_weights_external")
async def save_weights_external(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await numbered_body(request, SaveWeights, _REFUSED_SAVE)
    return await answer_with(await save_external_promise(tenant, body))


async def save_external_promise(tenant: Tenant, body: SaveWeights) -> tuple[str, Promise]:
    """Return the promise of a checkpoint whose files can be downloaded one by one."""
    return await save_promise(tenant, body, "save_weights_external", "external_weights")


async def save_promise(
    tenant: Tenant, body: SaveWeights, call: str = "save_weights", kind: str = "weights"
) -> tuple[str, Promise]:
    """Return the promise of a checkpoint.

    Args: call: the type of the request.
          kind: the second part of the checkpoint's path.
    """
    opened = await open_model(tenant, body.model_id)
    name = _mesh_name(body.path or "", body.seq_id)
    try:
        path = _path(opened.record, kind, body.path or f"{body.seq_id:06d}")
        recipients = body.age_encryption_recipients
        if recipients is not None:
            recipients_of(recipients)
        ttl_s, metadata = ttl_of(body.ttl_seconds), metadata_of(body.user_metadata)
        before = tenant.book.find(CheckpointRecord, tenant.name, path)
        if before is not None and before.name != name and not body.overwrite:
            raise CallerError(
                f"checkpoint {body.path!r} exists",
                code=Code.ALREADY_EXISTS,
                field="path",
                remedy="choose another name, or save with overwrite=True",
            )
    except CallerError as error:
        return _refused(opened, body.seq_id, _REFUSED_SAVE, error)
    saved = _checkpoint(opened.record, path, POLICY, name, metadata)
    saved = replace(saved, recipients=recipients or [])

    def begin() -> Begun:
        handle = opened.submit(body.seq_id, ops.SaveState(name, ttl_s=ttl_s))

        async def save() -> dict[str, Any]:
            await outcome_of(handle)
            await _keep_checkpoint(tenant, saved, ttl_s)
            return {"type": call, "path": path}

        return save, handle

    return await kept_call(tenant, opened.name(body.seq_id), call, body, begin)


@routes.post(PREFIX + "/save_weights_for_sampler")
async def save_weights_for_sampler(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await numbered_body(request, SaveWeights, _REFUSED_SAVE)
    return await answer_with(await save_for_sampler_promise(tenant, body))


async def save_for_sampler_promise(tenant: Tenant, body: SaveWeights) -> tuple[str, Promise]:
    opened = await open_model(tenant, body.model_id)
    record, sampler = opened.record, opened.model.sampler
    try:
        body.check()
        path = None if body.path is None else _path(record, "sampler_weights", body.path)
        ttl_s, metadata = ttl_of(body.ttl_seconds), metadata_of(body.user_metadata)
    except CallerError as error:
        return _refused(opened, body.seq_id, _REFUSED_SAVE, error)
    version = _mesh_name(body.path or "", body.seq_id)
    keep, kept_s = (_KEPT_VERSIONS, 0.0) if path is None else (0, ttl_s)

    def begin() -> Begun:
        # The sampler of adapters reads the policy's checkpoints.
        save_it = ops.SaveState(version, keep=keep, ttl_s=kept_s)
        handle = opened.submit(body.seq_id, ops.PublishWeights() if sampler else save_it)

        async def save() -> dict[str, Any]:
            if sampler is not None:
                await sampler.take(handle, version, keep, kept_s)
            await outcome_of(handle)
            if path is not None:
                by = POLICY if sampler is None else SAMPLER
                saved = _checkpoint(record, path, by, version, metadata)
                await _keep_checkpoint(tenant, saved, ttl_s)
                return {"type": "save_weights_for_sampler", "path": path}
            session = record.id.partition(":")[0]
            sampling = f"{session}:sample:{body.sampling_session_seq_id}"
            saved_as = SamplerRecord(tenant.name, sampling, record.base, record.id, version)
            await tenant.book.put(saved_as)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampling}

        return save, handle

    return await kept_call(tenant, opened.name(body.seq_id), "save_for_sampler", body, begin)


@routes.post(PREFIX + "/load_weights")
async def load_weights(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await numbered_body(request, LoadWeights, _REFUSED_LOAD)
    return await answer_with(await load_promise(tenant, body))


async def load_promise(tenant: Tenant, body: LoadWeights) -> tuple[str, Promise]:
    """Return the promise to load a checkpoint, into the named model or a new one."""
    try:
        saved = tenant.book.get(CheckpointRecord, tenant.name, body.path)
        body.check(saved.base)
    except CallerError as error:
        if body.model_id is None or body.seq_id is None:
            raise
        opened = await open_model(tenant, body.model_id)
        return _refused(opened, body.seq_id, _REFUSED_LOAD, error)
    if body.session_id is not None and body.model_seq_id is not None:
        metadata = metadata_of(body.user_metadata)
        like = ModelRecord("", "", "", saved.base, 1, metadata, saved.adapter)
        record = await new_model(tenant, body.session_id, body.model_seq_id, like)
    else:
        record = tenant.book.get(ModelRecord, tenant.name, body.model_id or "")
    seq = body.seq_id or 0

    def begin() -> Begun:
        async def load() -> dict[str, Any]:
            tenant.loading[saved.source, saved.name] += 1
            try:
                model = await tenant.models.train(record.job, record.base, record.adapter)
                args = ops.LoadState(saved.name, saved.source, body.optimizer)
                await outcome_of(Opened(tenant, record, model).submit(seq, args))
            finally:
                tenant.loading[saved.source, saved.name] -= 1
            return {"type": "load_weights", "path": body.path, "model_id": record.id}

        return load, None

    return await kept_call(tenant, f"{record.id}:{seq}", "load_weights", body, begin)


def _refused(
    opened: Opened, seq: int, nameless: ops.Args, error: CallerError
) -> tuple[str, Promise]:
    """Return the promise of a save or a load that this gateway refuses.

    Args: nameless: a save or load without a name, which the mesh refuses. It uses up the call's
             number; otherwise all later operations would wait for it.
    """

    async def never(_: Any) -> Answer:
        raise error

    return refused(opened.tenant, opened.promise(seq, [nameless], never), error)


async def _keep_checkpoint(tenant: Tenant, saved: CheckpointRecord, ttl_s: float) -> None:
    """Let a path name a checkpoint from now on, and remove the checkpoint that it named before."""
    before = tenant.book.find(CheckpointRecord, tenant.name, saved.id)
    replaces = None if before is None else (before.source, before.name)
    if before is not None and before.name == saved.name:  # an earlier gateway started this
        replaces = before.replaces
    expires_s = time.time() + ttl_s if ttl_s else None
    named_checkpoint = replace(saved, expires_s=expires_s, replaces=replaces)
    await tenant.book.put(named_checkpoint)
    await clean_up(tenant, named_checkpoint)


def _checkpoint(
    record: ModelRecord, path: str, deployment: str, name: str, metadata: dict[str, Any]
) -> CheckpointRecord:
    source = f"{record.job}/{deployment}"
    return CheckpointRecord(
        record.tenant,
        path,
        record.id,
        record.base,
        source,
        name,
        time.time(),
        metadata,
        record.adapter,
    )


def _path(record: ModelRecord, kind: str, name: str) -> str:
    # The SDK does not escape names in addresses.
    is_short_text = name.isprintable() and len(name) <= _MAX_NAME_CHARS
    if name in ("", ".", "..") or set(name) & set("/%?#\\") or not is_short_text:
        raise CallerError(
            f"invalid checkpoint name {name[:_MAX_NAME_CHARS]!r}",
            field="path",
            remedy=f"use at most {_MAX_NAME_CHARS} characters; / % ? # \\ and control characters "
            "are not allowed",
        )
    return f"tinker://{record.id}/{kind}/{name}"


def _mesh_name(name: str, seq: int) -> str:
    """Return the mesh's name of a save, which allows fewer characters. `seq` keeps it unique."""
    return f"{seq}-{re.sub('[^A-Za-z0-9_-]', '_', name)}"[:64].rstrip("-")
