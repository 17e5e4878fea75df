"""Read the `adapter_config.json` of a LoRA adapter in `peft`'s format.

`model merge`, named weights and `load_state` share this reader. It applies or refuses every field:
- `_Fields` are applied. Their values decide the rank and the scale of each layer.
- `_IGNORED` fields are metadata, or affect only training and initialization.
- Any other field must be null, false or empty.

Pure. Source: `peft` 0.21, `tuners/lora/config.py` and `tuners/tuners_utils.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

_Number = TypeVar("_Number", int, float)

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_STEM = "adapter_model"
PREFIX = "base_model.model."
"""Prefix of tensor names in an adapter's file."""
_MAX_BYTES = 2**20
_PARTS = (".lora_A.weight", ".lora_B.weight")
_IGNORED = frozenset(
    (
        *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
        *("peft_version", "runtime_config", "lora_dropout"),
        # only read together with megatron_config and use_qalora, which are refused
        *("megatron_core", "qalora_group_size"),
        # parameters of an initialization; init_lora_weights says whether it changed the base
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    )
)
_INITIALIZATIONS = frozenset(("gaussian", "eva", "orthogonal", "mica"))
"""Initializations that leave the base unchanged. An adapter made by any other one (pissa, olora,
corda, loftq, lora_ga) belongs to a base that `peft` has changed in memory."""
_PLAIN_PATTERN = re.compile(r"[\w.\\^$|-]*")
"""Patterns without groups and repetitions: matching one takes time linear in the name's length."""


