"""What the two example jobs are tuned to: one `Settings` a task."""

from __future__ import annotations

from dataclasses import dataclass

from tasks import ALPHABET, STOP

from phaseloom.client import Loss


@dataclass(frozen=True)
class Settings:
    """Constants of one run; two runs of equal settings give the same weights, bit for bit."""

    steps: int
    prompts: int
    """Problems a step; each is answered `group` times."""
    train_groups: int
    """Of those, how many are trained on: the ones whose answers differ most in reward."""
    micro_batches: int
    max_tokens: int
    """Of an answer, its end included."""
    warmup_steps: int
    group: int = 16
    seed: int = 0
    warmup_batch: int = 64
    warmup_rate: float = 1e-3
    learning_rate: float = 1e-4
    kl: float = 0.01
    """Weight of the drift from the reference, in nats a token."""
    grad_clip: float = 1.0
    loss: Loss = Loss.PPO
    eval_prompts: int = 256
    checkpoint_every: int = 0
    """Steps between two checkpoints that a new controller can go on from; 0: none."""
    eval_seed: int = 1_000_000_007
    """Item i of a dataset is drawn from its seed + i: far from every item trained on."""


SETTINGS = {
    "chain_sum": Settings(
        steps=90, prompts=168, train_groups=96, micro_batches=2, max_tokens=4, warmup_steps=200
    ),
    "letter_counting": Settings(
        steps=90, prompts=30, train_groups=16, micro_batches=2, max_tokens=20, warmup_steps=50
    ),
}
"""Chosen so that a step's rollout takes about as long as its training, and both jobs' steps about
as long as each other's: then two jobs leave the least of two devices idle."""

MODEL: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": len(ALPHABET),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": STOP,
}
"""About 0.8 million parameters; what `Qwen3Config.to_dict()` gives, where it is not the default."""
