"""Batched incremental decoding of left-padded rows that all write the same cache column.

`LlamaDecoder` implements the Llama family with few operations that are fast for small batches.
`transformers`' own decoding costs about twice as much for a small model, nearly all of it in
Python. `BodyDecoder` runs that for all other architectures. Both use the modules' weights in place.
Nothing is derived from the weights, so they may change between two calls.

Shapes: B rows, T positions of this call, S columns of the cache in use, L layers, C = 2 for keys
and values, H hidden, N query heads, K key-value heads, G = N / K, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from phaseloom.worker.backends.architectures import (
    attention_masks,
    has_windows,
    logits,
)
from phaseloom.worker.backends.lora.adapters import LowRank

LLAMA_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures built from the same modules as Llama, with the same names."""


class Cache(Protocol):
    """Keys and values of the rows of a batch."""

    padding_B: torch.Tensor
    """Columns of padding on the left of each row."""
    columns: int
    """Number of columns in use."""

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of each layer's keys and values, (B, K, S, D), for the columns in use."""
        ...

    def keep_rows(self, index_R: torch.Tensor) -> None:
        """Keep these rows, in this order. An index may occur several times.

        Frees each layer's memory before copying the next layer, so that it can be reused.
        """
        ...

    def joined(self, appended: Self, room: int) -> Self:
        """Return a cache with copies of these rows, then of those of `appended`, and `room` free
        columns.

        Rows are aligned at their last column. Columns that are padding in all rows are dropped.
        """
        ...


CacheT = TypeVar("CacheT", bound=Cache)


@dataclass(frozen=True)
class Prefill(Generic[CacheT]):
    logits_BV: torch.Tensor
    cache: CacheT


class Decoder(Protocol[CacheT]):
    """The forward pass of a model, one column of positions at a time."""

    def prefill(
        self, tokens_BT: torch.Tensor, padding_B: torch.Tensor, capacity: int
    ) -> Prefill[CacheT]:
        """Run left-padded prompts.

        Args: padding_B: columns of padding on the left of each row.
              capacity: columns that the cache must hold, T included.
        """
        ...

    def resume(
        self, tokens_BT: torch.Tensor, kv_LCBKSD: torch.Tensor, padding_B: torch.Tensor, room: int
    ) -> Prefill[CacheT]:
        """Run the remaining tokens of prompts whose first keys and values are known.

        Args: tokens_BT: equally many tokens of each prompt, without padding.
              kv_LCBKSD: keys and values (C = 2) of the tokens before these, left-padded. Padding
                  must be finite.
              room: columns that the cache must hold after these tokens.
        """
        ...

    def step(self, tokens_B: torch.Tensor, cache: CacheT) -> torch.Tensor:
        """Append one token to every row of `cache`. Returns: the logits (B, V) of the next
        token."""
        ...


def decoder_of(model: PreTrainedModel) -> Decoder[Any]:
    is_known = model.config.model_type in LLAMA_TYPES and not has_windows(model.config)
    # In lower precision, decode exactly as training computes, or samples would be off-policy.
    if is_known and model.dtype == torch.float32:
        return LlamaDecoder(model)
    return BodyDecoder(model)


