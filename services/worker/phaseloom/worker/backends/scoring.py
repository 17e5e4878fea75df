"""Log-probabilities of given targets under a model, the same for every torch backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from phaseloom.common.messages import Float32s, Forward, ForwardResult
from phaseloom.worker.backends.batch import forward_batch
from phaseloom.worker.backends.packing import Pass, passes


class Scorer(nn.Module):
    """Runs a causal LM's body over packed rows and its head on the positions asked for only.

    A module of its own, so that FSDP2 has one root whose forward is all that is ever called.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Pass) -> torch.Tensor:
        """(N,) log-probabilities of the targets."""
        model: Any = self.model
        tokens_BT = torch.from_numpy(packed.tokens_BT)
        visible_BTT = packed.visible_BTT
        if visible_BTT is None:
            output = model.base_model(input_ids=tokens_BT, use_cache=False)
        else:
            output = model.base_model(
                input_ids=tokens_BT,
                position_ids=torch.from_numpy(packed.positions_BT),
                attention_mask=_additive_mask(torch.from_numpy(visible_BTT[:, None])),
                use_cache=False,
            )
        hidden_BTH = output.last_hidden_state
        asked_NH = hidden_BTH.flatten(0, 1).index_select(0, torch.from_numpy(packed.index_N))
        logits_NV = model.lm_head(asked_NH)
        targets_N = torch.from_numpy(packed.targets_N)
        return -nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")


def _additive_mask(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def forward(scorer: Scorer, args: Forward, vocab_size: int) -> ForwardResult:
    """Raises: CallerError: naming the field that is at fault."""
    batch = forward_batch(args, vocab_size)
    lp_N = np.empty(batch.tokens_N.size, dtype="<f4")
    for packed in passes(batch, only_used=False):
        lp_N[packed.source_N] = scorer(packed).numpy()
    ends = batch.starts[1:-1]
    results: list[Float32s] = [lp_T.tobytes() for lp_T in np.split(lp_N, ends)]
    return ForwardResult(results)
