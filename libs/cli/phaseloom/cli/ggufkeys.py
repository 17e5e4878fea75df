"""Checks that a converted model has everything that its GGUF file says.

`transformers` drops keys and tensors that it does not know, for example the scaling of rotary
positions. Here every tensor and every key is used, or is a reason to refuse the file:
- Keys that only describe the file (`_DESCRIPTIVE`) are ignored.
- Keys of the tokenizer that `transformers` reads, and the beginning and end of sequences, are used.
- Keys of the architecture must agree with the converted config. If they do not, the config is
  corrected, unless that changes a shape.

Source: the constants of the package `gguf`, and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_DESCRIPTIVE = re.compile(
    r"(GGUF|general|quantize|imatrix)\..*|split\.(no|tensors\.count)"
    r"|tokenizer\.chat_templates?(\..*)?|tokenizer\.ggml\.(token_type_count"
    r"|(fim_\w+|prefix|suffix|middle|mask|cls|seperator|eot|eom)_token_id)"
)
"""Keys that describe the file, or name tokens that have no part in the conversion. The end tokens
`eot` and `eom` are used by `end_tokens`."""
_TOKENIZER = re.compile(
    r"tokenizer\.ggml\.(model|pre|tokens|scores|token_type|merges|precompiled_charsmap"
    r"|(bos|eos|unknown|padding)_token_id|add_space_prefix|add_(bos|eos)_token)"
)
_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        *("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    ),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""Attributes of a config that have the value of a key; the first one that the config has counts."""
_CORRECTED = (
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "embedding_scale"),
    *("residual_scale", "attention.scale", "attention.sliding_window", "expert_weights_norm"),
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "context_length"),
)
"""Keys whose attribute may be set: it changes no shape."""
_INERT: Mapping[str, object] = {
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "rope.scaling.finetuned": None,  # any value
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "expert_weights_scale": 1.0,
    "split.count": 1,
}
"""Keys that change nothing if they have this value."""
_ROPE_FREQUENCIES = "rope_freqs.weight"


def unused_keys(values: Mapping[str, Any], config: Any, frequencies: Any) -> list[str]:
    """Correct a config by the keys of its file.

    Args:    values: the value of each key; arrays of more than one value as lists.
             config: what `transformers` read from the file.
             frequencies: the tensor `rope_freqs.weight`; None: the file has none.
    Returns: the keys, or the name of that tensor, whose meaning the config cannot express.
    """
    prefix = f"{values['general.architecture']}."
    named = {key.removeprefix(prefix): value for key, value in values.items()}
    unused = [
        key
        for key, value in named.items()
        if not (_DESCRIPTIVE.fullmatch(key) or _TOKENIZER.fullmatch(key))
        and not key.startswith("rope.")
        and not _agrees(key, value, config)
    ]
    if getattr(config, "model_type", "") == "mistral" and "attention.sliding_window" not in named:
        config.sliding_window = None  # transformers' own default is a window of 4096
    if getattr(config, "query_pre_attn_scalar", None) is not None:
        config.query_pre_attn_scalar = _query_scalar(config)
    return unused + _unused_rope(named, config, frequencies)


def _agrees(key: str, value: Any, config: Any) -> bool:
    """Whether the config has the value of a key, or has been given it."""
    if key in _INERT:
        return _INERT[key] is None or _same(value, _INERT[key])
    if key in ("attention.key_length", "attention.value_length"):
        return _same(value, _head_dim(config))
    name = next((name for name in _ATTRIBUTES.get(key, ()) if hasattr(config, name)), "")
    if name and _same(value, getattr(config, name)):
        return True
    can_correct = bool(name) and key in _CORRECTED and isinstance(value, int | float)
    if key == "attention.sliding_window" and isinstance(value, int):
        if value >= config.max_position_embeddings:
            return True
        # With layer types, a window alone does not say which layers it is for.
        can_correct = can_correct and not getattr(config, "layer_types", None)
    if can_correct:
        setattr(config, name, value)
    return can_correct