@dataclass
class LlamaCache:
    """Keys and values of B rows. `mask_BS` is -inf at left padding and 0 elsewhere."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    mask_BS: torch.Tensor
    padding_B: torch.Tensor
    columns: int

    @property
    def num_rows(self) -> int:
        return self.padding_B.numel()

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(self.keys, self.values, strict=True)
        return [(k[:, :, : self.columns], v[:, :, : self.columns]) for k, v in pairs]

    def keep_rows(self, index_R: torch.Tensor) -> None:
        _, num_heads, capacity, size = self.keys[0].shape
        heads_K = torch.arange(num_heads, device=index_R.device)
        # Rows and heads as one dimension.
        index_Z = (index_R[:, None] * num_heads + heads_K).flatten()

        def pick(cached_BKSD: torch.Tensor) -> torch.Tensor:
            # A head's used columns are contiguous, so each head is one copy.
            picked = cached_BKSD.new_empty((index_R.numel(), num_heads, capacity, size))
            source, target = (
                cached.view(-1, capacity * size)[:, : self.columns * size]
                for cached in (cached_BKSD, picked)
            )
            torch.index_select(source, 0, index_Z, out=target)
            return picked

        for i in range(len(self.keys)):
            self.keys[i] = pick(self.keys[i])
            self.values[i] = pick(self.values[i])
        self.mask_BS = self.mask_BS.index_select(0, index_R)
        self.padding_B = self.padding_B.index_select(0, index_R)

    def joined(self, appended: LlamaCache, room: int) -> LlamaCache:
        alignment = _Alignment.of(self, appended)
        padding_B, columns = alignment.padding_B, alignment.columns
        mask_BS = self.mask_BS.new_zeros(padding_B.numel(), columns + room)
        columns_S = torch.arange(columns + room, device=padding_B.device)
        return LlamaCache(
            [alignment.joined(*pair, room) for pair in zip(self.keys, appended.keys, strict=True)],
            [
                alignment.joined(*pair, room)
                for pair in zip(self.values, appended.values, strict=True)
            ],
            mask_BS.masked_fill_(columns_S < padding_B[:, None], -torch.inf),
            padding_B,
            columns,
        )


class LlamaDecoder:
    """The `Decoder` for models of `LLAMA_TYPES` in float32 without sliding windows."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        body: Any = model.model
        self._layers: list[Any] = list(body.layers)
        self._embedding = body.embed_tokens
        self._norm = body.norm
        self._head: Any = model.lm_head
        self._rotary = body.rotary_emb
        self._num_kv_heads = int(config.num_key_value_heads)
        self._head_size = int(self._layers[0].self_attn.head_dim)

    def prefill(
        self, tokens_BT: torch.Tensor, padding_B: torch.Tensor, capacity: int
    ) -> Prefill[LlamaCache]:
        cache = self._empty(padding_B, capacity)
        return Prefill(self._run(tokens_BT, cache, _causal(cache, tokens_BT.shape[1])), cache)

    def resume(
        self, tokens_BT: torch.Tensor, kv_LCBKSD: torch.Tensor, padding_B: torch.Tensor, room: int
    ) -> Prefill[LlamaCache]:
        columns, length = kv_LCBKSD.shape[-2], tokens_BT.shape[1]
        cache = self._empty(padding_B, columns + length + room)
        for keys, values, kv_CBKSD in zip(cache.keys, cache.values, kv_LCBKSD, strict=True):
            keys[:, :, :columns], values[:, :, :columns] = kv_CBKSD
        cache.columns = columns
        return Prefill(self._run(tokens_BT, cache, _causal(cache, length)), cache)

    def _empty(self, padding_B: torch.Tensor, capacity: int) -> LlamaCache:
        """Return a cache with room for `capacity` columns, none of them in use."""
        num_rows, device = padding_B.numel(), padding_B.device
        shape = (num_rows, self._num_kv_heads, capacity, self._head_size)
        columns_S = torch.arange(capacity, device=device)
        padded_BS = columns_S < padding_B[:, None]
        return LlamaCache(
            [torch.empty(shape, device=device) for _ in self._layers],
            [torch.empty(shape, device=device) for _ in self._layers],
            torch.zeros(num_rows, capacity, device=device).masked_fill_(padded_BS, -torch.inf),
            padding_B,
            0,
        )

    def step(self, tokens_B: torch.Tensor, cache: LlamaCache) -> torch.Tensor:
        mask_B1S = cache.mask_BS[:, None, : cache.columns + 1]
        return self._run(tokens_B[:, None], cache, mask_B1S)

    def _run(
        self, tokens_BT: torch.Tensor, cache: LlamaCache, mask_BTS: torch.Tensor
    ) -> torch.Tensor:
        hidden_BTH = F.embedding(tokens_BT, self._embedding.weight)
        start, stop = cache.columns, cache.columns + tokens_BT.shape[1]
        columns_T = torch.arange(start, stop, device=tokens_BT.device)
        # Padding gets position 0. Its value does not matter, because the mask hides it.
        positions_BT = (columns_T - cache.padding_B[:, None]).clamp_(min=0)
        cos_BTD, sin_BTD = self._rotary(hidden_BTH, positions_BT)
        rope = (cos_BTD[:, :, None], sin_BTD[:, :, None])
        cache.columns = stop
        for i, layer in enumerate(self._layers):
            normed_BTH = _rms_norm(hidden_BTH, layer.input_layernorm)
            hidden_BTH = hidden_BTH + self._attend(
                layer.self_attn, normed_BTH, rope, (cache.keys[i], cache.values[i]), mask_BTS
            )
            normed_BTH = _rms_norm(hidden_BTH, layer.post_attention_layernorm)
            mlp = layer.mlp
            gate = mlp.act_fn(_linear(normed_BTH, mlp.gate_proj))
            hidden_BTH = hidden_BTH + _linear(
                gate.mul_(_linear(normed_BTH, mlp.up_proj)), mlp.down_proj
            )
        return _linear(_rms_norm(hidden_BTH[:, -1], self._norm), self._head)

    def _attend(
        self,
        attention: Any,
        hidden_BTH: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cached: tuple[torch.Tensor, torch.Tensor],
        mask_BTS: torch.Tensor,
    ) -> torch.Tensor:
        batch, length, _ = hidden_BTH.shape
        heads = (batch, length, -1, self._head_size)
        q_BTND = _linear(hidden_BTH, attention.q_proj).view(heads)
        k_BTKD = _linear(hidden_BTH, attention.k_proj).view(heads)
        v_BTKD = _linear(hidden_BTH, attention.v_proj).view(heads)
        if hasattr(attention, "q_norm"):
            q_BTND = _rms_norm(q_BTND, attention.q_norm)
            k_BTKD = _rms_norm(k_BTKD, attention.k_norm)
        q_BTND = _rotate(q_BTND, rope)
        stop = mask_BTS.shape[-1]
        keys, values = cached
        keys[:, :, stop - length : stop] = _rotate(k_BTKD, rope).transpose(1, 2)
        values[:, :, stop - length : stop] = v_BTKD.transpose(1, 2)
        # The G query heads of a key-value head become rows of one matrix product.
        q_BKGTD = q_BTND.view(batch, length, self._num_kv_heads, -1, self._head_size)
        q_BKGTD = q_BKGTD.permute(0, 2, 3, 1, 4)
        groups = q_BKGTD.shape[2]
        q_BKRD = q_BKGTD.reshape(batch, self._num_kv_heads, groups * length, self._head_size)
        scores = torch.matmul(q_BKRD, keys[:, :, :stop].transpose(2, 3)).mul_(attention.scaling)
        scores_BKGTS = scores.view(batch, self._num_kv_heads, groups, length, stop)
        weights = torch.softmax(scores_BKGTS.add_(mask_BTS[:, None, None]), dim=-1)
        mixed_BKRD = torch.matmul(weights.view_as(scores), values[:, :, :stop])
        mixed = mixed_BKRD.view(batch, -1, groups, length, self._head_size).permute(0, 3, 1, 2, 4)
        return _linear(mixed.reshape(batch, length, -1), attention.o_proj)


