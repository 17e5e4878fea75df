"""Read a model directory in the Hugging Face layout, for its registration.

A registration includes the config, the safetensors files it needs, and the small files that belong
to them. All other files in the directory are ignored, in particular code. The operator's command
line and the mesh's supervisor register models; agents verify files against the registration.

`model_weights` decides which files hold a model's weights, for everything that reads a model
directory. The decision is that of `transformers`: `model.safetensors`, or else the shards that
`model.safetensors.index.json` lists. Other files of weights next to them do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from phaseloom.common.contract.configcheck import check_config, check_num_parameters
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import check_model_name
from phaseloom.common.contract.specs import ModelDirectory, ModelFile, RegisteredModel
from phaseloom.common.tensors.adapterfiles import ADAPTER_CONFIG_FILE
from phaseloom.common.tensors.safetensors import (
    LENGTH_BYTES,
    Index,
    TensorEntry,
    decode_header,
    header_bytes,
    index_name,
)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MODEL_STEM = "model"
SUFFIX = ".safetensors"
MAX_CONFIG_BYTES = 2**19
"""A job's spec includes the config, and has at most 1 MiB."""
MAX_COMPANION_BYTES = 2**27
"""Largest tokenizer or other small file. The largest known tokenizer.json has 33 MB."""
_TEMPLATES = "additional_chat_templates"
COMPANIONS = (
    *(GENERATION_FILE, "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template*", "*.model", "*.tiktoken"),
    *("LICENSE*", "NOTICE*", "README.md", f"{_TEMPLATES}/*.jinja"),
)
"""Names of files that are registered with config and weights, and copied into checkpoints."""
_DOCUMENTS = ("LICENSE", "NOTICE", "README")
"""Beginnings of the names of companions for people."""


class GenerationFile(msgspec.Struct, frozen=True):
    """The part of a `generation_config.json` that samplers use."""

    eos_token_id: int | list[int] | None = None


def is_companion(name: str) -> bool:
    """Whether a file belongs to the model but is neither config nor weights."""
    is_inside = name.removeprefix(f"{_TEMPLATES}/") == Path(name).name
    return (
        is_inside
        and not name.endswith(SUFFIX)
        and any(fnmatch(name, pattern) for pattern in COMPANIONS)
    )


def _companions(directory: Path) -> list[str]:
    """Return the names of the small files in a model directory, sorted. Raises: OSError."""
    paths = [*directory.iterdir(), *(directory / _TEMPLATES).glob("*")]
    names = sorted(str(path.relative_to(directory)) for path in paths if path.is_file())
    return [*filter(is_companion, names)]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files in a directory that hold one set of weights."""

    names: list[str]
    index: str = ""
    """Name of the index that lists them; empty: there is a single file."""
    tensors: list[str] = field(default_factory=list)
    """The tensors in the index, sorted."""

    def check_tensors(self, names: Iterable[str]) -> None:
        """Check the tensors in the files against the index. Raises: ValueError: they differ."""
        if self.index and sorted(names) != self.tensors:
            raise ValueError("the tensors in the index differ from those in the files")


def weight_files(
    stem: str, is_file: Callable[[str], bool], read: Callable[[str], bytes]
) -> WeightFiles | None:
    """Return the files that hold the weights with this stem, as `transformers` chooses them.

    Args:   is_file: whether the directory has a file with this name.
            read: returns the content of a file.
    Returns: None if there are none.
    Raises: ValueError: the index is malformed.
    """
    if is_file(f"{stem}{SUFFIX}"):
        return WeightFiles([f"{stem}{SUFFIX}"])
    index = index_name(stem)
    if not is_file(index):
        return None
    weight_map = msgspec.json.decode(read(index), type=Index).weight_map
    names = sorted(set(weight_map.values()))
    for name in names:
        # A path in the index could make us read any file of the machine.
        if Path(name).name != name:
            raise ValueError(f"the index names a file outside the directory: {name!r}")
    return WeightFiles(names, index, sorted(weight_map))


def model_weights(
    is_file: Callable[[str], bool], read: Callable[[str], bytes]
) -> WeightFiles | None:
    """Return the files that hold a model's weights.

    Args and Returns: as `weight_files`.
    Raises: ValueError: the index or the config is malformed.
            CallerError: FAILED_PRECONDITION: `transformers` would load something else: an adapter
            next to the model, or a file that the config names.
    """
    files = weight_files(MODEL_STEM, is_file, read)
    if files is None or not is_file(CONFIG_FILE):
        return files
    problem = ""
    config = msgspec.json.decode(read(CONFIG_FILE), type=dict[str, Any])
    if config.get("transformers_weights") is not None:
        problem = f"{CONFIG_FILE} has transformers_weights"
    if is_file(ADAPTER_CONFIG_FILE):
        problem = (
            f"the directory has {ADAPTER_CONFIG_FILE} next to {(files.index, *files.names)[0]}"
        )
    if problem:
        raise CallerError(
            f"{problem}, so transformers would load other weights",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="put the model alone into a directory, as model.safetensors or shards with an "
            "index",
        )
    return files


def check_companions(model: RegisteredModel) -> None:
    """Check that the small files of a registered model are those that were registered. Blocking.

    Raises: ResourceError: DATA_LOSS: a file was changed, added or removed.
    """
    directory = Path(model.directory.path)
    registered = {f.name: f.blake3 for f in model.directory.files if _is_read(f.name)}
    try:
        names = [CONFIG_FILE, *_companions(directory)]
        is_now = [name for name in names if _is_read(name) and (directory / name).is_file()]
        now = {name: file_blake3(directory / name) for name in is_now}
    except OSError as error:
        raise ResourceError(
            f"{directory} of the registered model {model.name!r} cannot be read: {error}",
            field="model",
            remedy="make the model's files readable",
        ) from error
    differing = [name for name in now | registered if now.get(name) != registered.get(name)]
    if differing:
        raise ResourceError(
            f"{directory / min(differing)} differs from the file registered for the model "
            f"{model.name!r}",
            code=Code.DATA_LOSS,
            field="model",
            remedy="restore the file, or register the directory under another name",
        )


def _is_read(name: str) -> bool:
    """Whether programs read a small file."""
    return name == CONFIG_FILE or (is_companion(name) and not name.startswith(_DOCUMENTS))


def file_blake3(path: Path) -> str:
    """Return the BLAKE3 of a file, in hex, computed in parallel. Raises: OSError."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelHeaders:
    """A model directory without its weights' bytes."""

    config: dict[str, Any]
    weights: WeightFiles
    entries: list[TensorEntry]


