"""A process of its own: what training gives with one thread, with two, and with changes of them.

    python divided_child.py SIZE MODEL_TYPE DTYPE

It prints a digest a line, one for each way to divide the device. MKL reads its environment once, so
this cannot run in the tests' own process.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch

from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Loss,
    OptimStep,
)
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.fsdp.backend import FsdpBackend
from phaseloom.worker.state.heap import Heap

VOCAB = 97
SIZES = {  # hidden, intermediate, layers, heads, heads of keys, of a head
    "tiny": (40, 72, 2, 4, 2, 10),
    "small": (128, 384, 4, 4, 2, 32),
    "medium": (256, 768, 6, 8, 4, 32),
}
ROUNDS = 2


def model(size: str, model_type: str, dtype: str) -> ModelSpec:
    hidden, intermediate, layers, heads, kv_heads, head_dim = SIZES[size]
    config = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
    return ModelSpec(config, init_seed=3)


def batch(seed: int, num_groups: int) -> list[Datum]:
    """Groups of odd lengths, whose samples begin alike."""
    drawn = random.Random(seed)
    data = []
    for _ in range(num_groups):
        prompt = [drawn.randrange(VOCAB) for _ in range(drawn.randrange(1, 60))]
        for _ in range(drawn.randrange(1, 5)):
            tokens = prompt + [drawn.randrange(VOCAB) for _ in range(drawn.randrange(2, 130))]
            count, skip = len(tokens) - 1, len(prompt) - 1
            data.append(
                Datum(
                    tokens[:-1],
                    tokens[1:],
                    logprobs=[0.0] * skip + [-4.0] * (count - skip),
                    advantages=[0.0] * skip + [drawn.uniform(-1, 1) for _ in range(count - skip)],
                )
            )
    return data


def digest_of(spec: DeploymentSpec, threads: list[int], *, changes: bool) -> str:
    """Train, and digest all that comes of it.

    Args: threads: taken one after the other; before each operation, or at each boundary too.
    """
    group = RankGroup(num_units=2)
    heap = Heap(FsdpBackend.plan(spec, group).heap_bytes)
    torch.set_num_threads(1)
    backend = FsdpBackend(spec, heap, group)
    number = 0

    def turn() -> None:
        nonlocal number
        backend.use_threads(threads[number % len(threads)])
        number += 1

    if changes:
        backend.at_boundary = turn
    digest = hashlib.sha256()
    for seed in range(ROUNDS):
        turn()
        data = batch(seed, 5)
        for each in backend.forward(Forward(data)).logprobs:
            assert isinstance(each, bytes)
            digest.update(each)
        turn()
        backend.forward_backward(ForwardBackward(data, Loss.PPO))
        turn()
        step = OptimStep(AdamParams(1e-3, weight_decay=0.1, grad_clip_norm=0.5))
        digest.update(str(backend.optim_step(step).metrics).encode())
        digest.update(backend.weights_sha256().encode())
    digest.update(heap.buffer)
    return digest.hexdigest()


def main() -> None:
    size, model_type, dtype = sys.argv[1:]
    spec = DeploymentSpec("policy", "train", "fsdp", model(size, model_type, dtype), trainable=True)
    print(digest_of(spec, [1], changes=False))
    print(digest_of(spec, [2], changes=False))
    drawn = random.Random(1)
    print(digest_of(spec, [drawn.choice([1, 2]) for _ in range(101)], changes=True))


if __name__ == "__main__":
    main()
