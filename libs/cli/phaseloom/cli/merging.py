"""`phaseloom model merge` adds an adapter to the weights of its base, as a new model directory.

The adapter is a checkpoint of a job, or a directory that `peft` has saved. Files without adapted
weights are copied from the base.

The result equals that of `merge_and_unload()` of `peft`, with one exception: an adapter on an
output head that is tied to the embedding. `peft` changes the embedding as well, so its merged model
differs from base plus adapter. Here the head becomes a separate weight.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from phaseloom.cli.extras import check_installed
from phaseloom.cli.newmodels import new_directory
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.tensors.modelfiles import CONFIG_FILE, check_directory
from phaseloom.common.tensors.safetensors import Index, index_name

_PACKAGES = ("torch", "safetensors")
_PREFIX = "base_model.model."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FORMAT = {"format": "pt"}


class _Config(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that affect a merge."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    bias: str = "none"
    use_dora: bool = False
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None


def merge(base: Path, adapter: Path, directory: Path, *, console: Console | None = None) -> None:
    """Merge a base model and an adapter into one model directory.

    Parameters
    ----------
    base
        Directory of the model that the adapter was trained on.
    adapter
        Directory of the adapter: a checkpoint of a job, or a directory that peft has saved.
    directory
        Directory to create.
    """
    check_installed("merging", _PACKAGES, "worker")
    check_directory(base, "base")
    with new_directory(directory) as partial:
        _merge(base, adapter, _read_config(adapter), partial)
    (console or Console()).print(f"wrote {directory}", soft_wrap=True, markup=False)


def _read_config(adapter: Path) -> _Config:
    path = adapter / "adapter_config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise CallerError(
            f"{path} cannot be read: {error}",
            field="adapter",
            remedy="name a directory with adapter_config.json and adapter_model.safetensors",
        ) from error
    plain = _Config(config.r, config.lora_alpha)
    normalised = msgspec.structs.replace(config, modules_to_save=config.modules_to_save or None)
    fields = _Config.__struct_fields__
    bad = [name for name in fields if getattr(normalised, name) != getattr(plain, name)]
    if bad or config.r < 1:
        raise CallerError(
            f"{path} has {', '.join(bad) or 'r'} = {getattr(config, (bad or ['r'])[0])!r}, which "
            "this command does not support",
            code=Code.FAILED_PRECONDITION,
            field="adapter",
            remedy="merge it with peft",
        )
    return config


def _merge(base: Path, adapter: Path, config: _Config, directory: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    try:
        remaining = _pairs_by_weight(load_file(adapter / "adapter_model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise CallerError(
            f"the adapter's weights cannot be read: {error}",
            field="adapter",
            remedy="put a complete adapter_model.safetensors next to adapter_config.json",
        ) from error
    try:
        shutil.copytree(base, directory)
        if _HEAD in remaining:
            _untie(directory)
        for file in sorted(directory.glob("*.safetensors")):
            tensors = load_file(file)
            adapted = [name for name in tensors if name in remaining]
            for name in adapted:
                tensors[name] = _merged_weight(name, tensors[name], *remaining.pop(name), config)
            if adapted:
                save_file(tensors, file, _FORMAT)
    except (OSError, SafetensorError) as error:
        raise CallerError(
            f"the merged weights cannot be written: {error}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="name a directory that you may create, on a disk with room for another model",
        ) from error
    if remaining:
        raise CallerError(
            f"the adapter changes {min(remaining)!r}, which the base does not have",
            code=Code.FAILED_PRECONDITION,
            field="base",
            remedy="name the directory of the model that the adapter was trained on",
        )


def _untie(directory: Path) -> None:
    """Give a model's output head a weight of its own if it is tied to the embedding.

    If the config does not say whether the two are tied, they count as tied unless the files contain
    both.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    files: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys({*opened.keys()} & {_HEAD, _EMBEDDING}, file)
    path = directory / CONFIG_FILE
    config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    if not files or not config.get("tie_word_embeddings", len(files) == 1):
        return
    source, missing = (_EMBEDDING, _HEAD) if _EMBEDDING in files else (_HEAD, _EMBEDDING)
    file = files.get(missing, files[source])
    tensors, weight = load_file(file), load_file(files[source])[source]
    tensors[missing] = weight.clone()  # safetensors refuses tensors that share memory
    save_file(tensors, file, _FORMAT)
    _write_json(path, {**config, "tie_word_embeddings": False})
    index = directory / index_name("model")
    if index.exists() and missing not in files:
        index_content = msgspec.json.decode(index.read_bytes(), type=Index)
        index_content.weight_map[missing] = file.name
        for name, increase in (("total_size", weight.nbytes), ("total_parameters", weight.numel())):
            if name in index_content.metadata:
                index_content.metadata[name] += increase
        _write_json(index, index_content)


def _write_json(path: Path, content: Index | dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _pairs_by_weight(matrices: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Map the name of each adapted weight of the base to its low-rank matrices (A, B).

    Raises: CallerError: a tensor of the adapter does not belong to such a pair.
    """
    pairs: dict[str, tuple[Any, Any]] = {}
    unpaired = set(matrices)
    for name in sorted(matrices):
        layer, _, _ = name.rpartition(".lora_A.weight")
        b_name = f"{layer}.lora_B.weight"
        if layer and b_name in matrices:
            pairs[f"{layer.removeprefix(_PREFIX)}.weight"] = matrices[name], matrices[b_name]
            unpaired -= {name, b_name}
    if unpaired or not pairs:
        raise CallerError(
            "expected pairs of low-rank matrices (lora_A, lora_B) in adapter_model.safetensors, "
            f"got {min(unpaired, default='nothing')!r}",
            code=Code.FAILED_PRECONDITION,
            field="adapter",
            remedy="merge it with peft",
        )
    return pairs


def _merged_weight(name: str, weight: Any, a: Any, b: Any, config: _Config) -> Any:
    """Return W + (alpha / r)·B·A, rounded once to the dtype of the base."""
    if (a.shape[0], b.shape[1]) != (config.r, config.r):
        raise CallerError(
            f"expected matrices of rank {config.r} (adapter_config.json) on {name}, got "
            f"{tuple(b.shape)} and {tuple(a.shape)}",
            code=Code.FAILED_PRECONDITION,
            field="adapter",
            remedy="put both files of the same adapter into its directory",
        )
    if tuple(weight.shape) != (b.shape[0], a.shape[1]):
        raise CallerError(
            f"the adapter's matrices {tuple(b.shape)} and {tuple(a.shape)} do not fit {name} of "
            f"shape {tuple(weight.shape)} in the base",
            code=Code.FAILED_PRECONDITION,
            field="base",
            remedy="name the directory of the model that the adapter was trained on",
        )
    delta = (b @ a) * (config.lora_alpha / config.r)
    return (weight + delta).to(weight.dtype).contiguous()
