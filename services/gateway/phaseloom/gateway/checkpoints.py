"""The Tinker API's calls about saved checkpoints: list, expire, delete, and download as a tar file.

A checkpoint of the SDK is a path that names a checkpoint of the mesh. The mesh keeps the files and
removes them when their time to live ends; the path disappears at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import nats.errors
from aiohttp import web
from msgspec.structs import replace
from yarl import URL

from phaseloom.client import CallerError, Code, PhaseloomError
from phaseloom.gateway.encryption import SUFFIX, encrypted
from phaseloom.gateway.http import PREFIX, body_of, page_of, refused, tenant_of
from phaseloom.gateway.models import is_internal
from phaseloom.gateway.records import CheckpointRecord, ModelRecord
from phaseloom.gateway.replicas import ARCHIVE_TYPE, FILE_TYPE, REPLICA
from phaseloom.gateway.tenants import Tenant

log = logging.getLogger(__name__)

routes = web.RouteTableDef()

_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The SDK's types of checkpoints, by the second part of their paths."""
_OF_RUN = PREFIX + "/training_runs/{run}/checkpoints/{checkpoint:.+}"
_SIGNED_S = 15 * 60.0
"""Time within which a download from a signed address must start."""
_MAX_NAME_CHARS = 256
"""Maximum characters of a name that an error repeats."""


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


@routes.post(PREFIX + "/training_runs/{run}/checkpoints/{kind}/{name}/publish")
@routes.delete(PREFIX + "/training_runs/{run}/checkpoints/{kind}/{name}/publish")
async def publish(request: web.Request) -> web.Response:
    """Refuse to share a checkpoint with other tenants."""
    tenant_of(request)
    verb = "publishing" if request.method == "POST" else "unpublishing"
    message = f"{verb} checkpoints is not supported: download the checkpoint and share its files"
    return refused(request.path, 501, message, "publish")


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
    _check_not_encrypted(record)
    expires_s = int(time.time() + _SIGNED_S)
    path = f"{PREFIX}/archives/{tenant.name}/{record.id.removeprefix('tinker://')}"
    url = _signed(request, tenant, path, expires_s)
    return web.json_response({"url": url, "expires": timestamp(expires_s)})


@routes.get(_OF_RUN + "/external_weights_urls")
async def external_weights_urls(request: web.Request) -> web.Response:
    """Return temporary addresses from which anybody can download the files of a checkpoint."""
    tenant, record = _named_checkpoint(request)
    if _kind(record) != "external":
        raise CallerError(
            f"expected a checkpoint of save_weights_external, got {record.id}",
            field="checkpoint",
            remedy="name tinker://RUN/external_weights/NAME",
        )
    expires_s = int(time.time() + _SIGNED_S)
    suffix = SUFFIX if record.recipients else ""
    names = [name + suffix for name in await tenant.models.files(record.source, record.name)]
    path = f"{PREFIX}/files/{tenant.name}/{record.id.removeprefix('tinker://')}"
    urls = {name: _signed(request, tenant, f"{path}/{name}", expires_s) for name in names}
    return web.json_response({"urls": urls, "expires": timestamp(expires_s)})


def _signed(request: web.Request, tenant: Tenant, path: str, expires_s: int) -> str:
    """Return the address of a path that can be read without a key until it expires.

    Raises: CallerError: the request names an invalid host.
    """
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
    return str(url)


@routes.get(PREFIX + "/archives/{tenant}/{run}/{checkpoint:.+}")
async def download(request: web.Request) -> web.StreamResponse:
    """Stream a checkpoint as a tar file with one directory."""
    tenant, record = _own_checkpoint(request)
    _check_not_encrypted(record)
    content = await tenant.models.archive(record.source, record.name)
    return await _streamed(request, record, content, ARCHIVE_TYPE, content.num_bytes)


@routes.get(PREFIX + "/files/{tenant}/{run}/{checkpoint:[^/]+/[^/]+}/{file:.+}")
async def download_file(request: web.Request) -> web.StreamResponse:
    """Stream a file of an external checkpoint, encrypted if it was saved for recipients."""
    tenant, record = _own_checkpoint(request)
    given, suffix = request.match_info["file"], SUFFIX if record.recipients else ""
    name = given.removesuffix(suffix)
    if _kind(record) != "external" or not given.endswith(suffix) or is_internal(name):
        raise CallerError(
            f"{record.id} has no file {given[:_MAX_NAME_CHARS]!r}",
            code=Code.NOT_FOUND,
            field="file",
            remedy="use an address that get_external_weights_urls returns",
        )
    content = await tenant.models.archive(record.source, record.name, name)
    if not record.recipients:
        return await _streamed(request, record, content, FILE_TYPE, content.num_bytes)
    parts = encrypted(aiter(content), record.recipients)
    return await _streamed(request, record, parts, FILE_TYPE, None)


async def _streamed(
    request: web.Request,
    record: CheckpointRecord,
    content: AsyncIterable[bytes],
    kind: str,
    num_bytes: int | None,
) -> web.StreamResponse:
    """Send the content of a download. Args: num_bytes: its length. None: unknown."""
    headers = {"Content-Type": kind}
    if num_bytes is not None:
        headers["Content-Length"] = str(num_bytes)
    answer = web.StreamResponse(headers=headers)
    await answer.prepare(request)
    try:
        async for part in content:
            await answer.write(part)
    except PhaseloomError as error:
        log.warning("a download of %s ended early: %s", record.id, error)
        # Part of the file is already sent, so close the connection: the caller sees an incomplete
        # download.
        answer.force_close()
        if request.transport is not None:
            request.transport.abort()
    finally:
        if isinstance(content, AsyncGenerator):
            await content.aclose()
    return answer


def _check_not_encrypted(record: CheckpointRecord) -> None:
    """Raises: CallerError: the checkpoint was saved for recipients, so it is no tar file."""
    if record.recipients:
        raise CallerError(
            f"{record.id} is encrypted, so its files are downloaded one by one",
            code=Code.FAILED_PRECONDITION,
            field="checkpoint",
            remedy="use get_external_weights_urls",
        )


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


def _own_checkpoint(request: web.Request) -> tuple[Tenant, CheckpointRecord]:
    """As `_named_checkpoint`, for an address that also names the tenant."""
    tenant, record = _named_checkpoint(request)
    if request.match_info["tenant"] != tenant.name:
        raise CallerError(
            "there is no such download",
            code=Code.NOT_FOUND,
            field="tenant",
            remedy="request the address of the download again, and use it unchanged",
        )
    return tenant, record


def _kind(record: CheckpointRecord) -> str:
    return _KINDS[record.id.split("/")[3]]


def checkpoint_row(saved: CheckpointRecord, sizes: dict[tuple[str, str], int]) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(saved.id.split("/")[3:]),
        "checkpoint_type": _kind(saved),
        "time": timestamp(saved.saved_s),
        "tinker_path": saved.id,
        "size_bytes": sizes.get((saved.source, saved.name)),
        "public": False,
        "user_metadata": saved.metadata or None,
        "expires_at": None if saved.expires_s is None else timestamp(saved.expires_s),
    }