def _unused_rope(named: Mapping[str, Any], config: Any, frequencies: Any) -> list[str]:
    """As `unused_keys`, for rotary positions."""
    keys = {key.removeprefix("rope."): key for key in named if key.startswith("rope.")}
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return [*keys.values(), *([] if frequencies is None else [_ROPE_FREQUENCIES])]
    is_nested = any(isinstance(value, dict) for value in rope.values())
    theta = named.get("rope.freq_base", 10_000.0)
    kind = named.get("rope.scaling.type", "none")
    rotated = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    used = {"freq_base", "scaling.type"}
    used |= {key for key in keys if _agrees(f"rope.{key}", named[f"rope.{key}"], config)}
    if "dimension_count" in keys and named["rope.dimension_count"] == rotated:
        used.add("dimension_count")
    if is_nested:
        thetas = [each.get("rope_theta") for each in rope.values() if isinstance(each, dict)]
        if not any(_same(theta, each) for each in thetas):
            used.discard("freq_base")
    scaling: dict[str, Any] | None = {"rope_type": "default"}
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": named.get("rope.scaling.factor")}
        options = {"scaling.original_context_length": "original_max_position_embeddings"}
        if kind == "yarn":
            options |= {
                "scaling.yarn_beta_fast": "beta_fast",
                "scaling.yarn_beta_slow": "beta_slow",
            }
        scaling |= {options[key]: named[keys[key]] for key in keys if key in options}
        used |= {"scaling.factor", *options}
    if kind not in ("none", "linear", "yarn") or (is_nested and kind != "none"):
        used.discard("scaling.type")
    unused = [key for name, key in keys.items() if name not in used]
    if frequencies is not None:
        scaling = None if is_nested or kind != "none" else _llama3(frequencies, config, theta)
        if scaling is None:
            return [*unused, _ROPE_FREQUENCIES]
    if not is_nested:
        partial = {k: v for k, v in rope.items() if k == "partial_rotary_factor"}
        config.rope_parameters = {"rope_theta": theta, **partial, **(scaling or {})}
    return unused


def _query_scalar(config: Any) -> int:
    """Return the scale of Gemma's queries as llama.cpp derives it: files do not state it."""
    if (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62)):
        return int(config.hidden_size // config.num_attention_heads)  # the models of 27 B
    return _head_dim(config)


def _llama3(frequencies: Any, config: Any, theta: float) -> dict[str, Any] | None:
    """Return the parameters of Llama 3.1's scaling that give these divisors of frequencies.

    The file has the divisors only. Llama's own low and high factors are assumed, and the original
    context is a power of 2 that reproduces every divisor. Returns: None: none does.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dim = _head_dim(config)
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    for exponent in range(5, 21):
        rope = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": round(float(frequencies.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**exponent,
        }
        config.rope_parameters = rope
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        divisors = plain / scaled
        is_same_shape = divisors.shape == frequencies.shape
        if is_same_shape and torch.allclose(divisors, frequencies, rtol=1e-5, atol=0.0):
            return rope
    return None


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, bool | str) or isinstance(expected, bool | str):
        return bool(value == expected)
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        return False
    return math.isclose(value, expected, rel_tol=1e-6)


def unused_tensors(names: list[str], model: Any, architecture: str) -> list[str]:
    """Return a file's tensors that `transformers` ignores when it loads a model."""
    from transformers import modeling_gguf_pytorch_utils as ggufs

    # an untyped module of transformers
    untyped: Any = ggufs
    processor = untyped.TENSOR_PROCESSORS.get(architecture, untyped.TensorProcessor)(
        config=model.config.to_dict()
    )
    mapped = {*untyped.get_gguf_hf_weights_map(model, processor), _ROPE_FREQUENCIES}
    if model.get_output_embeddings() is not None:
        mapped.add("output.weight")
    return [name for name in names if not {name, name.removesuffix(".weight")} & mapped]


def end_tokens(values: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: of the text, of a turn, of a message."""
    kinds = [values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return [*dict.fromkeys(token for token in kinds if token is not None)]


def add_special_tokens(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Make a tokenizer add the tokens that begin and end a text if, and only if, the file says so.

    Everything else stays as `transformers` chose it.
    """
    from tokenizers.processors import TemplateProcessing

    plain = tokenizer("a", add_special_tokens=False).input_ids
    ids = tokenizer("a").input_ids
    adds = {"bos": ids[: -len(plain)] != [], "eos": ids[-1:] == [tokenizer.eos_token_id]}
    wanted = {kind: values.get(f"tokenizer.ggml.add_{kind}_token", adds[kind]) for kind in adds}
    if wanted == adds:
        return
    tokens = {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token}
    parts = {kind: f"{tokens[kind]} " if wanted[kind] and tokens[kind] else "" for kind in tokens}
    used = [token for kind, token in tokens.items() if parts[kind]]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{parts['bos']}$A {parts['eos']}".strip(),
        pair=f"{parts['bos']}$A {parts['bos']}$B:1 {parts['eos']}".strip(),
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in used],
    )
