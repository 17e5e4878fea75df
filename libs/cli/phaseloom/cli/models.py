"""`phaseloom model` registers, lists and removes models: named directories that jobs refer to.

The name is resolved when a job is submitted. Jobs that exist already are not affected if the name
is removed or registered for another directory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from phaseloom.cli.output import print_json, print_whole
from phaseloom.cli.rundir import bus_config, open_bus
from phaseloom.common.contract.codec import decode, encode
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import check_model_name, to_token
from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.common.text.files import HOW_TO_CONVERT, TOKENIZER_FILE, VOCABULARY_FILES
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.keys import Conflict


def add(
    name: str, directory: Path, *, run: Path | None = None, console: Console | None = None
) -> None:
    """Register a model directory under a name for jobs to use.

    Every file is read and hashed once. Nodes that run the model need the directory at the same
    path, and verify the hashes.

    Parameters
    ----------
    name
        The model's name, such as `smollm2` or `org/model`.
    directory
        Model directory in the Hugging Face layout: config.json, safetensors, tokenizer.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    """
    model = read_model(name, directory)
    uvloop.run(_add(bus_config(run), model))
    console = console or Console()
    console.print(f"registered {line(model)}", soft_wrap=True, markup=False)
    names = {file.name for file in model.directory.files}
    if {"tokenizer.model"} == names.intersection(VOCABULARY_FILES):
        hint = f"without {TOKENIZER_FILE}, text may be refused: {HOW_TO_CONVERT}"
        console.print(hint, soft_wrap=True, markup=False)


def list_models(
    *, run: Path | None = None, json: bool = False, console: Console | None = None
) -> None:
    """List the registered models.

    Parameters
    ----------
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    json
        Print one JSON object per model instead of a table.
    """
    models = uvloop.run(_all(bus_config(run)))
    if json:
        return print_json(*models, console=console)
    print_whole(console or Console(), table(models))


def remove(name: str, *, run: Path | None = None, console: Console | None = None) -> None:
    """Unregister a model. Its files stay, and jobs that use it continue.

    Keep the files until those jobs have ended: a job that must be rebuilt from its start reads them
    again.

    Parameters
    ----------
    name
        The model's name.
    run
        Run directory, or its name under runs/. Default: PHASELOOM_BUS_URL, else the newest run.
    """
    uvloop.run(_remove(bus_config(run), check_model_name(name, "name")))
    (console or Console()).print(f"{name} is no longer registered", markup=False)


async def register(bus: Bus, model: RegisteredModel, *, replaces: bool = False) -> None:
    """Store the registration of a model.

    Args:   replaces: whether to replace an earlier registration of the same name.
    Raises: CallerError: ALREADY_EXISTS: the name is registered for something else.
    """
    key = to_token(model.name)
    stored = await bus.keys.get_raw(Bucket.MODELS, key)
    if stored is not None and not stored.is_gone and not replaces:
        if decode(stored.payload, RegisteredModel) == model:
            return
        raise _already_exists(model.name)
    try:
        sequence = stored.sequence if stored else 0
        await bus.keys.swap(Bucket.MODELS, key, encode(model), sequence)
    except Conflict:
        raise _already_exists(model.name) from None


def line(model: RegisteredModel) -> str:
    """Describe a registered model in one line."""
    num_bytes = sum(file.num_bytes for file in model.directory.files)
    return (
        f"{model.name}: {model.config.get('model_type', 'of no type')}, "
        f"{model.num_parameters:,} parameters in {', '.join(model.dtypes)}, "
        f"{len(model.directory.files)} files of {num_bytes:,} bytes in {model.directory.path}"
    )


def table(models: list[RegisteredModel]) -> Table:
    rows = Table("model", "type", "parameters", "dtype", "bytes", "directory", box=None)
    for model in models:
        rows.add_row(
            model.name,
            str(model.config.get("model_type", "–")),
            f"{model.num_parameters:,}",
            ", ".join(model.dtypes),
            f"{sum(file.num_bytes for file in model.directory.files):,}",
            model.directory.path,
        )
    if not models:
        rows.add_row("none yet")
    return rows


async def _add(settings: BusConfig, model: RegisteredModel) -> None:
    async with open_bus(settings, "models") as bus:
        await register(bus, model)


async def _all(settings: BusConfig) -> list[RegisteredModel]:
    async with open_bus(settings, "models") as bus:
        keys = sorted(await bus.keys.names(Bucket.MODELS))
        entries = await asyncio.gather(*(bus.keys.get(Bucket.MODELS, key) for key in keys))
    return [decode(stored.payload, RegisteredModel) for stored in entries if stored is not None]


async def _remove(settings: BusConfig, name: str) -> None:
    async with open_bus(settings, "models") as bus:
        stored = await bus.keys.get(Bucket.MODELS, to_token(name))
        if stored is None:
            raise CallerError(
                f"there is no registered model {name!r}",
                code=Code.NOT_FOUND,
                field="name",
                remedy="see `phaseloom model list`",
            )
        await bus.keys.delete(Bucket.MODELS, to_token(name), stored.sequence)


def _already_exists(name: str) -> CallerError:
    return CallerError(
        f"{name!r} is already registered for another directory or other files",
        code=Code.ALREADY_EXISTS,
        field="name",
        remedy="choose another name, or remove this one first (`phaseloom model remove`)",
    )
