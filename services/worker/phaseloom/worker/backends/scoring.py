"""Log-probabilities of given targets under a model, the same for every torch backend."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from phaseloom.worker.backends.architectures import attention_masks, logits
from phaseloom.worker.backends.batch import Batch
from phaseloom.worker.backends.packing import Pass, passes


class Scorer(nn.Module):
    """Runs a causal LM's body over packed rows and its head on the positions asked for only.

    A module of its own, so that FSDP2 has one root whose forward is all that is ever called.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Args: dtype: of the weights, while the model runs."""
        super().__init__()
        self.model = model
        self._dtype = dtype

    def forward(self, packed: Pass) -> torch.Tensor:
        """(N,) log-probabilities of the targets."""
        model: Any = self.model
        device = model.device
        tokens_BT = torch.from_numpy(packed.tokens_BT).to(device)
        visible_BTT = packed.visible_BTT
        if visible_BTT is None:
            output = model.base_model(input_ids=tokens_BT, use_cache=False)
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
        asked_NH = hidden_BTH.flatten(0, 1).index_select(0, index_N)
        logits_NV = logits(model, asked_NH).float()
        targets_N = torch.from_numpy(packed.targets_N).to(device)
        return -nn.functional.cross_entropy(logits_NV, targets_N, reduction="none")


def logprobs(scorer: Scorer, batch: Batch, packed: Iterable[Pass] | None = None) -> list[bytes]:
    """(T,) little-endian float32 log-probabilities of each sample's targets.

    Args: packed: the batch's passes, where more of them are to be run than it has itself.
    """
    lp_N = np.empty(batch.tokens_N.size, dtype="<f4")
    for each in passes(batch, only_used=False) if packed is None else packed:
        lp_N[each.source_N] = scorer(each).cpu().numpy()
    return [lp_N[start:stop].tobytes() for start, stop in pairwise(batch.starts.tolist())]
