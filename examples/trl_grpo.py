"""TRL's GRPOTrainer with its rollouts drawn by the mesh, through OpenAI's API.

    export OPENAI_BASE_URL=http://127.0.0.1:8800/v1 OPENAI_API_KEY=tml-...
    python examples/trl_grpo.py --model /models/smollm2 --output trained

The trainer is TRL's own, and it trains in this process: the loss, the optimizer and the weights are
its. Its `rollout_func` asks `/v1/completions`, and gives TRL the tokens of prompts and samples as
the mesh has read and drawn them, so no text is made tokens twice.

Before the first batch of each optimizer step all the weights go to the mesh: the trainer saves
itself to `OUTPUT/step-N`, `phaseloom model add` registers that directory as `NAME-N`, and the
batch is drawn from `NAME-N`. So every token is drawn with the weights that it updates, and TRL's
loss needs no correction for older ones. The sampler of the weights before is drained, and their
name removed; the directories stay. The nodes must see `OUTPUT` under the same path. Registering is
the operator's: this runs where `phaseloom jobs` does, and `--run` names the mesh's run directory.

It wants `trl` and `openai`, and one process of the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import openai
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = ["Count: 1 2 3", "Say a number:", "2 + 2 =", "Digits:"]


def report(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class Rollouts:
    """Draws TRL's batches from the mesh, which has the trainer's weights of that step."""

    def __init__(self, name: str, output: Path, phaseloom: str, run: Path | None) -> None:
        self._api = openai.OpenAI()
        self._name = name
        self._output = output
        self._phaseloom = phaseloom
        self._run = [] if run is None else ["--run", str(run)]
        self._step = -1
        self._registered = ""
        """The name of the step's weights on the mesh."""
        self._job = ""
        """The job that samples them."""
        self._num_drawn = 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        step = trainer.state.global_step
        if step != self._step:
            self._publish(step, trainer)
        drawn: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        # TRL repeats a prompt for each sample of its group.
        for prompt, group in groupby(prompts):
            answer: Any = self._api.completions.create(
                model=self._model(step),
                prompt=trainer.processing_class(prompt)["input_ids"],
                n=len(list(group)),
                seed=self._num_drawn,
                max_tokens=trainer.args.max_completion_length,
                temperature=trainer.args.temperature,
                logprobs=0,
                extra_body={"return_token_ids": True},
            )
            self._num_drawn += 1
            self._job = answer.system_fingerprint
            for choice in answer.choices:
                drawn["prompt_ids"].append(choice.prompt_token_ids)
                drawn["completion_ids"].append(choice.token_ids)
                drawn["logprobs"].append(choice.logprobs.token_logprobs)
        report("drawn", step=step, model=self._model(step), **drawn)
        return drawn

    def end(self) -> None:
        """End the sampler, and take the name of its weights away."""
        if self._job:
            self._operate("drain", self._job)
        if self._registered:
            self._operate("model", "remove", self._registered)
        self._job = self._registered = ""

    def _publish(self, step: int, trainer: GRPOTrainer) -> None:
        self.end()
        directory = (self._output / f"step-{step}").absolute()
        trainer.save_model(str(directory))
        self._operate("model", "add", self._model(step), str(directory))
        self._registered = self._model(step)
        self._step = step

    def _model(self, step: int) -> str:
        return f"{self._name}-{step}"

    def _operate(self, *words: str) -> None:
        command = [self._phaseloom, *words, *self._run]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def even(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """The reward: the share of even tokens, which any model can learn. Yours goes here."""
    rewards = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    report("rewarded", completion_ids=completion_ids, rewards=rewards)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO by TRL, with rollouts of the mesh")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--output", type=Path, required=True, help="where the weights are saved")
    parser.add_argument("--name", default="trl", help="what the weights are registered as")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--phaseloom", default="phaseloom", help="the command")
    parser.add_argument("--run", type=Path, help="the mesh's run directory; else the newest one")
    options = parser.parse_args()
    if not options.model.is_dir():
        parser.error(f"--model: there is no directory {options.model}")
    if not shutil.which(options.phaseloom):
        parser.error(f"--phaseloom: {options.phaseloom} is no command")
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        if not os.environ.get(variable):
            parser.error(f"{variable} is not set: `phaseloom up --gateway PORT` prints it")

    rollouts = Rollouts(options.name, options.output, options.phaseloom, options.run)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=even,
        rollout_func=rollouts,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        args=GRPOConfig(
            output_dir=str(options.output),
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        ),
    )
    if trainer.accelerator.num_processes > 1:
        parser.error("it registers the weights of one process: start one")
    trainer.remove_callback(PrinterCallback)  # what is printed here is JSON
    try:
        trainer.train()
    finally:
        rollouts.end()
    trainer.save_model(str(options.output / f"step-{options.steps}"))
    for logged in trainer.state.log_history:
        if "loss" in logged:
            report("step", **{key: logged[key] for key in ("step", "loss", "grad_norm", "reward")})


if __name__ == "__main__":
    main()
