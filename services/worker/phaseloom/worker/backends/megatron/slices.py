"""The slices of a model's tensors that a Megatron rank holds, and how they form its parameters.

Tensors have the names and shapes of Hugging Face's files, so versions, seals and checkpoints fit
every other backend. Tensor parallelism splits attention heads, the rows of the MLP's first
matrices, the columns of the matrices that follow, and the vocabulary. Pipeline parallelism splits
layers. If there are more ranks than key-value heads, several ranks hold the same head. Expert
parallelism spreads whole experts over all ranks of a stage; `tp` does not split experts.

A fused parameter of Megatron's concatenates slices of several tensors: queries, keys, values; or
gate, up. Megatron would interleave the rows of queries and keys. Here each slice stays one
contiguous run, and `stage.Attention` reads it that way. The vocabulary is padded to a multiple of
the number of ranks. Padding rows are zero and belong to no tensor. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import Adapter, Layout
from phaseloom.common.tensors.layouts import Coordinates
from phaseloom.worker.backends.capabilities import CAPABILITIES
from phaseloom.worker.backends.layout import Shard
from phaseloom.worker.backends.lora.targets import is_target
from phaseloom.worker.state.heap import ALIGNMENT_BYTES

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT: Final = "output_layer.weight"
"""Megatron's names of the two parameters that are equal if embeddings are tied."""

_EXPERTS: Final = ".mlp.experts."
_SMALLEST_ITEM_BYTES: Final = 2


