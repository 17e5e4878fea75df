"""The Tinker SDK on a gateway whose models Megatron-core trains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.support import megatron
from tests.support.gateway import check_whole, serving
from tests.support.pretrained import save_model

pytestmark = [pytest.mark.megatron, megatron.needs_megatron_python, pytest.mark.timeout(300)]


@pytest.mark.parametrize("part", ["whole", "full"])
async def test_sdk_trains_samples_saves_and_goes_on(
    part: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASELOOM_GATEWAY_TRAIN_BACKEND", "megatron")
    await asyncio.to_thread(save_model, short_dir / "model", torch.float32, **megatron.tiny())
    async with serving(short_dir, interpreters={"megatron": str(megatron.PYTHON)}) as served:
        said = await served.sdk(part)
        check_whole(said)
