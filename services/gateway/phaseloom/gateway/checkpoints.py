"""The Tinker API's calls about saved checkpoints: list, expire, delete, and download as a tar file.

A checkpoint of the SDK is a path that names a checkpoint of the mesh. The mesh keeps the files and
removes them when their time to live ends; the path disappears at the same time.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import nats.errors
from aiohttp import web
from msgspec.structs import replace
from yarl import URL

from phaseloom.client import CallerError, Code, PhaseloomError
from phaseloom.gateway.http import PREFIX, body_of, page_of, tenant_of
from phaseloom.gateway.records import CheckpointRecord, ModelRecord
from phaseloom.gateway.replicas import ARCHIVE_TYPE, REPLICA
from phaseloom.gateway.tenants import Tenant

log = logging.getLogger(__name__)

routes = web.RouteTableDef()

_OF_RUN = PREFIX + "/training_runs/{run}/checkpoints/{checkpoint:.+}"
_SIGNED_S = 15 * 60.0
"""Time within which a download from an archive's address must start."""


class SetTtl(msgspec.Struct, frozen=True):
    ttl_seconds: float | None = None


@routes.get(PREFIX + "/training_runs/{run}/checkpoints")
async def list_of_run(request: web.Request) -> web.Response:
    tenant, run = tenant_of(request), request.match_info["run"]
    model = tenant.book.get(ModelRecord, tenant.name, run)
    sizes = await tenant.models.sizes(model.job)
    saved = tenant.book.all(CheckpointRecord, tenant.name)
    rows = [
        checkpoint_row(saved_checkpoint, sizes)
        for saved_checkpoint in saved
        if saved_checkpoint.model == run
    ]
    return web.json_response({"checkpoints": rows})


@routes.get(PREFIX + "/checkpoints")
async def list_of_user(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    saved = tenant.book.all(CheckpointRecord, tenant.name)
    newest = sorted(saved, key=lambda saved_checkpoint: saved_checkpoint.saved_s, reverse=True)
    page, cursor = page_of(request, newest)
    sizes = await tenant.models.sizes()
    rows = [checkpoint_row(saved_checkpoint, sizes) for saved_checkpoint in page]
    return web.json_response({"checkpoints": rows, "cursor": cursor})


@routes.delete(_OF_RUN)
async def delete(request: web.Request) -> web.Response:
    """Expire a checkpoint now and remove its files."""
    tenant, record = _named_checkpoint(request)
    expired = replace(record, expires_s=0.0)
    await tenant.book.put(expired)
    await clean_up(tenant, expired)
    return web.json_response({})


@routes.put(_OF_RUN + "/ttl")
async def set_ttl(request: web.Request) -> web.Response:
    tenant, record = _named_checkpoint(request)
    ttl_s = ttl_of((await body_of(request, SetTtl)).ttl_seconds)
    await tenant.models.expire(record.source, record.name, ttl_s)
    await tenant.book.put(replace(record, expires_s=time.time() + ttl_s if ttl_s else None))
    return web.json_response({})


@routes.get(_OF_RUN + "/archive")
async def archive(request: web.Request) -> web.Response:
    """Return a temporary address from which anybody can download a checkpoint."""
    tenant, record = _named_checkpoint(request)
    expires_s = int(time.time() + _SIGNED_S)
    path = f"{PREFIX}/archives/{tenant.name}/{record.id.removeprefix('tinker://')}"
    signature = request.app[REPLICA].signature(tenant.name, path, expires_s)
    scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
    try:
        url = URL.build(
            scheme=scheme,
            authority=request.host,
            path=path,
            query={"expires": str(expires_s), "signature": signature},
        )
    except ValueError as error:
        raise CallerError(
            f"expected an address of this gateway, got {request.host!r}: {error}",
            field="Host",
            remedy="send a valid Host header",
        ) from error
    return web.json_response({"url": str(url), "expires": timestamp(expires_s)})


@routes.get(PREFIX + "/archives/{tenant}/{run}/{checkpoint:.+}")
async def download(request: web.Request) -> web.StreamResponse:
    """Stream a checkpoint as a tar file with one directory."""
    tenant, record = _named_checkpoint(request)
    if request.match_info["tenant"] != tenant.name:
        raise CallerError(
            "there is no such archive",
            code=Code.NOT_FOUND,
            field="tenant",
            remedy="request the checkpoint's `archive` again and use the address that it returns",
        )
    content = await tenant.models.archive(record.source, record.name)
    headers = {"Content-Type": ARCHIVE_TYPE, "Content-Length": str(content.num_bytes)}
    answer = web.StreamResponse(headers=headers)
    await answer.prepare(request)
    try:
        async for part in content:
            await answer.write(part)
    except PhaseloomError as error:
        log.warning("an archive of %s ended early: %s", record.id, error)
        # Part of the file is already sent, so close the connection: the caller sees an incomplete
        # download.
        answer.force_close()
        if request.transport is not None:
            request.transport.abort()
    return answer


async def clean_up(tenant: Tenant, record: CheckpointRecord) -> None:
    """Remove the files of the checkpoint that a path named before. If the path's own checkpoint has
    expired, remove its files and the path as well.

    Files that are being loaded stay for now; the record remembers that they must be removed.

    Raises: PhaseloomError: some files could not be removed.
    """
    if record.replaces is not None:
        if not await tenant.remove_files(*record.replaces):
            return
        record = replace(record, replaces=None)
        await tenant.book.put(record)
    if record.has_expired and await tenant.remove_files(record.source, record.name):
        await tenant.book.drop(record)


async def clean_up_all(tenant: Tenant) -> None:
    for record in tenant.book.left_over(tenant.name):
        try:
            await clean_up(tenant, record)
        except (PhaseloomError, nats.errors.Error) as error:
            log.warning("could not remove the files of %s yet: %s", record.id, error)


def ttl_of(seconds: float | None) -> float:
    """Convert the SDK's `ttl_seconds` to the mesh's time to live. 0 means no limit.

    Raises: CallerError: the value is not a positive number of seconds.
    """
    if seconds is not None and not seconds > 0:
        raise CallerError(
            f"ttl_seconds must be greater than 0, got {seconds}",
            field="ttl_seconds",
            remedy="use a positive number of seconds, or omit it to keep the checkpoint",
        )
    return seconds or 0.0


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _named_checkpoint(request: web.Request) -> tuple[Tenant, CheckpointRecord]:
    """Return the tenant, and the checkpoint that a request's address names.

    Raises: CallerError: NOT_FOUND: the tenant has no such checkpoint.
    """
    tenant, match = tenant_of(request), request.match_info
    path = f"tinker://{match['run']}/{match['checkpoint']}"
    return tenant, tenant.book.get(CheckpointRecord, tenant.name, path)


def checkpoint_row(saved: CheckpointRecord, sizes: dict[tuple[str, str], int]) -> dict[str, Any]:
    kind = "sampler" if "/sampler_weights/" in saved.id else "training"
    return {
        "checkpoint_id": "/".join(saved.id.split("/")[3:]),
        "checkpoint_type": kind,
        "time": timestamp(saved.saved_s),
        "tinker_path": saved.id,
        "size_bytes": sizes.get((saved.source, saved.name)),
        "public": False,
        "user_metadata": saved.metadata or None,
        "expires_at": None if saved.expires_s is None else timestamp(saved.expires_s),
    }