def _causal(cache: LlamaCache, length: int) -> torch.Tensor:
    """Return the mask (B, T, S) of the cache's next `length` columns over all columns up to
    them."""
    start, stop = cache.columns, cache.columns + length
    device = cache.padding_B.device
    causal_TS = torch.full((length, stop), -torch.inf, device=device).triu_(start + 1)
    # A padded position sees itself, otherwise its softmax would be NaN. Its result is unused.
    visible = torch.zeros(length, stop, dtype=torch.bool, device=device)
    visible.diagonal(start).fill_(True)
    return (cache.mask_BS[:, None, :stop] + causal_TS).masked_fill_(visible, 0.0)


@dataclass
class BodyCache:
    """The cache of `transformers`, with all columns in every layer."""

    kv: DynamicCache
    padding_B: torch.Tensor
    columns: int

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [_tensors(layer) for layer in self.kv.layers]

    def keep_rows(self, index_R: torch.Tensor) -> None:
        for layer in self.kv.layers:
            assert isinstance(layer, DynamicLayer)
            keys, values = _tensors(layer)
            layer.keys = keys.index_select(0, index_R)
            layer.values = values.index_select(0, index_R)
        self.padding_B = self.padding_B.index_select(0, index_R)

    def joined(self, appended: BodyCache, room: int) -> BodyCache:
        alignment = _Alignment.of(self, appended)
        layers = DynamicCache()
        for i, (first, second) in enumerate(zip(self.layers(), appended.layers(), strict=True)):
            keys, values = (alignment.joined(*pair) for pair in zip(first, second, strict=True))
            layers.update(keys, values, i)
        return BodyCache(layers, alignment.padding_B, alignment.columns)


