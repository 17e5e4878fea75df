"""`phaseloom model merge` adds an adapter to the weights of its base, as a new model directory.

The adapter is a checkpoint of a job, or a directory that `peft` has saved. Files without adapted
weights are copied from the base. Files of weights that are not the model's, such as
`model.fp16.safetensors` or `pytorch_model.bin`, are left out: they would still hold the base.

W + scale·B·A is computed in float32 or better and rounded once. Quantised bases are refused: the
sum would be rounded to the few values that their formats have.

The result equals that of `merge_and_unload()` of `peft` in float32, with one exception: an adapter
on an output head that is tied to the embedding. `peft` changes the embedding as well, so its merged
model differs from base plus adapter. Here the head becomes a separate weight.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from phaseloom.cli.extras import check_installed
from phaseloom.cli.newmodels import new_directory
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.tensors.adapterfiles import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_STEM,
    PREFIX,
    AdapterConfig,
    Scaling,
    adapted_layers,
)
from phaseloom.common.tensors.modelfiles import (
    CONFIG_FILE,
    MODEL_STEM,
    ModelHeaders,
    check_directory,
)
from phaseloom.common.tensors.safetensors import Index, index_name

_PACKAGES = ("torch", "safetensors")
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of an output head that is not tied to the embedding; the second is GPT-NeoX's in files."""
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in)\.weight$")
_FORMAT = {"format": "pt"}


