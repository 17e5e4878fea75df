"""The names that `transformers` gives a model's tensors in files, and those that it accepts.

No architecture has rules here. The names that `transformers` writes, and what it splits, follow
from its own conversion of tensors without content: each tensor of files comes out as a view of a
parameter. Its conversion of names tells which tensor a file means by an older or shorter name.
Source: `transformers` 5.19, `core_model_loading.py`; tests compare both directions for every type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.state_layout import Places, StoredTensor
from phaseloom.worker.backends.filetensors import FileTensor, ParameterShapes

_DERIVED = (
    r"(^|\.)rotary_emb\.\w+$",
    r"(^|\.)position_ids$",
    r"(^|\.)(self_)?(attn|attention)\.(masked_)?bias$",
)
"""Patterns of buffers in old files, which models compute themselves."""


class ModelNames:
    """The tensors of files of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Args: model: may be without content."""
        self.shapes = saved_shapes(model)
        """The parameters, and the tensors that they are saved as."""
        transforms = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
        self._prefix = f"{model.base_model_prefix}."
        untyped_model: Any = model
        # Only names without a parameter are ignored, as `transformers` does.
        ignored = untyped_model._keys_to_ignore_on_load_unexpected or ()
        self._ignored = re.compile("|".join(f"({pattern})" for pattern in (*ignored, *_DERIVED)))
        self._targets: dict[str, list[tuple[str, StoredTensor]]] = {}
        """Name after renaming → pairs of a saved tensor's name, and where it is under that name."""
        first_names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parts = self.shapes.parts_of(first_names.setdefault(id(parameter), name))
            shape = [*parameter.shape]
            self._targets[name] = [
                (part.name, StoredTensor("", shape, part.first)) for part in parts
            ]
            for part in parts if first_names[id(parameter)] == name else ():
                own = [(part.name, StoredTensor("", part.shape, 0))]
                self._targets.setdefault(self._renamed(part.name), own)

    def locate(self, names: Iterable[str]) -> Places:
        """Find the saved tensors in files that contain tensors of these names.

        Raises: ValueError: the files lack a tensor, or have one that matches no parameter.
        """
        places: Places = {}
        unmatched = []
        for name in sorted(names):
            targets = self._match(name)
            if not targets and not self._ignored.search(name):
                unmatched.append(name)
            for saved_name, place in targets:
                stored = StoredTensor(name, place.shape, place.first)
                places.setdefault(saved_name, []).append(stored)
        if missing := sorted(self.shapes.files.keys() - places.keys()):
            raise ValueError(f"its files lack {_listed(missing)}")
        if unmatched:
            raise ValueError(
                f"its files contain {_listed(unmatched)}, which the architecture lacks"
            )
        return places

    def _match(self, name: str) -> list[tuple[str, StoredTensor]]:
        for known in (self._renamed(name), name):
            short = known.removeprefix(self._prefix)
            for candidate in (known, self._prefix + known, short):
                if candidate in self._targets:
                    return self._targets[candidate]
        return []

    def _renamed(self, name: str) -> str:
        return rename_source_key(name, self._renamings, [])[0]


class _Views(TorchFunctionMode):
    """Makes `transformers` split tensors without copying them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def saved_shapes(model: PreTrainedModel) -> ParameterShapes:
    """Return the shapes of a model's parameters and of the tensors that they are saved as.

    Raises: CallerError: a tensor of files is not a contiguous run of a parameter.
    """
    tensors = {
        name: torch.empty(parameter.shape, device="meta")
        for name, parameter in model.named_parameters()
    }
    with _Views():
        saved = revert_weight_conversion(model, dict(tensors))
    names = {id(tensor): name for name, tensor in tensors.items()}
    parts: dict[str, list[FileTensor]] = {name: [] for name in tensors}
    for name, view in saved.items():
        whole = view if id(view) in names else view._base
        if id(whole) not in names or not view.is_contiguous():
            raise _not_a_run(name)
        part = FileTensor(name, [*view.shape], view.storage_offset())
        parts[names[id(whole)]].append(part)
    for name, tensor in tensors.items():
        parts[name].sort(key=lambda part: part.first)
        if sum(prod(part.shape) for part in parts[name]) != tensor.numel():
            raise _not_a_run(name)
    changed = {name: each for name, each in parts.items() if [part.name for part in each] != [name]}
    return ParameterShapes({name: tensor.shape for name, tensor in tensors.items()}, changed)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _not_a_run(name: str) -> CallerError:
    return CallerError(
        f"{name} is saved in a form that is not supported: not as one run of a parameter",
        field="model.config.model_type",
        remedy="use a model of another type",
    )
