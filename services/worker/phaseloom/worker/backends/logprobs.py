"""Log-probabilities of given targets, the same for every torch backend."""

from __future__ import annotations

import torch
from torch import nn

from phaseloom.common.messages import Float32s, Forward, ForwardResult
from phaseloom.worker.backends.batch import Bucket, buckets, forward_samples
from phaseloom.worker.backends.losses import target_logprobs


def bucket_logprobs(model: nn.Module, bucket: Bucket, first: int = 0) -> torch.Tensor:
    """(B, T - first) log-probabilities of the targets from column `first` on."""
    length = bucket.tokens_BT.shape[1]
    output = model(
        input_ids=torch.from_numpy(bucket.tokens_BT),
        use_cache=False,
        logits_to_keep=length - first,
    )
    return target_logprobs(output.logits, torch.from_numpy(bucket.targets_BT[:, first:]))


def forward(model: nn.Module, args: Forward, vocab_size: int) -> ForwardResult:
    """Raises: CallerError: naming the field that is at fault."""
    samples = forward_samples(args, vocab_size)
    results: list[Float32s] = [b""] * len(samples)
    for bucket in buckets(samples):
        lp_BT = bucket_logprobs(model, bucket).numpy()
        for b, i in enumerate(bucket.rows):
            results[i] = lp_BT[b, : samples[i].tokens_T.size].astype("<f4").tobytes()
    return ForwardResult(results)
