"""The settings that the two example jobs are tuned to: one `Settings` for each task."""

from __future__ import annotations

from dataclasses import dataclass

from tasks import ALPHABET, STOP

from phaseloom.client import Loss


@dataclass(frozen=True)
class Settings:
    """The constants of one run. Two runs of equal settings give the same weights, bit for bit."""

    steps: int
    prompts: int
    """The problems of a step; each is answered `group` times."""
    train_groups: int
    """The number of problems that are trained on: those whose answers differ most in reward."""
    micro_batches: int
    max_tokens: int
    """The most tokens of an answer, its end included."""
    warmup_steps: int
    group: int = 16
    seed: int = 0
    warmup_batch: int = 64
    warmup_rate: float = 1e-3
    learning_rate: float = 1e-4
    kl: float = 0.01
    """The weight of the drift from the reference, in nats a token."""
    grad_clip: float = 1.0
    loss: Loss = Loss.PPO
    ahead: int = 0
    """The steps by which rollouts are ahead of training. 0: each is drawn with the newest weights;
    1: one-step off-policy, training and the next rollout run at the same time."""
    in_flight: bool = False
    """Whether rollouts take new weights while they run, from their next token on. With it two runs
    are not the same."""
    eval_prompts: int = 256
    rounds: int = 1
    """The number of rounds of steps, between which the program waits at a barrier."""
    checkpoint_every: int = 0
    """The number of steps between two checkpoints, from which a new controller can go on; 0: there
    are no checkpoints."""
    eval_seed: int = 1_000_000_007
    """The seed of the held-out dataset, whose item i is drawn from seed + i: far from every item
    that is trained on."""


SETTINGS = {
    "chain_sum": Settings(
        steps=90, prompts=168, train_groups=96, micro_batches=2, max_tokens=4, warmup_steps=200
    ),
    "letter_counting": Settings(
        steps=90, prompts=30, train_groups=16, micro_batches=2, max_tokens=20, warmup_steps=50
    ),
}
"""The settings of each task. A step's rollout takes about as long as its training, and the steps of
both jobs take about the same time: so two jobs leave the least of two devices idle."""

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
"""The model, of about 0.8 million parameters: the values of `Qwen3Config.to_dict()` that are not
the default."""