def check_directory(directory: Path, field: str) -> ModelHeaders:
    """Check a model directory without reading its weights.

    Args:   field: the argument or setting that names the directory, for errors.
    Raises: CallerError: see `read_model`.
    """
    try:
        return ModelHeaders(*_read_directory(directory.absolute()))
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
    check_model_name(name, "name")
    directory = directory.absolute()
    config, weights, entries = _read_directory(directory)
    with _readable():
        index = [weights.index] if weights.index else []
        registered = [CONFIG_FILE, *index, *weights.names, *_companions(directory)]
        files = [
            ModelFile(file, (directory / file).stat().st_size, file_blake3(directory / file))
            for file in registered
        ]
    num_parameters = sum(prod(entry.shape) for entry in entries)
    dtypes = sorted({entry.dtype for entry in entries})
    pinned = ModelDirectory(str(directory), files)
    return RegisteredModel(name, pinned, config, num_parameters, dtypes)


def _read_directory(directory: Path) -> tuple[dict[str, Any], WeightFiles, list[TensorEntry]]:
    if not directory.is_dir():
        raise CallerError(
            f"the directory {directory} does not exist",
            code=Code.NOT_FOUND,
            field="directory",
            remedy="pass a directory with config.json and model*.safetensors",
        )
    with _readable():
        config: dict[str, Any] = _decoded(directory / CONFIG_FILE, dict[str, Any], MAX_CONFIG_BYTES)
        check_config(config, CONFIG_FILE, is_drawn=False)
        for name in _companions(directory):
            _check_file_size(directory / name, MAX_COMPANION_BYTES)
        if (directory / GENERATION_FILE).is_file():
            _decoded(directory / GENERATION_FILE, GenerationFile, MAX_COMPANION_BYTES)
        weights, entries = _weights(directory)
    if not config.get("quantization_config"):
        # Quantised files pack several parameters into an element.
        num_parameters = sum(prod(entry.shape) for entry in entries)
        check_num_parameters(config, num_parameters, "the files have", CONFIG_FILE)
    return config, weights, entries


def _read_bounded(path: Path, max_bytes: int = MAX_COMPANION_BYTES) -> bytes:
    _check_file_size(path, max_bytes)
    return path.read_bytes()


def _check_file_size(path: Path, limit: int) -> None:
    num_bytes = path.stat().st_size
    if num_bytes > limit:
        raise CallerError(
            f"{path.name} must have at most {limit} bytes, got {num_bytes}",
            field=path.name,
            remedy="download or save the model's files again",
        )


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


def _weights(directory: Path) -> tuple[WeightFiles, list[TensorEntry]]:
    index = directory / index_name(MODEL_STEM)
    try:
        files = model_weights(
            lambda name: (directory / name).is_file(), lambda name: _read_bounded(directory / name)
        )
        if files is None:
            raise FileNotFoundError(None, None, str(index))
        entries = [entry for name in files.names for entry in _entries(directory / name)]
        files.check_tensors(entry.name for entry in entries)
    except ValueError as error:
        raise _invalid(index, str(error)) from None
    return files, entries


def _entries(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as opened:
            length = header_bytes(opened.read(LENGTH_BYTES))
            return decode_header(opened.read(length), path.stat().st_size)
    except ValueError as error:
        raise _invalid(path, str(error)) from None


def _decoded(path: Path, kind: Any, max_bytes: int) -> Any:
    try:
        return msgspec.json.decode(_read_bounded(path, max_bytes), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(path, str(error)) from None


def _invalid(path: Path, problem: str) -> CallerError:
    return CallerError(
        f"{path}: {problem}", field="directory", remedy="download or save the model's files again"
    )
