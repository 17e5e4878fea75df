"""`phaseloom checkpoint` lists, describes, downloads and deletes the checkpoints of jobs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import aiofiles
import uvloop
from rich.console import Console
from rich.table import Table

from phaseloom.cli.output import print_json, print_whole, with_names
from phaseloom.cli.rundir import bus_config, open_bus
from phaseloom.common.contract import api
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.streams import ops_stream
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.services import call_api

T = TypeVar("T")

_PARTS = ("tenant", "job", "deployment", "name")
_ANSWER_S = 60.0


def list_checkpoints(
    what: str = "",
    *,
    run: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> int:
    """List the checkpoints of running and ended jobs, the newest last.

    The exit code is 1 if a node did not answer.

    Parameters
    ----------
    what
        `<tenant>`, `<tenant>.<job>` or `<tenant>.<job>.<deployment>`. Default: all checkpoints.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object per checkpoint instead of a table.
    """
    tenant, job, deployment = (*_tokens(what, 3), "", "", "")[:3]
    lists = uvloop.run(_fetch_lists(bus_config(run), tenant, api.ListCheckpoints(job, deployment)))
    target = console or Console()
    if json:
        for name, listed in lists.items():
            print_json(
                *(with_names(saved, tenant=name) for saved in listed.checkpoints), console=console
            )
        target = Console(stderr=True)
    else:
        print_whole(target, table(lists))
    silent = sorted({node for listed in lists.values() for node in listed.silent_nodes})
    if silent:
        line = f"no answer from {', '.join(silent)}: checkpoints that only they have are missing"
        target.print(line, soft_wrap=True, markup=False)
    return int(bool(silent))


def show(
    checkpoint: str, *, run: Path | None = None, json: bool = False, console: Console | None = None
) -> None:
    """Describe a checkpoint: its origin, its files, and how long it is kept.

    Parameters
    ----------
    checkpoint
        `<tenant>.<job>.<deployment>.<name>`.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object instead of text.
    """
    tenant, request = _parse_checkpoint(checkpoint)
    saved = uvloop.run(
        _call(bus_config(run), tenant, "checkpoint.show", request, api.SavedCheckpoint)
    )
    if json:
        return print_json(with_names(saved, tenant=tenant), console=console)
    (console or Console()).print(describe(tenant, saved), soft_wrap=True, markup=False)


def delete(
    checkpoint: str, *, run: Path | None = None, json: bool = False, console: Console | None = None
) -> None:
    """Delete a checkpoint. Checkpoints that a job needs to recover cannot be deleted.

    Deployments that have loaded the checkpoint keep its files for as long as they need them.

    Parameters
    ----------
    checkpoint
        `<tenant>.<job>.<deployment>.<name>`.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object instead of text.
    """
    tenant, request = _parse_checkpoint(checkpoint)
    deleted = uvloop.run(
        _call(bus_config(run), tenant, "checkpoint.delete", request, api.CheckpointDeleted)
    )
    if json:
        return print_json(with_names(deleted, checkpoint=checkpoint), console=console)
    line = f"{checkpoint}: deleted, {deleted.num_bytes:,} bytes"
    (console or Console()).print(line, soft_wrap=True, markup=False)


def expire(
    checkpoint: str,
    ttl_s: float,
    *,
    run: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> None:
    """Set how long a checkpoint is kept from now on.

    Parameters
    ----------
    checkpoint
        `<tenant>.<job>.<deployment>.<name>`.
    ttl_s
        Seconds from now. 0: keep the checkpoint until it is deleted.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object instead of text.
    """
    tenant, request = _parse_checkpoint(checkpoint)
    expire_request = api.ExpireCheckpoint(request.job, request.deployment, request.name, ttl_s)
    saved = uvloop.run(
        _call(bus_config(run), tenant, "checkpoint.expire", expire_request, api.SavedCheckpoint)
    )
    if json:
        return print_json(with_names(saved, tenant=tenant), console=console)
    line = f"{checkpoint}: kept {_retention(saved)}"
    (console or Console()).print(line, soft_wrap=True, markup=False)


def archive(
    checkpoint: str,
    file: Path,
    *,
    run: Path | None = None,
    json: bool = False,
    console: Console | None = None,
) -> None:
    """Download a checkpoint as a tar file that contains one directory.

    Parameters
    ----------
    checkpoint
        `<tenant>.<job>.<deployment>.<name>`.
    file
        File to write. It appears once the download is complete.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object instead of text.
    """
    tenant, request = _parse_checkpoint(checkpoint)
    if file.exists():
        raise CallerError(
            f"{file} already exists",
            code=Code.ALREADY_EXISTS,
            field="file",
            remedy="name another file",
        )
    num_bytes = uvloop.run(_download(bus_config(run), tenant, request, file))
    if json:
        return print_json(
            {"checkpoint": checkpoint, "file": str(file), "num_bytes": num_bytes}, console=console
        )
    line = f"{file}: {num_bytes:,} bytes"
    (console or Console()).print(line, soft_wrap=True, markup=False)


# --- requests ------------------------------------------------------------------------------------


def _tokens(text: str, limit: int) -> list[str]:
    tokens = text.split(".") if text else []
    if len(tokens) > limit:
        raise CallerError(
            f"expected at most {limit} names separated by dots, got {text!r}",
            field="what",
            remedy=f"name {'.'.join(f'<{part}>' for part in _PARTS[:limit])} or its first parts",
        )
    return [check_name(token, part) for token, part in zip(tokens, _PARTS, strict=False)]


def _parse_checkpoint(text: str) -> tuple[str, api.CheckpointRequest]:
    tokens = text.split(".")
    if len(tokens) != len(_PARTS):
        raise CallerError(
            f"expected <tenant>.<job>.<deployment>.<name>, got {text!r}",
            field="checkpoint",
            remedy="copy the name from `phaseloom checkpoint list`",
        )
    tenant, *names = (check_name(token, part) for token, part in zip(tokens, _PARTS, strict=True))
    return tenant, api.CheckpointRequest(*names)


async def _fetch_lists(
    settings: BusConfig, tenant: str, request: api.ListCheckpoints
) -> dict[str, api.CheckpointList]:
    async with open_bus(settings, "checkpoints") as bus:
        tenants = [tenant] if tenant else await _tenants(bus)
        requests = [
            _request(bus, name, "checkpoint.list", request, api.CheckpointList) for name in tenants
        ]
        return dict(zip(tenants, await asyncio.gather(*requests), strict=True))


async def _tenants(bus: Bus) -> list[str]:
    prefix = ops_stream("")
    names = [str(stream.config.name) for stream in await bus.js.streams_info()]
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


async def _request(bus: Bus, tenant: str, call: str, request: object, answer: type[T]) -> T:
    return await call_api(bus.client, tenant, call, request, answer, timeout_s=_ANSWER_S)


async def _call(settings: BusConfig, tenant: str, call: str, request: object, kind: type[T]) -> T:
    async with open_bus(settings, "checkpoints") as bus:
        return await _request(bus, tenant, call, request, kind)


async def _download(
    settings: BusConfig, tenant: str, request: api.CheckpointRequest, file: Path
) -> int:
    # Written under another name first, so that `file` never exists incomplete.
    part = file.with_name(f".{file.name}.part")
    async with open_bus(settings, "checkpoints") as bus:
        opened = await _request(bus, tenant, "checkpoint.archive", request, api.OpenedArchive)
        try:
            async with aiofiles.open(part, "wb") as target:
                offset = 0
                while offset < opened.num_bytes:
                    read_request = api.ReadArchive(opened.archive, offset)
                    read = await _request(
                        bus, tenant, "checkpoint.read", read_request, api.ArchivePart
                    )
                    await target.write(read.content)
                    offset += len(read.content)
            part.rename(file)
        except OSError as error:
            raise CallerError(
                f"{file} cannot be written: {error.strerror}",
                code=Code.FAILED_PRECONDITION,
                field="file",
                remedy="name a file in an existing directory with room for the checkpoint",
            ) from error
        finally:
            with suppress(OSError):
                part.unlink()
    return opened.num_bytes


# --- output --------------------------------------------------------------------------------------


def table(lists: dict[str, api.CheckpointList]) -> Table:
    shown = Table("checkpoint", "saved", "seq", "bytes", "kept", box=None)
    for tenant, listed in lists.items():
        for saved in listed.checkpoints:
            shown.add_row(
                _full_name(tenant, saved),
                _time(saved.saved_s),
                str(saved.seq),
                f"{saved.num_bytes:,}",
                _retention(saved),
            )
    if not shown.rows:
        shown.add_row("none yet")
    return shown


def describe(tenant: str, saved: api.SavedCheckpoint) -> str:
    """Describe a checkpoint, with one line for each known property and for each file."""
    lines = [
        f"{_full_name(tenant, saved)}: {saved.num_bytes:,} bytes, saved {_time(saved.saved_s)}",
        f"  kept {_retention(saved)}",
    ]
    if saved.weights_sha256:
        lines.append(f"  after operation {saved.seq}, weights {saved.weights_sha256}")
    else:
        lines.append("  not written by `save_state` of this mesh, or its record is damaged")
    return "\n".join([*lines, *(f"  {name}: {size:,}" for name, size in saved.files.items())])


def _full_name(tenant: str, saved: api.SavedCheckpoint) -> str:
    return f"{tenant}.{saved.job}.{saved.deployment}.{saved.name}"


def _retention(saved: api.SavedCheckpoint) -> str:
    if saved.expires_in_s is not None:
        return f"for {saved.expires_in_s:,.0f} s"
    return f"among the newest {saved.keep}" if saved.keep else "until it is deleted"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")
