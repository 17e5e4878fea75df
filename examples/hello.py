"""The smallest whole RL program: a model, a prompt, and a reward function of your own.

    phaseloom up                   # in one terminal
    python examples/hello.py       # in another, with the variables that it prints

It also reports to the trackers that its arguments name, such as `tensorboard:runs/curves`.

The model is tiny and begins with random weights. It learns to say 7, in some seconds. To make this
program yours, change `reward`, `PROMPT` and `MODEL`: a registered model in place of a config is
`ModelSpec(registered="smollm2")`, and its tokens are those of its own tokenizer. `grpo.py` beside
it is a whole GRPO trainer.
"""

from __future__ import annotations

import asyncio
import sys
from statistics import fmean

from phaseloom.client import (
    AdamParams,
    Datum,
    DeploymentSpec,
    ModelSpec,
    PhaseloomError,
    Prompt,
    SamplingParams,
    Sequence,
    connect,
    float32s,
    int32s,
    tracker,
)

MODEL = ModelSpec(
    {
        "model_type": "qwen3",
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
)
PROMPT = [1, 2, 3]
SEVEN = 7


def reward(answer: list[int]) -> float:
    """The share of an answer's tokens that are 7."""
    return answer.count(SEVEN) / len(answer)


def scored(sample: Sequence, advantage: float) -> Datum:
    """A sample to train on: position i predicts token i + 1, and the prompt counts nothing."""
    tokens = PROMPT + int32s(sample.tokens)
    prompt = [0.0] * (len(PROMPT) - 1)
    logprobs = float32s(sample.logprobs)  # those that the tokens were drawn with
    advantages = prompt + [advantage / len(logprobs)] * len(logprobs)
    return Datum(tokens[:-1], tokens[1:], logprobs=prompt + logprobs, advantages=advantages)


async def main() -> None:
    async with connect() as mesh:
        job = await mesh.submit_job(
            "hello",
            [
                DeploymentSpec("policy", "train", "fsdp", MODEL, trainable=True),
                DeploymentSpec("sampler", "rollout", "sampler", MODEL),
            ],
        )
        for target in sys.argv[1:]:
            job.report_to(tracker(target, "hello"))
        # The block ends the job. Ctrl-C leaves it: `mesh.attach("hello")` then resumes it.
        async with job:
            policy, sampler = job.deployment("policy"), job.deployment("sampler")
            for step in range(1, 16):
                prompt = Prompt(PROMPT, seed=step)
                drawn = await sampler.generate([prompt], SamplingParams(6), num_samples=32)
                (samples,) = drawn.sequences
                rewards = [reward(int32s(sample.tokens)) for sample in samples]
                mean = fmean(rewards)
                batch = [scored(s, r - mean) for s, r in zip(samples, rewards, strict=True)]
                # All three are on their way before the first has run. What went wrong raises here.
                trained = policy.forward_backward(batch, "importance_sampling")
                stepped = policy.optim_step(AdamParams(1e-2, grad_clip_norm=1.0))
                synced = sampler.sync_weights(policy.publish_weights())
                metrics = (await trained).metrics | (await stepped).metrics
                await synced
                job.report({"reward": mean, **metrics}, step=step)
                print(f"step {step}: reward {mean:.2f}", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PhaseloomError as error:
        sys.exit(f"hello.py: {error}")
