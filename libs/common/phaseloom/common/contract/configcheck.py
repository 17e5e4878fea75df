"""Check a model's config before anything is allocated for it: types, sizes, depth.

The job API and `phaseloom model add` call this; they have no `transformers`, which checks the rest
when a rank starts. The names cover the supported model types, and common patterns cover the names
that are not listed. Cost: linear in the config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.modelconfig import check_ropes

MAX_DEPTH = 32
MAX_DRAWN_PARAMETERS = 2**36
"""Most parameters of a model with drawn weights. Each rank draws them in its host's memory."""

_WIDTH, _LAYERS, _HEADS, _EXPERTS, _VOCABULARY = 2**18, 2**10, 2**12, 2**16, 2**22
_MAX_POSITIONS = 2**24
_MAX_SIZES: Mapping[str, int] = {
    # transformers makes a dict with an entry for each label.
    **dict.fromkeys(("vocab_size", "num_labels"), _VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "head_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), 8 * _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), _HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), _MAX_POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _EXPERTS),
}
"""Greatest value of each size; the least is 1."""
_OPTIONAL_SIZES = frozenset(
    {"num_key_value_heads", "head_dim", "n_inner", "intermediate_size", "n_ctx"}
    | {"moe_intermediate_size"}
    | {"num_experts", "num_local_experts", "num_experts_per_tok"}
)
"""Sizes that may be null, for the default of the model type."""
_COUNT_PREFIXES = ("num_", "n_")
_COUNT_SUFFIXES = ("_size", "_dim", "_rank", "_layers", "_heads", "_experts", "_window", "_length")
_MAX_COUNT = 2**27

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (
            "auto_map",
            "rope_scaling",
            "rope_parameters",
            "quantization_config",
            "id2label",
            "label2id",
        ),
        ("an object or null", lambda value: value is None or isinstance(value, dict)),
    ),
    **dict.fromkeys(
        ("architectures", "layer_types"),
        ("a list of strings or null", lambda value: value is None or _is_list_of(str, value)),
    ),
    **dict.fromkeys(
        ("model_type", "dtype", "torch_dtype", "hidden_act", "hidden_activation", "rope_type"),
        ("a string or null", lambda value: value is None or isinstance(value, str)),
    ),
    **dict.fromkeys(
        ("tie_word_embeddings", "use_cache", "attention_bias", "mlp_bias"),
        ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    ),
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"),
        (
            "a token id, a list of them, or null",
            lambda value: value is None or _is_list_of(int, [value]) or _is_list_of(int, value),
        ),
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
        ("a number from 0 to 1, or null", lambda value: value is None or _is_fraction(value)),
    ),
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        ("a number from 0 to 1, or null", lambda value: value is None or _is_fraction(value)),
    ),
    **dict.fromkeys(
        ("rope_theta", "initializer_range", "partial_rotary_factor", "factor"),
        (
            "a finite number of at least 0, or null",
            lambda value: value is None or (_is_number(value) and value >= 0),
        ),
    ),
}
"""Field → (the expected value, for people; the check of a value)."""


def check_config(config: dict[str, Any], field: str, *, is_drawn: bool) -> None:
    """Check a model's config.

    Args:   is_drawn: whether the weights are drawn, rather than read from files.
    Raises: CallerError: a value is invalid or too large; `field` names it.
    """
    _check_depth(config, field)
    _check_values(config, field)
    check_ropes(config, field)
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise CallerError(
            f"{kv_heads} key-value heads cannot be shared evenly by {heads} attention heads",
            field=f"{field}.num_key_value_heads",
            remedy="use a divisor of num_attention_heads",
        )
    if is_drawn:
        check_num_parameters(config, MAX_DRAWN_PARAMETERS, "a model with drawn weights has", field)


def check_num_parameters(config: dict[str, Any], limit: int, label: str, field: str) -> None:
    """Refuse a config that surely describes more parameters than a limit.

    Args: label: why this is the limit, for the message.
    """
    embedding, layers = _least_parameters(config)
    if embedding + layers > limit:
        names = ("vocab_size",) if embedding > layers else ("hidden_size", "n_embd")
        raise CallerError(
            f"the config describes at least {embedding + layers} parameters; {label} at most "
            f"{limit}",
            field=f"{field}.{next((name for name in names if name in config), names[0])}",
            remedy="correct the sizes in the config",
        )


def _least_parameters(config: dict[str, Any]) -> tuple[int, int]:
    """Return lower bounds on the parameters of embeddings and of layers, for any model type."""

    def size(*names: str) -> int:
        sizes = (config[name] for name in names if config.get(name))
        size = next(sizes, 1)
        return min(size) if isinstance(size, list) else int(size)

    width, num_layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
    heads = size("num_attention_heads", "n_head") if config.get("head_dim") else 1
    layer = 2 * width * heads * size("head_dim")
    if not any("expert" in name for name in config):
        layer += 2 * width * size("intermediate_size", "n_inner")
    positions = size("n_positions") if config.get("model_type") == "gpt2" else 0
    return width * (size("vocab_size") + positions), num_layers * layer


def _check_depth(config: dict[str, Any], field: str) -> None:
    """Refuse a config nested so deeply that decoding the log might fail."""
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise CallerError(
            f"the config is nested more than {MAX_DEPTH} levels deep",
            field=field,
            remedy="give the config as returned by `config.to_dict()`",
        )


def _check_values(values: dict[str, Any], field: str) -> None:
    for key, value in values.items():
        name = str(key)  # `id2label` may have numbers
        if name in _MAX_SIZES:
            _check_size(name, value, 1, _MAX_SIZES[name], f"{field}.{name}")
        elif name in _KINDS and not _KINDS[name][1](value):
            raise _wrong(name, _KINDS[name][0], value, f"{field}.{name}")
        elif _is_count(name) and type(value) in (int, float, str):
            _check_size(name, value, -1, _MAX_COUNT, f"{field}.{name}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise _wrong(name, "a finite number", value, f"{field}.{name}")
        elif isinstance(value, dict):
            _check_values(value, f"{field}.{name}")


def _check_size(name: str, value: object, least: int, most: int, field: str) -> None:
    if value is None and name in _OPTIONAL_SIZES:
        return
    if isinstance(value, list) and value:  # a size for each layer
        value = max(value, key=lambda size: size if _is_number(size) else math.inf)
    is_whole = _is_number(value) and int(value) == value  # type: ignore[call-overload]
    if not is_whole or not least <= value <= most:  # type: ignore[operator]
        raise _wrong(name, f"a whole number from {least} to {most}", value, field)


def _is_count(name: str) -> bool:
    return name.startswith(_COUNT_PREFIXES) or name.endswith(_COUNT_SUFFIXES)


def _is_number(value: object) -> bool:
    # Comparing, unlike math.isfinite, works for integers of any size.
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -1e300 < value < 1e300  # type: ignore[operator]


def _is_fraction(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def _is_list_of(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )


def _wrong(name: str, expected: str, value: object, field: str) -> CallerError:
    text = repr(value)
    return CallerError(
        f"{name} must be {expected}, got {text if len(text) <= 80 else text[:79] + '…'}",
        field=field,
        remedy="correct it in the model's config",
    )