@dataclass(frozen=True)
class Experts:
    """The experts of each layer."""

    num: int
    intermediate: int
    per_token: int
    is_normalized: bool
    """Whether the weights of a token's experts sum to 1."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine a model's parameters and their shapes."""

    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    """Dimensions of an attention head."""
    vocab: int
    is_tied: bool
    """Whether the output head is the embedding."""
    has_qkv_bias: bool
    has_qk_norm: bool
    experts: Experts | None = None
    """None if each layer has a plain MLP."""

    def groups(self, tp: int) -> int:
        """Return the number of key-value heads across all ranks, counting a repeated head each
        time: at least `tp`."""
        return max(self.kv_heads, tp)

    def padded_vocab(self, tp: int) -> int:
        return -(-self.vocab // tp) * tp


def sizes_of(config: Any) -> Sizes:
    """Return a model's sizes. Raises: CallerError: names the config field that is not supported."""
    model_types = CAPABILITIES["megatron"].model_types
    if config.model_type not in model_types:
        raise _unsupported(
            f"model type {config.model_type!r}",
            "model_type",
            f"use the backend 'fsdp', or a model type of {', '.join(model_types)}",
        )
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise _unsupported(f"{name} = true", name, "use the backend 'fsdp'")
    if config.hidden_act not in {"silu", "swish"}:
        raise _unsupported(f"hidden_act = {config.hidden_act!r}", "hidden_act", "use 'silu'")
    heads = int(config.num_attention_heads)
    experts = _experts_of(config) if config.model_type == "qwen3_moe" else None
    return Sizes(
        num_layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab=int(config.vocab_size),
        is_tied=bool(config.tie_word_embeddings),
        has_qkv_bias=config.model_type == "qwen2",
        has_qk_norm=config.model_type in {"qwen3", "qwen3_moe"},
        experts=experts,
    )


def _experts_of(config: Any) -> Experts:
    """Return a model's experts. Raises: CallerError: some layers have none."""
    usual: Any
    for name, usual in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        value = getattr(config, name, usual)
        if value not in (usual, None):
            raise _unsupported(f"{name} = {value}", name, f"use {usual}, or the backend 'fsdp'")
    return Experts(
        num=int(config.num_experts),
        intermediate=int(config.moe_intermediate_size),
        per_token=int(config.num_experts_per_tok),
        is_normalized=bool(config.norm_topk_prob),
    )


def check_sizes(sizes: Sizes, layout: Layout) -> None:
    """Check that a layout splits a model evenly.

    Raises: CallerError: FAILED_PRECONDITION: it does not.
    """
    tp, pp = layout.tp, layout.pp
    if sizes.experts is None and layout.ep > 1:
        raise CallerError(
            f"layout.ep must be 1 for a model without experts, got {layout.ep}",
            code=Code.FAILED_PRECONDITION,
            field="layout.ep",
            remedy="use layout.ep = 1; for more ranks, raise layout.dp",
        )
    if sizes.experts is not None and sizes.experts.num % layout.ep:
        raise _uneven(f"{sizes.experts.num} experts", "ep", layout.ep)
    for label, size in (
        ("attention heads", sizes.heads),
        ("MLP rows (intermediate_size)", 0 if sizes.experts else sizes.intermediate),
    ):
        if size % tp:
            raise _uneven(f"{size} {label}", "tp", tp)
    if sizes.kv_heads % tp and tp % sizes.kv_heads:
        raise _uneven(f"{sizes.kv_heads} key-value heads", "tp", tp)
    if sizes.padded_vocab(tp) - sizes.vocab >= sizes.padded_vocab(tp) // tp:
        raise _uneven(f"{sizes.vocab} token ids", "tp", tp)
    if sizes.num_layers % pp:
        raise _uneven(f"{sizes.num_layers} layers", "pp", pp)
    _check_run(sizes.hidden * sizes.head, "hidden_size")
    if sizes.experts is None:
        _check_run(sizes.hidden * (sizes.intermediate // tp), "intermediate_size")
    else:
        _check_run(sizes.hidden * sizes.experts.intermediate, "moe_intermediate_size")
    if sizes.has_qkv_bias:
        _check_run(sizes.head, "head_dim")


def _check_run(num_elements: int, field: str) -> None:
    """Check that consecutive slices of this size stay aligned. Raises: CallerError: they do not."""
    if num_elements * _SMALLEST_ITEM_BYTES % ALIGNMENT_BYTES:
        raise _unsupported(
            f"slices of {num_elements} elements, which would not be aligned to {ALIGNMENT_BYTES} "
            "bytes",
            field,
            f"use a multiple of {ALIGNMENT_BYTES // _SMALLEST_ITEM_BYTES}, or the backend 'fsdp'",
        )


@dataclass(frozen=True)
class Place:
    """A rank's coordinates in a layout."""

    layout: Layout
    at: Coordinates

    @property
    def is_first(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last(self) -> bool:
        return self.at.pp == self.layout.pp - 1


Parameters = Mapping[str, Mapping[str, Shard]]
"""Megatron's name of each of a rank's parameters → the slices in it, in order."""


def parameters(sizes: Sizes, place: Place) -> Parameters:
    """Return the parameters of a rank's stage, by Megatron's names. Experts come last."""
    result: dict[str, dict[str, Shard]] = {}
    of_experts: dict[str, dict[str, Shard]] = {}
    hidden, rank, tp = sizes.hidden, place.at.tp, place.layout.tp
    norm = _whole([hidden])
    if place.is_first:
        result[EMBEDDING] = {"model.embed_tokens.weight": _vocabulary(sizes, place)}
    num_layers = sizes.num_layers // place.layout.pp
    for layer in range(num_layers):
        stage_layer = f"decoder.layers.{layer}."
        model_layer = f"model.layers.{place.at.pp * num_layers + layer}."
        attention, mlp = f"{model_layer}self_attn.", f"{model_layer}mlp."
        result[f"{stage_layer}input_layernorm.weight"] = {
            f"{model_layer}input_layernorm.weight": norm
        }
        result[f"{stage_layer}self_attention.linear_qkv.weight"] = {
            f"{attention}{name}_proj.weight": _rows([heads * sizes.head, hidden], run)
            for name, heads, run in _head_rows(sizes, place)
        }
        if sizes.has_qkv_bias:
            result[f"{stage_layer}self_attention.linear_qkv.bias"] = {
                f"{attention}{name}_proj.bias": _rows([heads * sizes.head], run)
                for name, heads, run in _head_rows(sizes, place)
            }
        if sizes.has_qk_norm:
            for name in ("q", "k"):
                result[f"{stage_layer}self_attention.{name}_layernorm.weight"] = {
                    f"{attention}{name}_norm.weight": _whole([sizes.head])
                }
        result[f"{stage_layer}self_attention.linear_proj.weight"] = {
            f"{attention}o_proj.weight": _columns([hidden, sizes.heads * sizes.head], rank, tp)
        }
        result[f"{stage_layer}pre_mlp_layernorm.weight"] = {
            f"{model_layer}post_attention_layernorm.weight": norm
        }
        if sizes.experts is not None:
            result[f"{stage_layer}mlp.router.weight"] = {
                f"{mlp}gate.weight": _whole([sizes.experts.num, hidden])
            }
            of_experts |= _expert_parameters(sizes.experts, hidden, place, stage_layer, mlp)
            continue
        rows = _even(sizes.intermediate, rank, tp)
        result[f"{stage_layer}mlp.linear_fc1.weight"] = {
            f"{mlp}{name}_proj.weight": _rows([sizes.intermediate, hidden], rows)
            for name in ("gate", "up")
        }
        result[f"{stage_layer}mlp.linear_fc2.weight"] = {
            f"{mlp}down_proj.weight": _columns([hidden, sizes.intermediate], rank, tp)
        }
    if place.is_last:
        result["decoder.final_layernorm.weight"] = {"model.norm.weight": norm}
        if not sizes.is_tied:
            result[OUTPUT] = {"lm_head.weight": _vocabulary(sizes, place)}
        elif not place.is_first:
            result[OUTPUT] = {"model.embed_tokens.weight": _vocabulary(sizes, place)}
    return result | of_experts


class Spread(StrEnum):
    """How tensor-parallel ranks split a linear layer."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    IDS = "ids"
    """By outputs, which are token ids. Each rank sees the whole input."""


_SPREADS: Final = {
    "linear_qkv": Spread.OUTPUTS,
    "linear_proj": Spread.INPUTS,
    "linear_fc1": Spread.OUTPUTS,
    "linear_fc2": Spread.INPUTS,
}
"""Megatron's linear layers that can have an adapter, by the last part of their names."""


@dataclass(frozen=True)
class AdaptedPart:
    """One of the model's layers inside one of Megatron's."""

    outputs: int
    """Its outputs on this rank, or rows of padding."""
    layer: str = ""
    """Its name in the model; empty if it has no adapter."""
    a: Shard | None = None
    b: Shard | None = None
    """The rank's slices of A and B; None without an adapter."""


@dataclass(frozen=True)
class Adapted:
    """One of Megatron's linear layers that has an adapter."""

    module: str
    """Its name in the rank's stage."""
    spread: Spread
    parts: list[AdaptedPart]
    """The model's layers that it fuses, in the order of its outputs."""


def adapted(sizes: Sizes, place: Place, adapter: Adapter) -> list[Adapted]:
    """Return the layers of a rank's stage that have an adapter."""
    result = []
    for name, slices in parameters(sizes, place).items():
        module, _, kind = name.rpartition(".")
        spread = _SPREADS.get(module.rpartition(".")[2])
        if kind == "weight" and spread is not None:
            layers = {entry.removesuffix(".weight"): shard for entry, shard in slices.items()}
            result.append(Adapted(module, spread, _adapted_parts(layers, adapter)))
    if place.is_last:
        vocabulary = _vocabulary(sizes, place)
        parts = _adapted_parts({"lm_head": vocabulary}, adapter)
        if padding := vocabulary.padded_shape[0] - vocabulary.shape[0]:
            parts.append(AdaptedPart(padding))
        result.append(Adapted("output_layer", Spread.IDS, parts))
    return [entry for entry in result if any(part.layer for part in entry.parts)]


def _adapted_parts(layers: Mapping[str, Shard], adapter: Adapter) -> list[AdaptedPart]:
    """Args: layers: the rank's weight slices of the model's layers, by layer name."""
    parts = []
    for layer, weight in layers.items():
        (outputs, inputs), start = weight.shape, weight.start or [0, 0]
        if not is_target(layer, adapter.targets):
            parts.append(AdaptedPart(outputs))
            continue
        all_outputs, all_inputs = weight.global_shape or weight.shape
        a = _slice([adapter.rank, all_inputs], [adapter.rank, inputs], [0, start[1]])
        b = _slice([all_outputs, adapter.rank], [outputs, adapter.rank], [start[0], 0])
        parts.append(AdaptedPart(outputs, layer, a, b))
    return parts


def is_of_expert(name: str) -> bool:
    """Return whether a tensor belongs to an expert."""
    return _EXPERTS in name


def _expert_parameters(
    experts: Experts, hidden: int, place: Place, stage_layer: str, mlp: str
) -> dict[str, dict[str, Shard]]:
    """Return the parameters of a layer's experts that this rank holds. Each expert is whole."""
    first, into = _whole([experts.intermediate, hidden]), _whole([hidden, experts.intermediate])
    result: dict[str, dict[str, Shard]] = {}
    for local, expert in enumerate(_even(experts.num, place.at.ep, place.layout.ep)):
        stage_expert, model_expert = (
            f"{stage_layer}mlp.experts.local_experts.{local}.",
            f"{mlp}experts.{expert}.",
        )
        result[f"{stage_expert}linear_fc1.weight"] = {
            f"{model_expert}gate_proj.weight": first,
            f"{model_expert}up_proj.weight": first,
        }
        result[f"{stage_expert}linear_fc2.weight"] = {f"{model_expert}down_proj.weight": into}
    return result


def token_ids(sizes: Sizes, place: Place) -> range:
    """Return the token ids whose embedding and head rows a rank holds, without padding."""
    padded = _even(sizes.padded_vocab(place.layout.tp), place.at.tp, place.layout.tp)
    return range(padded.start, min(padded.stop, sizes.vocab))


def key_value_heads(sizes: Sizes, place: Place) -> range:
    """Return the key-value heads that a rank holds."""
    if sizes.kv_heads >= place.layout.tp:
        return _even(sizes.kv_heads, place.at.tp, place.layout.tp)
    head = place.at.tp * sizes.kv_heads // place.layout.tp
    return range(head, head + 1)


def _head_rows(sizes: Sizes, place: Place) -> list[tuple[str, int, range]]:
    """Return (letter, number of heads, rows of the rank's heads) for queries, keys and values."""
    query_heads, kv_heads = (
        _even(sizes.heads, place.at.tp, place.layout.tp),
        key_value_heads(sizes, place),
    )

    def rows(heads: range) -> range:
        return range(heads.start * sizes.head, heads.stop * sizes.head)

    return [
        ("q", sizes.heads, rows(query_heads)),
        ("k", sizes.kv_heads, rows(kv_heads)),
        ("v", sizes.kv_heads, rows(kv_heads)),
    ]


def _even(size: int, rank: int, parts: int) -> range:
    size_each = size // parts
    return range(rank * size_each, (rank + 1) * size_each)


def _whole(shape: list[int]) -> Shard:
    return Shard(shape, shape)


def _rows(shape: list[int], rows: range) -> Shard:
    return _slice(shape, [len(rows), *shape[1:]], [rows.start, *([0] * len(shape[1:]))])


def _columns(shape: list[int], rank: int, tp: int) -> Shard:
    columns = _even(shape[1], rank, tp)
    return _slice(shape, [shape[0], len(columns)], [0, columns.start])


def _vocabulary(sizes: Sizes, place: Place) -> Shard:
    local_rows = _rows([sizes.vocab, sizes.hidden], token_ids(sizes, place))
    padded = sizes.padded_vocab(place.layout.tp) // place.layout.tp
    return Shard(
        local_rows.shape, [padded, sizes.hidden], local_rows.global_shape, local_rows.start
    )


def _slice(shape: list[int], size: list[int], start: list[int]) -> Shard:
    return _whole(shape) if size == shape else Shard(size, size, shape, start)


def _uneven(parts: str, axis: str, size: int) -> CallerError:
    return CallerError(
        f"the megatron backend cannot split the model's {parts} evenly over layout.{axis} = {size}",
        code=Code.FAILED_PRECONDITION,
        field=f"layout.{axis}",
        remedy=f"use a divisor for layout.{axis}; for more ranks, raise layout.dp",
    )


def _unsupported(feature: str, field: str, remedy: str) -> CallerError:
    return CallerError(
        f"the megatron backend does not support {feature}",
        code=Code.FAILED_PRECONDITION,
        field=f"model.config.{field}",
        remedy=remedy,
    )