class _Fields(msgspec.Struct):
    r: int
    lora_alpha: float
    peft_type: str
    bias: str = "none"
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str = True
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str = []
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str = []
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    base_model_name_or_path: str | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """How an adapter changes one layer: W + scale·B·A, with A and B of this rank."""

    rank: int
    alpha: float
    """The scale is `alpha / rank`, whether the config says so or uses rsLoRA."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def __str__(self) -> str:
        return f"rank {self.rank} and alpha {self.alpha:g}"


class AdapterConfig:
    """A config all of whose fields are supported."""

    def __init__(self, text: bytes | str, *, allows_patterns: bool = False) -> None:
        """Parse a config.

        Args:   allows_patterns: whether regular expressions may have groups and repetitions, which
                 can take forever to match. Services must not allow them.
        Raises: ValueError: the text is not such a config, or has a field or value that is not
                supported.
        """
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it must have at most {_MAX_BYTES} bytes, got {len(text)}")
        try:
            raw = msgspec.json.decode(text, type=dict[str, Any])
            # null stands for a field's default
            present = {name: value for name, value in raw.items() if value is not None}
            fields = msgspec.convert(present, _Fields)
        except msgspec.MsgspecError as error:
            raise ValueError(f"it is not a LoRA config: {error}") from None
        for name, value in present.items():
            is_known = name in _Fields.__struct_fields__ or name in _IGNORED
            if not (is_known or value is False or value in ("", [], {})):
                raise _unsupported(name, value)
        self.base_model = fields.base_model_name_or_path
        self._fields = fields
        self._check(allows_patterns=allows_patterns)

    def _check(self, *, allows_patterns: bool) -> None:
        fields = self._fields
        if fields.peft_type != "LORA":
            raise _unsupported("peft_type", fields.peft_type)
        if fields.bias != "none":
            raise _unsupported("bias", fields.bias)
        initialization = fields.init_lora_weights
        if isinstance(initialization, str) and initialization.lower() not in _INITIALIZATIONS:
            raise ValueError(
                f"init_lora_weights is {initialization!r}, which may have changed the base's own "
                "weights; save the adapter with path_initial_model_for_weight_conversion"
            )
        ranks = {"r": fields.r, **fields.rank_pattern}
        for name, rank in ranks.items():
            if rank < 1:
                raise ValueError(f"the rank {name!r} must be at least 1, got {rank}")
        for name, alpha in {"lora_alpha": fields.lora_alpha, **fields.alpha_pattern}.items():
            if not math.isfinite(alpha):
                raise ValueError(f"the alpha {name!r} must be finite, got {alpha}")
        for pattern in self._patterns():
            if not (allows_patterns or _PLAIN_PATTERN.fullmatch(pattern)):
                raise ValueError(
                    f"the pattern {pattern!r} has groups or repetitions, which are supported only "
                    "in `phaseloom model merge`"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the pattern {pattern!r} is invalid: {error}") from None

    def _patterns(self) -> list[str]:
        fields = self._fields
        modules = [m for m in (fields.target_modules, fields.exclude_modules) if isinstance(m, str)]
        names = [*_listed(fields.layers_pattern), *fields.rank_pattern, *fields.alpha_pattern]
        return [*(pattern for pattern in modules if pattern != "all-linear"), *names]

    @property
    def is_transposed(self) -> bool:
        """Whether layers that store their weights as (in, out) were adapted."""
        return self._fields.fan_in_fan_out

    def scaling(self, layer: str) -> Scaling:
        """Return how a layer is adapted.

        Args:   layer: the layer's name in the model.
        Raises: ValueError: the config excludes this layer, although the file has matrices for it.
        """
        fields = self._fields
        if not self._is_target(layer):
            raise ValueError(f"its fields exclude {layer!r}, but the file has matrices for it")
        rank = _by_pattern(fields.rank_pattern, layer, fields.r)
        alpha = _by_pattern(fields.alpha_pattern, layer, fields.lora_alpha)
        return Scaling(rank, alpha * math.sqrt(rank) if fields.use_rslora else alpha)

    def uniform_scaling(self, layers: Iterable[str]) -> Scaling:
        """Return the scaling that all of these layers share.

        Raises: ValueError: they differ, there are none, or the config excludes one.
        """
        scalings = dict.fromkeys(map(self.scaling, sorted(layers)))
        if len(scalings) != 1:
            label = ", ".join(map(str, [*scalings][:3])) or "no layers"
            raise ValueError(f"expected the same rank and alpha in all layers, got {label}")
        return next(iter(scalings))

    def _is_target(self, layer: str) -> bool:
        fields = self._fields
        if _selects(fields.exclude_modules, layer):
            return False
        if fields.target_modules in (None, "all-linear"):
            return True
        if not _selects(fields.target_modules or [], layer):
            return False
        # Exact names and regular expressions select layers on their own.
        indexes = fields.layers_to_transform
        if indexes in (None, []) or isinstance(fields.target_modules, str):
            return True
        if layer in (fields.target_modules or []):
            return True
        number = _layer_number(layer, _listed(fields.layers_pattern))
        return number in ([indexes] if isinstance(indexes, int) else indexes or [])


def adapted_layers(names: Iterable[str]) -> set[str]:
    """Return the layers whose matrices a file has.

    Args:   names: of the file's tensors.
    Raises: ValueError: a tensor does not belong to a pair of matrices.
    """
    all_names = {*names}
    layers = set()
    for name in sorted(all_names):
        part = next((part for part in _PARTS if name.endswith(part)), "")
        layer = name.removesuffix(part)
        if not part or not all_names.issuperset(layer + other for other in _PARTS):
            raise ValueError(f"expected pairs of matrices (lora_A, lora_B), got {name!r}")
        layers.add(layer.removeprefix(PREFIX))
    return layers


def _unsupported(name: str, value: object) -> ValueError:
    return ValueError(f"it has {name} = {value!r}, which is not supported")


def _listed(patterns: list[str] | str) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _by_pattern(patterns: Mapping[str, _Number], layer: str, default: _Number) -> _Number:
    """Return the value of the first pattern that matches the end of a layer's name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _selects(modules: list[str] | str, layer: str) -> bool:
    """Whether a list of names, or a regular expression, selects a layer."""
    if isinstance(modules, str):
        return re.fullmatch(modules, layer) is not None
    return any(layer == module or layer.endswith(f".{module}") for module in modules)


def _layer_number(layer: str, patterns: list[str]) -> int | None:
    """Return the number of the decoder layer that contains a layer.

    Args: patterns: names of the list of decoder layers; empty: any name.
    """
    for pattern in patterns or [r"[^.]*"]:
        prefix = r".*?\." if not patterns else r"(?:^|.*?\.)"
        match = re.match(rf"{prefix}{pattern}\.(\d+)\.", layer)
        if match:
            return int(match.group(1))
    return None
