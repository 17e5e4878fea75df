"""A deployment's whole state as safetensors files.

`model.safetensors` and `config.json` are what `transformers` loads; `training.safetensors` holds
gradients (`<parameter>.grad`), AdamW's moments and its step, where the deployment is trainable.
Tensors are whole whatever layout wrote them; a rank reads its rows only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from phaseloom.common.errors import CallerError, Code, ResourceError
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import Region, shard
from phaseloom.worker.backends.model import HeapTensors

WEIGHTS_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
CONFIG_FILE = "config.json"


Tensors = Mapping[str, torch.Tensor]


def save(directory: Path, config: PreTrainedConfig, weights: Tensors, training: Tensors) -> None:
    """Write whole tensors into an existing directory; no `training` if it is empty.

    Raises: ResourceError: it cannot be written.
    """
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True)
    try:
        save_file(dict(weights), directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(text)
        if training:
            save_file(dict(training), directory / TRAINING_FILE)
    except (SafetensorError, OSError) as error:
        raise ResourceError(f"the checkpoint cannot be written: {error}") from error


@dataclass(frozen=True)
class Target:
    """Where a tensor of a checkpoint goes: some of its rows, into a view of a heap."""

    shape: list[int]
    """Of the whole tensor."""
    rows: range
    view: torch.Tensor


def targets(
    region: Region, tensors: HeapTensors, shapes: Mapping[str, list[int]], ranks: RankGroup
) -> dict[str, Target]:
    """Args: shapes: of the whole parameters."""
    return {
        slot.name: Target(shapes[name], shard(shapes[name], ranks).rows, tensors.view(slot))
        for name, slot in region.slots.items()
    }


def load(directory: Path, weights: Mapping[str, Target], training: Mapping[str, Target]) -> None:
    """Replace the whole state; a weights-only checkpoint starts training state afresh.

    Raises: CallerError: a checkpoint of another model, or none; the state is untouched.
            ResourceError: DATA_LOSS, a file that cannot be read; the state may be half replaced.
    """
    file = directory / WEIGHTS_FILE
    training_file = directory / TRAINING_FILE
    if not file.is_file():
        raise CallerError(
            "there is no such checkpoint",
            code=Code.NOT_FOUND,
            field="args.name",
            remedy="name one that save_state has written",
        )
    try:
        _check_fits(file, weights)
        if training and training_file.is_file():
            _check_fits(training_file, training)
        _copy_in(file, weights)
        if training and training_file.is_file():
            _copy_in(training_file, training)
        else:
            for target in training.values():
                target.view.zero_()
    except (SafetensorError, OSError) as error:
        raise ResourceError(
            f"the checkpoint cannot be read: {error}", code=Code.DATA_LOSS, field="args.name"
        ) from error


def _check_fits(path: Path, targets: Mapping[str, Target]) -> None:
    with safe_open(path, framework="pt") as file:
        stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = {name: target.shape for name, target in targets.items()}
    if stored != expected:
        names = sorted(stored.keys() | expected.keys())
        differing = [name for name in names if stored.get(name) != expected.get(name)]
        raise CallerError(
            f"{path.name} is of another model: {len(differing)} tensors, first {differing[0]}",
            code=Code.FAILED_PRECONDITION,
            field="args.name",
            remedy="load a checkpoint of the same architecture",
        )


def _copy_in(path: Path, targets: Mapping[str, Target]) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, target in targets.items():
            if target.shape:
                rows = file.get_slice(name)[target.rows.start : target.rows.stop]
            else:
                rows = file.get_tensor(name)
            target.view.copy_(rows)
