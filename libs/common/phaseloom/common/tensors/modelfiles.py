"""Read a model directory in the Hugging Face layout, for its registration.

A registration includes the config, the safetensors files it needs, and the small files that belong
to them. All other files in the directory are ignored, in particular code. The operator's command
line and the mesh's supervisor register models; agents verify files against the registration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.specs import ModelDirectory, ModelFile, RegisteredModel
from phaseloom.common.tensors.safetensors import (
    LENGTH_BYTES,
    Index,
    TensorEntry,
    decode_header,
    header_bytes,
    index_name,
)

CONFIG_FILE = "config.json"
_STEM = "model"
_COMPANIONS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template*", "*.model", "*.tiktoken"),
    *("LICENSE*", "NOTICE*", "README.md"),
)
"""Names of files that are registered with config and weights, and copied into checkpoints."""


def is_companion(name: str) -> bool:
    """Whether a file belongs to the model but is neither config nor weights."""
    return any(fnmatch(name, pattern) for pattern in _COMPANIONS)


def file_blake3(path: Path) -> str:
    """Return the BLAKE3 of a file, in hex, computed in parallel. Raises: OSError."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def check_directory(directory: Path, field: str) -> None:
    """Check a model directory without reading its weights.

    Args:   field: the argument or setting that names the directory, for errors.
    Raises: CallerError: see `read_model`.
    """
    try:
        _read_directory(directory.absolute())
    except CallerError as error:
        raise CallerError(
            error.info.message, code=error.info.code, field=field, remedy=error.info.remedy
        ) from None


def read_model(name: str, directory: Path) -> RegisteredModel:
    """Read and hash a model directory.

    Args:   name: the name to register it under.
    Raises: CallerError: the name is invalid. NOT_FOUND: the directory or a file is missing.
            INVALID_ARGUMENT: a file has invalid content.
    Cost:   reads every file once.
    """
    check_name(name, "name")
    directory = directory.absolute()
    config, weights, entries = _read_directory(directory)
    with _readable():
        file_names = sorted(p.name for p in directory.iterdir() if p.is_file())
        registered = [CONFIG_FILE, *weights, *filter(is_companion, file_names)]
        files = [
            ModelFile(file, (directory / file).stat().st_size, file_blake3(directory / file))
            for file in registered
        ]
    num_parameters = sum(prod(entry.shape) for entry in entries)
    dtypes = sorted({entry.dtype for entry in entries})
    pinned = ModelDirectory(str(directory), files)
    return RegisteredModel(name, pinned, config, num_parameters, dtypes)


def _read_directory(directory: Path) -> tuple[dict[str, Any], list[str], list[TensorEntry]]:
    if not directory.is_dir():
        raise CallerError(
            f"the directory {directory} does not exist",
            code=Code.NOT_FOUND,
            field="directory",
            remedy="pass a directory with config.json and model*.safetensors",
        )
    with _readable():
        config: dict[str, Any] = _decoded(directory / CONFIG_FILE, dict[str, Any])
        weights, entries = _weights(directory)
    return config, weights, entries


@contextmanager
def _readable() -> Iterator[None]:
    """Report a missing or unreadable file as a CallerError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CallerError(
            f"{error.filename} is missing",
            code=Code.NOT_FOUND,
            field="directory",
            remedy="pass a directory with config.json and model*.safetensors",
        ) from None
    except OSError as error:
        raise CallerError(
            f"cannot read {error.filename}: {error.strerror}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="make the model's files readable",
        ) from None


def _weights(directory: Path) -> tuple[list[str], list[TensorEntry]]:
    single = f"{_STEM}.safetensors"
    if (directory / single).exists():
        return [single], _entries(directory / single)
    index = directory / index_name(_STEM)
    weight_map = _decoded(index, Index).weight_map
    names = sorted(set(weight_map.values()))
    entries: list[TensorEntry] = []
    for name in names:
        # A path in the index could make us hash any file of the machine.
        if Path(name).name != name:
            raise _invalid(index, f"the index names a file outside the directory: {name!r}")
        entries += _entries(directory / name)
    names_in_files = sorted(entry.name for entry in entries)
    if names_in_files != sorted(weight_map):
        raise _invalid(index, "the tensors in the index differ from those in the files")
    return [index.name, *names], entries


def _entries(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as opened:
            length = header_bytes(opened.read(LENGTH_BYTES))
            return decode_header(opened.read(length), path.stat().st_size)
    except ValueError as error:
        raise _invalid(path, str(error)) from None


def _decoded(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise _invalid(path, str(error)) from None


def _invalid(path: Path, problem: str) -> CallerError:
    return CallerError(
        f"{path}: {problem}", field="directory", remedy="download or save the model's files again"
    )
