"""Log-probabilities of given targets, computed the same way for every torch backend.

Shapes: B rows, T columns, N requested positions, H hidden, K targets or likeliest tokens per
position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from phaseloom.worker.backends.architectures import attention_masks, has_dynamic_rope, logits
from phaseloom.worker.backends.batch import Batch
from phaseloom.worker.backends.packing import Pass, passes

ENTROPY_ROWS = 256
"""Positions whose entropies are computed at a time. Bounds the memory: a block needs as much again
as its logits."""


class Scorer(nn.Module):
    """Runs a causal LM's body over packed rows, and its head only on the requested positions.

    It is a module of its own so that FSDP2 has a single root, whose forward is all that is ever
    called.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Args: dtype: dtype of the weights while the model runs."""
        super().__init__()
        self.model = model
        self.shares_prefixes = not has_dynamic_rope(model.config)
        """Whether a prefix computes the same before branches of different lengths."""
        self._dtype = dtype

    def forward(
        self, packed: Pass, *, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the targets' log-probabilities: (N,), or (N, K) with several targets per
        position. Also return the entropies (N,) of the distributions, without gradients, if they
        are requested."""
        logits_NV = self.logits(packed)
        return _of_targets(logits_NV, packed), _entropies(logits_NV) if with_entropy else None

    def logits(self, packed: Pass) -> torch.Tensor:
        """Return (N, V) float32 logits at the requested positions."""
        model: Any = self.model
        device = model.device
        tokens_BT = torch.from_numpy(packed.tokens_BT).to(device)
        visible_BTT = packed.visible_BTT
        if visible_BTT is None:
            # Without positions, padding would count in a row's length.
            positions = {}
            if not self.shares_prefixes:
                positions = {"position_ids": torch.from_numpy(packed.positions_BT).to(device)}
            output = model.base_model(input_ids=tokens_BT, use_cache=False, **positions)
        else:
            positions_BT = torch.from_numpy(packed.positions_BT).to(device)
            output = model.base_model(
                input_ids=tokens_BT,
                position_ids=positions_BT,
                attention_mask=attention_masks(
                    model.config,
                    torch.from_numpy(visible_BTT).to(device),
                    positions_BT[:, :, None] - positions_BT[:, None, :],
                    self._dtype,
                ),
                use_cache=False,
            )
        hidden_BTH = output.last_hidden_state
        index_N = torch.from_numpy(packed.index_N).to(device)
        scored_NH = hidden_BTH.flatten(0, 1).index_select(0, index_N)
        return logits(model, scored_NH).float()


def _of_targets(logits_NV: torch.Tensor, packed: Pass) -> torch.Tensor:
    targets_N = torch.from_numpy(packed.targets_N).to(logits_NV.device)
    if targets_N.ndim > 1:
        return torch.log_softmax(logits_NV, dim=-1).gather(-1, targets_N)
    return -nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")


@torch.no_grad()
def _entropies(logits_NV: torch.Tensor) -> torch.Tensor:
    blocks = torch.split(logits_NV, ENTROPY_ROWS)
    return torch.cat([torch.special.entr(block.softmax(-1)).sum(-1) for block in blocks])


def logprobs(scorer: Scorer, batch: Batch, packed: Iterable[Pass] | None = None) -> list[bytes]:
    """Return the log-probabilities of each sample's targets, as (T · K,) little-endian float32.

    Args: packed: passes to run instead of the batch's own, if idle passes must follow them.
    """
    lp_N = np.empty(batch.targets_N.shape, dtype="<f4")
    shares = scorer.shares_prefixes
    for item in passes(batch, only_used=False, shares=shares) if packed is None else packed:
        if item.index_N.size:  # an idle pass requests no position
            lp_N[item.source_N] = scorer(item)[0].cpu().numpy()
        else:
            # Its collectives must run all the same.
            scorer(item)
    samples = [lp_N[start:stop] for start, stop in pairwise(batch.starts.tolist())]
    if lp_N.ndim > 1:
        samples = [lp_TK[:, :k] for lp_TK, k in zip(samples, batch.num_targets_S, strict=True)]
    return [item.tobytes() for item in samples]


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of one sample, little-endian."""

    logprobs: bytes
    """Log-probabilities of its targets, (T,) float32."""
    top_tokens: bytes
    """The likeliest tokens at each position, likeliest first, (T, K) int32."""
    top_logprobs: bytes
    """Log-probabilities of `top_tokens`, (T, K) float32."""


def scores(scorer: Scorer, batch: Batch, num_top: int) -> list[Scores]:
    """Return the log-probabilities of each sample's targets and of its K = `num_top` likeliest
    tokens."""
    lp_N = np.empty(batch.tokens_N.size, dtype="<f4")
    tokens_NK = np.empty((lp_N.size, num_top), dtype="<i4")
    lp_NK = np.empty((lp_N.size, num_top), dtype="<f4")
    for packed in passes(batch, only_used=False, shares=scorer.shares_prefixes):
        logits_NV = scorer.logits(packed)
        lp_N[packed.source_N] = _of_targets(logits_NV, packed).cpu().numpy()
        top = torch.log_softmax(logits_NV, dim=-1).topk(num_top, dim=-1)
        tokens_NK[packed.source_N] = top.indices.cpu().numpy()
        lp_NK[packed.source_N] = top.values.cpu().numpy()
    return [
        Scores(*(array[start:stop].tobytes() for array in (lp_N, tokens_NK, lp_NK)))
        for start, stop in pairwise(batch.starts.tolist())
    ]
