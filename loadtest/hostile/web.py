"""A flood through the gateway, and a victim of another tenant there."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import aiohttp

from loadtest.hostile.floods import VICTIM_RATE, Latencies

_TEXT = "the quick brown fox jumps over the lazy dog 12 " * 350_000
"""16 MiB of text, far above the context of the model."""
_REQUESTS = 6
_BURSTS = 3
"""A body is in the memory of one or two replicas, depending on which of them accepts it. Several
bursts make the peak of a flood independent of that."""
_NO_ANSWER = 0
_TIMEOUT = aiohttp.ClientTimeout(total=120)


async def long_text(url: str, key: str, model: str) -> int:
    """Completions of prompts that are much too long. Returns: how many were refused with 400."""
    body = json.dumps(_body(model, _TEXT)).encode()
    statuses: list[int] = []
    for _ in range(_BURSTS):
        async with _session(url, key) as session:
            bodies = [io.BytesIO(body) for _ in range(_REQUESTS)]
            statuses += await asyncio.gather(*(_complete(session, data) for data in bodies))
    return statuses.count(400)


async def web_victim(url: str, key: str, model: str, stop: asyncio.Event) -> Latencies:
    """Complete short prompts at a steady rate until `stop` is set."""
    taken_s: list[float] = []
    statuses: list[int] = []
    async with _session(url, key) as session, asyncio.TaskGroup() as group:

        async def measured(due_s: float) -> None:
            statuses.append(await _complete(session, json.dumps(_body(model, [1, 2, 3])).encode()))
            taken_s.append(time.perf_counter() - due_s)

        due_s = time.perf_counter()
        while not stop.is_set():
            due_s += 1 / VICTIM_RATE
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(measured(due_s))
    return Latencies(taken_s, [], len(statuses) - statuses.count(200))


def _session(url: str, key: str) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {key}"}
    return aiohttp.ClientSession(url, headers=headers, timeout=_TIMEOUT)


def _body(model: str, prompt: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 1}


async def _complete(session: aiohttp.ClientSession, body: bytes | io.BytesIO) -> int:
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post("/v1/completions", data=body, headers=headers) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return _NO_ANSWER


def save_model(directory: Path) -> Path:
    """Save a tiny model with a tokenizer. Returns: its directory."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer: Any = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = byte_level
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT[:1000]], trainer)
    torch.manual_seed(1)
    settings = AutoConfig.for_model(
        "qwen3",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=0,
    )
    factory: Any = AutoModelForCausalLM
    factory.from_config(settings, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
