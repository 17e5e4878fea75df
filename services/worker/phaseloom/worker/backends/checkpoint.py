"""A deployment's whole state as safetensors files.

`model.safetensors` and `config.json` are what `transformers` loads; `training.safetensors` holds
gradients (`<parameter>.grad`), AdamW's moments and its step, where the deployment is trainable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from phaseloom.common.errors import CallerError, Code, ResourceError
from phaseloom.common.statewire import TensorSlot
from phaseloom.worker.backends.layout import Layout
from phaseloom.worker.backends.model import HeapTensors

WEIGHTS_FILE = "model.safetensors"
TRAINING_FILE = "training.safetensors"
CONFIG_FILE = "config.json"


def save(directory: Path, config: PreTrainedConfig, layout: Layout, tensors: HeapTensors) -> None:
    """Write into an existing directory. Raises: OSError."""
    weights = tensors.views(layout.weights)
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True))
    if layout.training:
        state = {slot.name: tensors.view(slot) for slot in layout.training.slots}
        save_file(state, directory / TRAINING_FILE)


def load(directory: Path, layout: Layout, tensors: HeapTensors) -> None:
    """Replace the whole state; a weights-only checkpoint starts training state afresh.

    Raises: CallerError: a checkpoint of another model, or none; the state is untouched.
            ResourceError: DATA_LOSS, a file that cannot be read; the state may be half replaced.
    """
    weights = directory / WEIGHTS_FILE
    training = directory / TRAINING_FILE
    training_slots = {slot.name: slot for slot in layout.training.slots} if layout.training else {}
    if not weights.is_file():
        raise CallerError(
            "there is no such checkpoint",
            code=Code.NOT_FOUND,
            field="args.name",
            remedy="name one that save_state has written",
        )
    try:
        _check_fits(weights, layout.weights.slots)
        if training_slots and training.is_file():
            _check_fits(training, training_slots)
        _copy_in(weights, layout.weights.slots, tensors)
        if training_slots and training.is_file():
            _copy_in(training, training_slots, tensors)
        else:
            for slot in training_slots.values():
                tensors.view(slot).zero_()
    except (SafetensorError, OSError) as error:
        raise ResourceError(
            f"the checkpoint cannot be read: {error}", code=Code.DATA_LOSS, field="args.name"
        ) from error


def _check_fits(path: Path, slots: Mapping[str, TensorSlot]) -> None:
    with safe_open(path, framework="pt") as file:
        stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    expected = {name: list(slot.shape) for name, slot in slots.items()}
    if stored != expected:
        names = sorted(stored.keys() | expected.keys())
        differing = [name for name in names if stored.get(name) != expected.get(name)]
        raise CallerError(
            f"{path.name} is of another model: {len(differing)} tensors, first {differing[0]}",
            code=Code.FAILED_PRECONDITION,
            field="args.name",
            remedy="load a checkpoint of the same architecture",
        )


def _copy_in(path: Path, slots: Mapping[str, TensorSlot], tensors: HeapTensors) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, slot in slots.items():
            tensors.view(slot).copy_(file.get_tensor(name))