_TRANSPOSED_LAYERS = {
    "gpt2": ("c_attn", "c_proj", "c_fc", "q_attn"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
}
"""Layers that store their weights as (in, out), by model type."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|g_idx|SCB|absmax|quant_map|nested_absmax|quant_state\..*"
    r"|weight_scale(_inv)?|weight_packed|weight_format)$"
)
"""Tensors that only quantised layers have: GPTQ and AWQ, bitsandbytes, fp8, compressed-tensors."""
_IGNORED_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth"),
    *("*.gguf", "*.h5", "*.msgpack", ADAPTER_CONFIG_FILE, "operation.json"),
)
"""Files that are copied only if they hold the model's weights. `operation.json` has the checksums
of a checkpoint's files."""


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
    headers = check_directory(base, "base")
    _check_not_quantised(base, headers)
    config = _read_config(adapter)
    with new_directory(directory) as partial:
        _merge(base, headers, adapter, config, partial)
    (console or Console()).print(f"wrote {directory}", soft_wrap=True, markup=False)


def _check_not_quantised(base: Path, headers: ModelHeaders) -> None:
    """Raises: CallerError: FAILED_PRECONDITION: some weights of the base are quantised."""
    problem = ""
    for entry in headers.entries:
        is_narrow = "float" in entry.dtype and entry.dtype not in _FLOATS
        is_integer = "int" in entry.dtype and re.search(r"(weight|_blocks|_scales)$", entry.name)
        if is_narrow or is_integer or _QUANTISED.search(entry.name):
            problem = f"{entry.name} has the dtype {entry.dtype}"
            break
    for config in (headers.config, headers.config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(config, dict) and config.get(key):
                problem = f"{CONFIG_FILE} has {key}"
    if problem:
        raise CallerError(
            f"{base} is quantised: {problem}",
            code=Code.FAILED_PRECONDITION,
            field="base",
            remedy="name the directory of the same model in float32, bfloat16 or float16",
        )


def _read_config(adapter: Path) -> AdapterConfig:
    path = adapter / ADAPTER_CONFIG_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CallerError(
            f"{path} cannot be read: {error}",
            field="adapter",
            remedy="name a directory with adapter_config.json and adapter_model.safetensors",
        ) from error
    try:
        return AdapterConfig(content, allows_patterns=True)
    except ValueError as error:
        raise CallerError(
            f"{path} cannot be applied: {error}",
            code=Code.FAILED_PRECONDITION,
            field="adapter",
            remedy="merge it with peft",
        ) from error


def _merge(
    base: Path, headers: ModelHeaders, adapter: Path, config: AdapterConfig, directory: Path
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    try:
        pairs = _pairs_by_weight(load_file(adapter / f"{ADAPTER_STEM}.safetensors"), config)
    except (OSError, SafetensorError) as error:
        raise CallerError(
            f"the adapter's weights cannot be read: {error}",
            field="adapter",
            remedy="put a complete adapter_model.safetensors next to adapter_config.json",
        ) from error
    stored = {entry.name for entry in headers.entries}
    remaining = {_stored_name(name, stored): pair for name, pair in pairs.items()}
    files = [directory / name for name in headers.weights.names]
    try:
        shutil.copytree(base, directory, ignore=shutil.ignore_patterns(*_IGNORED_FILES))
        for name in filter(None, [headers.weights.index, *headers.weights.names]):
            shutil.copy(base / name, directory / name)
        if not remaining.keys().isdisjoint(_HEADS):
            _untie(directory, headers.config, files)
        for file in files:
            tensors = load_file(file)
            adapted = [name for name in tensors if name in remaining]
            for name in adapted:
                pair = remaining.pop(name)
                tensors[name] = _merged_weight(name, tensors[name], pair, headers.config)
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


def _stored_name(name: str, stored: set[str]) -> str:
    """Return a weight's name in files with these names; the name itself if they lack it.

    Files may lack the first part of the names in memory, as GPT-2's on the hub do.
    """
    candidates = [name, name.partition(".")[2], *(_HEADS if name in _HEADS else ())]
    return next((candidate for candidate in candidates if candidate in stored), name)


def _untie(directory: Path, config: dict[str, Any], all_files: list[Path]) -> None:
    """Give a model's output head a weight of its own if it is tied to the embedding.

    If the config does not say whether the two are tied, they count as tied unless the files contain
    both.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    files: dict[str, Path] = {}
    for file in all_files:
        with safe_open(file, framework="pt") as opened:
            stored = [*opened.keys()]
        names = [name for name in stored if name in _HEADS or _EMBEDDING.search(name)]
        files |= dict.fromkeys(names, file)
    head = next((name for name in _HEADS if name in files), _HEADS[0])
    embedding = next(iter(files.keys() - {head}), "model.embed_tokens.weight")
    if not files or not config.get("tie_word_embeddings", len(files) == 1):
        return
    source, missing = (embedding, head) if embedding in files else (head, embedding)
    file = files.get(missing, files[source])
    tensors, weight = load_file(file), load_file(files[source])[source]
    tensors[missing] = weight.clone()  # safetensors refuses tensors that share memory
    save_file(tensors, file, _FORMAT)
    _write_json(directory / CONFIG_FILE, {**config, "tie_word_embeddings": False})
    index = directory / index_name(MODEL_STEM)
    if index.exists() and missing not in files:
        index_content = msgspec.json.decode(index.read_bytes(), type=Index)
        index_content.weight_map[missing] = file.name
        for name, increase in (("total_size", weight.nbytes), ("total_parameters", weight.numel())):
            if name in index_content.metadata:
                index_content.metadata[name] += increase
        _write_json(index, index_content)


def _write_json(path: Path, content: Index | dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


@dataclass(frozen=True, slots=True)
class _Pair:
    """The low-rank matrices of a layer."""

    a: Any
    b: Any
    scaling: Scaling


def _pairs_by_weight(matrices: dict[str, Any], config: AdapterConfig) -> dict[str, _Pair]:
    """Map the name of each adapted weight of the base to its low-rank matrices.

    Raises: CallerError: a tensor of the adapter does not belong to such a pair, or the config
            excludes its layer.
    """
    try:
        layers = adapted_layers(matrices)
        if not layers:
            raise ValueError("it has no matrices")
        scalings = {layer: config.scaling(layer) for layer in layers}
        names = {layer: (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") for layer in scalings}
        plain = {name.removeprefix(PREFIX): tensor for name, tensor in matrices.items()}
        for name, tensor in plain.items():
            if str(tensor.dtype).removeprefix("torch.") not in _FLOATS:
                raise ValueError(f"{name} has the dtype {tensor.dtype}")
    except ValueError as error:
        raise CallerError(
            f"adapter_model.safetensors cannot be applied: {error}",
            code=Code.FAILED_PRECONDITION,
            field="adapter",
            remedy="merge it with peft",
        ) from error
    return {
        f"{layer}.weight": _Pair(plain[a], plain[b], scalings[layer])
        for layer, (a, b) in names.items()
    }


def _merged_weight(name: str, weight: Any, pair: _Pair, config: dict[str, Any]) -> Any:
    """Return W + scale·B·A, rounded once to the dtype of the base."""
    import torch

    a, b, rank = pair.a, pair.b, pair.scaling.rank
    if (a.shape[0], b.shape[1]) != (rank, rank):
        raise CallerError(
            f"expected matrices of rank {rank} (adapter_config.json) on {name}, got "
            f"{tuple(b.shape)} and {tuple(a.shape)}",
            code=Code.FAILED_PRECONDITION,
            field="adapter",
            remedy="put both files of the same adapter into its directory",
        )
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    delta = (b.to(wide) @ a.to(wide)) * pair.scaling.scale
    if name.split(".")[-2] in _TRANSPOSED_LAYERS.get(str(config.get("model_type")), ()):
        delta = delta.T
    if weight.shape != delta.shape:
        raise CallerError(
            f"the adapter's matrices {tuple(b.shape)} and {tuple(a.shape)} do not fit {name} of "
            f"shape {tuple(weight.shape)} in the base",
            code=Code.FAILED_PRECONDITION,
            field="base",
            remedy="name the directory of the model that the adapter was trained on",
        )
    return (weight.to(wide) + delta).to(weight.dtype).contiguous()