class BodyDecoder:
    """The `Decoder` for any architecture. It runs the model's own body."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prefill(
        self, tokens_BT: torch.Tensor, padding_B: torch.Tensor, capacity: int
    ) -> Prefill[BodyCache]:
        cache = BodyCache(DynamicCache(), padding_B, 0)
        return Prefill(self._run(tokens_BT, cache), cache)

    def resume(
        self, tokens_BT: torch.Tensor, kv_LCBKSD: torch.Tensor, padding_B: torch.Tensor, room: int
    ) -> Prefill[BodyCache]:
        kv = DynamicCache()
        for i, (keys, values) in enumerate(kv_LCBKSD):
            kv.update(keys, values, i)
        cache = BodyCache(kv, padding_B, kv_LCBKSD.shape[-2])
        return Prefill(self._run(tokens_BT, cache), cache)

    def step(self, tokens_B: torch.Tensor, cache: BodyCache) -> torch.Tensor:
        return self._run(tokens_B[:, None], cache)

    def _run(self, tokens_BT: torch.Tensor, cache: BodyCache) -> torch.Tensor:
        start, cache.columns = cache.columns, cache.columns + tokens_BT.shape[1]
        columns_S = torch.arange(cache.columns, device=tokens_BT.device)
        columns_T = columns_S[start:]
        distance_TS = columns_T[:, None] - columns_S
        visible_BTS = (distance_TS >= 0) & (columns_S >= cache.padding_B[:, None, None])
        # A padded position sees itself, otherwise its softmax would be NaN. Its result is unused.
        visible_BTS |= distance_TS == 0
        body: Any = self._model.base_model
        output = body(
            input_ids=tokens_BT,
            position_ids=(columns_T - cache.padding_B[:, None]).clamp_(min=0),
            attention_mask=attention_masks(
                self._model.config,
                visible_BTS,
                distance_TS.expand_as(visible_BTS),
                self._model.dtype,
            ),
            past_key_values=cache.kv,
            use_cache=True,
        )
        return logits(self._model, output.last_hidden_state[:, -1])


@dataclass(frozen=True)
class _Alignment:
    """Aligns the columns of two caches at their last ones."""

    used: tuple[int, int]
    """Number of columns of each cache that are not padding in all its rows."""
    starts: tuple[int, int]
    """The first of these columns in each cache."""
    columns: int
    padding_B: torch.Tensor

    @staticmethod
    def of(first: Cache, second: Cache) -> _Alignment:
        starts = int(first.padding_B.min()), int(second.padding_B.min())
        used = first.columns - starts[0], second.columns - starts[1]
        columns = max(used)
        padding = [cache.padding_B + (columns - cache.columns) for cache in (first, second)]
        return _Alignment(used, starts, columns, torch.cat(padding))

    def joined(
        self, first_BKSD: torch.Tensor, second_BKSD: torch.Tensor, room: int = 0
    ) -> torch.Tensor:
        """Return the rows of both, with `room` more columns."""
        num_first, num_heads, _, size = first_BKSD.shape
        # Zeros, because masked values are multiplied by 0 and must be finite.
        joined = first_BKSD.new_zeros(
            (self.padding_B.numel(), num_heads, self.columns + room, size)
        )
        parts = (joined[:num_first], joined[num_first:])
        for part, cached, used, start in zip(
            parts, (first_BKSD, second_BKSD), self.used, self.starts, strict=True
        ):
            part[:, :, self.columns - used : self.columns] = cached[:, :, start : start + used]
        return joined


def _tensors(layer: object) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, DynamicLayer)
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    return keys, values


def _linear(x: torch.Tensor, module: Any) -> torch.Tensor:
    if type(module) is LowRank:
        return module.forward(x)
    return F.linear(x, module.weight, module.bias)


def _rms_norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def _rotate(x_BTND: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rope
    first, second = x_BTND.chunk(2, dim=-1)
    return x_BTND * cos + torch.cat((-second, first), dim=-1) * sin
