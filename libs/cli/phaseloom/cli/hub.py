"""Model directories by what a user calls them: a directory, or a model of the Hugging Face Hub.

A model of the Hub is used from the local cache if it is there, without a request. Otherwise
`huggingface_hub` downloads it into that cache (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and
HF_HUB_OFFLINE have their usual meanings), and resumes a download that was interrupted. The small
files come first, so a snapshot with weights is whole.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from phaseloom.cli.extras import check_installed
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import check_model_name
from phaseloom.common.tensors.modelfiles import (
    COMPANIONS,
    CONFIG_FILE,
    MODEL_STEM,
    SUFFIX,
    check_directory,
    weight_files,
)
from phaseloom.common.tensors.safetensors import index_name

FIELD = "--model"
_WEIGHTS = f"{MODEL_STEM}{SUFFIX}"
_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
_RETRY = "run the same command again: it resumes the download"


def find_models(arguments: list[str], report: Callable[[str], None]) -> dict[str, str]:
    """Return the directory of each model that the command line names, by the model's name.

    Args:   arguments: `ORG/NAME` or `ORG/NAME:REVISION` of the Hub, `NAME=DIR`, or a directory.
            report: shows a line of progress.
    Raises: CallerError or ResourceError: a model cannot be had; the remedy says what to do.
    """
    models: dict[str, str] = {}
    for argument in arguments:
        name, directory = _find(argument, report)
        check_directory(directory, FIELD)
        if models.setdefault(name, str(directory)) != str(directory):
            raise CallerError(
                f"{name!r} names two directories: {models[name]} and {directory}",
                field=FIELD,
                remedy="give each model its own name, as NAME=DIR",
            )
    return models


def _find(argument: str, report: Callable[[str], None]) -> tuple[str, Path]:
    name, separator, directory = argument.partition("=")
    if separator:
        return check_model_name(name, FIELD), Path(directory).expanduser().absolute()
    path = Path(argument).expanduser()
    if argument.startswith(("/", ".", "~")):
        path = path.absolute()
        return check_model_name(path.resolve().name, FIELD), path
    check_model_name(argument, FIELD)
    if (path / CONFIG_FILE).is_file():
        return argument, path.absolute()
    return argument, _of_hub(argument, report)


def _of_hub(name: str, report: Callable[[str], None]) -> Path:
    """Return the snapshot of a model of the Hub, downloading it if it is not in the cache."""
    check_installed("a model of the Hugging Face Hub", ["huggingface_hub"], "hub")
    cached = _cached(name)
    if cached is not None and any(any(cached.glob(pattern)) for pattern in _TOKENIZERS):
        report(f"{name}: found in {cached}")
        return cached
    report(f"{name}: downloading")
    try:
        directory = _snapshot(name, is_local=False)
    # `huggingface_hub` has errors of its own, of its HTTP client, and of the system.
    except Exception as error:
        if cached is not None:  # a model without a tokenizer
            return cached
        raise _described(name, error) from error
    report(f"{name}: in {directory}")
    return directory


def _cached(name: str) -> Path | None:
    try:
        directory = _snapshot(name, is_local=True)
        check_directory(directory, FIELD)
    # The cache has no such model, or only a part of one.
    except Exception:
        return None
    return directory


def _snapshot(name: str, *, is_local: bool) -> Path:
    # Imported here because the package is optional and slow to import.
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition(":")

    def fetch(files: list[str]) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=files,
                local_files_only=is_local,
            )
        )

    directory = fetch([CONFIG_FILE, index_name(MODEL_STEM), *COMPANIONS])
    if not (directory / CONFIG_FILE).is_file():
        raise CallerError(
            f"{repository} has no {CONFIG_FILE}, so it is not a model of transformers",
            code=Code.FAILED_PRECONDITION,
            field=FIELD,
            remedy="choose a repository with config.json and model*.safetensors; "
            "`phaseloom model convert` reads GGUF files",
        )
    try:
        files = weight_files(
            MODEL_STEM,
            lambda file: (directory / file).is_file(),
            lambda file: (directory / file).read_bytes(),
        )
    except ValueError as error:
        raise CallerError(
            f"the weights' index of {repository} is malformed: {error}",
            field=FIELD,
            remedy="choose another repository or revision",
        ) from None
    weights = [_WEIGHTS] if files is None else files.names
    directory = fetch(weights)
    if absent := [file for file in weights if not (directory / file).is_file()]:
        raise CallerError(
            f"{repository} has no {absent[0]}",
            code=Code.FAILED_PRECONDITION,
            field=FIELD,
            remedy="choose a repository with weights in the safetensors format",
        )
    return directory


def _described(name: str, error: Exception) -> PhaseloomError:
    """Return the error that tells the user why a download failed and what to do."""
    if isinstance(error, PhaseloomError):
        return error
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    repository, _, revision = name.partition(":")
    code = Code.UNAVAILABLE
    kind: type[PhaseloomError] = ResourceError
    status = getattr(getattr(error, "response", None), "status_code", 0)
    number = getattr(error, "errno", None)
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    elsewhere = "or copy the model's files to this machine and pass --model NAME=DIR"
    remedy = f"check that this machine reaches {hub}, then {_RETRY}; {elsewhere}"
    problem = f"cannot be downloaded: {reason}"
    match error:
        case errors.GatedRepoError():
            code, kind, problem = Code.PERMISSION_DENIED, CallerError, "is gated"
            remedy = (
                f"accept its terms at {hub}/{repository}, then set HF_TOKEN to a token of that "
                "account (`hf auth login` stores one)"
            )
        case errors.RepositoryNotFoundError():
            code, kind, problem = Code.NOT_FOUND, CallerError, f"is not a model of {hub}"
            remedy = "check the spelling of ORG/NAME; a private model needs HF_TOKEN"
        case errors.RevisionNotFoundError():
            code, kind, problem = Code.NOT_FOUND, CallerError, f"has no revision {revision!r}"
            remedy = "use a branch, tag or commit of the repository, or omit it"
        case errors.HFValidationError():
            code, kind, problem = Code.INVALID_ARGUMENT, CallerError, f"is no Hub id: {reason}"
            remedy = "pass ORG/NAME as the Hub spells it, or NAME=DIR for a directory"
        case _ if status in (401, 403):
            code, kind, problem = Code.PERMISSION_DENIED, CallerError, f"is refused by {hub}"
            remedy = "set HF_TOKEN to a valid token that may read this model"
        case errors.LocalEntryNotFoundError() if constants.is_offline_mode():
            problem = f"is not in the cache {cache}, and HF_HUB_OFFLINE forbids a download"
            remedy = f"unset HF_HUB_OFFLINE, {elsewhere}"
        case _ if number in (errno.ENOSPC, errno.EDQUOT):
            code, problem = Code.RESOURCE_EXHAUSTED, f"does not fit on the disk of {cache}"
            remedy = f"free space, or set HF_HOME to a directory with more; then {_RETRY}"
        case _ if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            code, kind = Code.FAILED_PRECONDITION, CallerError
            problem = f"cannot be written to {cache}"
            remedy = "set HF_HOME to a directory that this user can write"
    return kind(f"{name} {problem}", code=code, field=FIELD, remedy=remedy)
