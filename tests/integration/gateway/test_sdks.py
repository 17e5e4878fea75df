"""What others have written, unmodified, in environments of their own, on the gateway's APIs."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM

from phaseloom.cli.rundir import open_bus
from phaseloom.common.contract.api import JobStatus
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.streams import Bucket
from tests.support.gateway import ended, serving
from tests.support.pretrained import loaded
from tests.support.tinymodel import config

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(600)]
OLD = Path(os.environ.get("OLD_SDK_PYTHON", ".venv-tinker-old/bin/python")).absolute()
COOKBOOK = Path(os.environ.get("COOKBOOK_PYTHON", ".venv-cookbook/bin/python")).absolute()
TRL = Path(os.environ.get("TRL_PYTHON", ".venv-trl/bin/python")).absolute()
_NUM_CHATS = 128


@pytest.mark.skipif(not OLD.exists(), reason="make test-sdks installs it")
async def test_oldest_sdk_does_what_the_newest_does(short_dir: Path) -> None:
    async with serving(short_dir) as served:
        old, new = await served.sdk("whole", python=OLD), await served.sdk("whole")
    for name in ("losses", "sampled", "named", "earlier", "loaded", "went_on", "drawn", "ppo"):
        assert old[name] == new[name], name


async def test_commands_of_the_sdk_manage_and_download_checkpoints(short_dir: Path) -> None:
    async with serving(short_dir / "mesh") as served:

        async def cli(*words: str) -> Any:
            words = ("-m", "tinker.cli", "--format", "json", *words)
            return json.loads(await ended(await served.start_sdk(*words)))

        said = await served.sdk("external")
        run, checkpoint = said["path"].removeprefix("tinker://").split("/", 1)
        state = said["state"].split("/", 3)[3]
        # A checkpoint of training is loaded by another model, saved for other programs, downloaded
        # and deleted.
        for path in (said["path"], said["state"]):
            done = await cli("checkpoint", "download", path, "--output", str(short_dir))
            downloaded = await asyncio.to_thread(os.listdir, done["destination"])
            assert {*downloaded} == said["urls"].keys()
        listed = await cli("checkpoint", "list", "--run-id", run)
        assert {row["checkpoint_id"] for row in listed["checkpoints"]} == {checkpoint, state}
        everything = await cli("checkpoint", "list", "--limit", "0")
        assert len(everything["checkpoints"]) == 2
        assert (await cli("checkpoint", "info", said["path"]))["checkpoint_type"] == "external"
        runs = await cli("run", "list", "--limit", "0")
        assert run in [row["training_run_id"] for row in runs["runs"]]
        assert (await cli("run", "info", run))["training_run_id"] == run
        models = await cli("model", "list")
        assert [row["model_name"] for row in models["models"]] == ["tiny"]
        for words in (["--ttl", "7200"], ["--remove"]):
            change = ["-m", "tinker.cli", "checkpoint", "set-ttl", said["path"], *words]
            await ended(await served.start_sdk(*change))
        types = ("--run-id", run, "--type", "external_weights", "--yes")
        assert (await cli("checkpoint", "delete", *types))["deleted_count"] == 1
        listed = await cli("checkpoint", "list", "--run-id", run)
        assert [row["checkpoint_id"] for row in listed["checkpoints"]] == [state]


def save_bytes_model(directory: Path) -> Path:
    """A tiny model whose tokens are bytes, so that it reads any text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    values = config(vocab_size=len(letters) + 1, max_position_embeddings=512)
    factory: Any = AutoModelForCausalLM
    torch.manual_seed(2)
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    factory.from_config(settings, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


@pytest.mark.skipif(not COOKBOOK.exists(), reason="make test-sdks installs it")
async def test_recipes_of_the_cookbook_run(short_dir: Path) -> None:
    """Reinforcement learning on arithmetic, gone on with, and supervised learning on a file."""
    # The cookbook takes a model's name for its tokenizer's directory.
    model = await asyncio.to_thread(save_bytes_model, short_dir / "bytes")
    chats = short_dir / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(_NUM_CHATS):
            asked = {"role": "user", "content": f"Say {number}."}
            answer = {"role": "assistant", "content": f"{number}"}
            file.write(json.dumps({"messages": [asked, answer]}) + "\n")
    async with serving(short_dir, bytes=model) as served:

        async def recipe(name: str, **options: object) -> list[dict[str, Any]]:
            """Run a recipe. Returns: what it has logged of its steps."""
            values = {"model_name": "bytes", "renderer_name": "role_colon", **options}
            values |= {"base_url": served.url, "eval_every": 0, "log_path": name}
            words = [f"{key}={value}" for key, value in values.items()]
            module = f"tinker_cookbook.recipes.{name}.train"
            await ended(
                await served.start_sdk("-m", module, *words, python=COOKBOOK, cwd=short_dir)
            )
            lines = (short_dir / name / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line) for line in lines]

        rl = {"env": "arithmetic", "group_size": 4, "groups_per_batch": 8, "max_tokens": 8}
        rl |= {"save_every": 1}
        first = await recipe("math_rl", **rl, max_steps=2, behavior_if_log_dir_exists="delete")
        both = await recipe("math_rl", **rl, max_steps=3, behavior_if_log_dir_exists="resume")
        assert [step["step"] for step in first] == [0, 1]
        assert [step["step"] for step in both] == [0, 1, 2]
        assert all(abs(step["optim/kl_sample_train_v2"]) < 1e-6 for step in both)
        tuned = await recipe(
            "chat_sl",
            dataset=chats,
            batch_size=32,
            max_length=128,
            num_epochs=1,
            learning_rate=1e-2,
            save_every=0,
            behavior_if_log_dir_exists="delete",
        )
        losses = [step["train_mean_nll"] for step in tuned if "train_mean_nll" in step]
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.skipif(not TRL.exists(), reason="make test-sdks installs it")
async def test_trl_trains_on_what_the_mesh_draws_with_its_weights(short_dir: Path) -> None:
    model = await asyncio.to_thread(save_bytes_model, short_dir / "bytes")
    output = short_dir / "trained"
    async with serving(short_dir, bytes=model) as served:
        words = ["--model", model, "--output", output, "--run", served.mesh.run_dir]
        words += ["--phaseloom", Path(sys.executable).parent / "phaseloom", "--learning-rate", 1e-3]
        example = Path(__file__).parents[3] / "examples" / "trl_grpo.py"
        program = await served.start_sdk(str(example), *map(str, words), python=TRL)
        said = [json.loads(line) for line in (await ended(program)).splitlines()]
        async with open_bus(served.mesh.credentials.bus, "test") as bus:
            views = [
                await bus.keys.get(Bucket.VIEW, key) for key in await bus.keys.names(Bucket.VIEW)
            ]
            names = await bus.keys.names(Bucket.MODELS)
            registered = {name for name in names if await bus.keys.get(Bucket.MODELS, name)}
    drawn = [each for each in said if each["event"] == "drawn"]
    rewarded = [each for each in said if each["event"] == "rewarded"]
    steps = [each for each in said if each["event"] == "step"]
    assert [each["step"] for each in drawn] == [0, 1]
    assert [each["step"] for each in steps] == [1, 2]
    assert all(math.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in steps)
    for batch, scored in zip(drawn, rewarded, strict=True):
        assert len(batch["completion_ids"]) == 8
        assert scored["completion_ids"] == batch["completion_ids"]

    # Each batch is drawn with the weights that the trainer has at that step, and no others.
    for batch in drawn:
        errors = [
            await asyncio.to_thread(largest_error, output / f"step-{step}", batch)
            for step in range(3)
        ]
        assert [error < 1e-4 for error in errors] == [step == batch["step"] for step in range(3)]

    # Nothing of it stays on the mesh.
    assert registered == {"bytes", "tiny"}
    jobs = [decode(each.payload, JobStatus) for each in views if each is not None]
    assert {job.state for job in jobs} == {"done"}


def largest_error(directory: Path, batch: dict[str, Any]) -> float:
    """How far the told log-probabilities are from those of the saved model."""
    model: Any = loaded(directory)
    worst = 0.0
    for key in range(len(batch["completion_ids"])):
        prompt, drawn = batch["prompt_ids"][key], batch["completion_ids"][key]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1)[range(len(drawn)), drawn]
        worst = max(worst, float((own - torch.tensor(batch["logprobs"][key])).abs().max()))
    return worst
