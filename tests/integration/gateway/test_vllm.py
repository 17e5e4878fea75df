"""The Tinker SDK on a gateway whose samplers are vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.support import vllm
from tests.support.gateway import serving
from tests.support.pretrained import save_model

pytestmark = [pytest.mark.vllm, vllm.needs_vllm_python, pytest.mark.timeout(300)]


async def test_reward_of_an_adapter_rises_through_the_sdk(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's samples are drawn with the adapter that the step before has saved, which the one
    sampler of the base reads by its name."""
    monkeypatch.setenv("PHASELOOM_GATEWAY_ROLLOUT_BACKEND", "vllm")
    monkeypatch.setenv("PHASELOOM_GATEWAY_SCRATCH_BYTES", str(vllm.SCRATCH_BYTES))
    await asyncio.to_thread(save_model, short_dir / "model", torch.float32, **vllm.tiny())
    async with serving(short_dir, interpreters={"vllm": str(vllm.PYTHON)}) as served:
        rewards = (await served.sdk("reward", "8"))["rewards"]
        assert rewards[-1] > rewards[0] + 0.6, rewards
