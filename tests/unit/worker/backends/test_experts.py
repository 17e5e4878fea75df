"""Models with experts: a tensor an expert in states, versions and checkpoints, fused in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    AdamParams,
    Forward,
    ForwardBackward,
    Loss,
    OptimStep,
)
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import backend_factory, pretrained
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.state.heap import Heap
from tests.support.pretrained import pinned
from tests.support.saved import load, save
from tests.support.versions import take, written
from tests.unit.worker.backends.models import batch, running, spec

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
STEP = OptimStep(AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=1.0))


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def policy(dtype: str) -> Iterator[tuple[Backend, Heap]]:
    with running(spec("fsdp", dtype=dtype, **MOE)) as built:
        yield built


def _train(backend: Backend) -> list[dict[str, float]]:
    seen = []
    for seed in range(3):
        args = ForwardBackward(batch(seed), Loss.PPO)
        seen += [backend.forward_backward(args).metrics, backend.optim_step(STEP).metrics]
    return seen


def test_slots_are_the_files_tensors(policy: tuple[Backend, Heap], tmp_path: Path) -> None:
    """Twelve experts: by name the eleventh comes before the third."""
    backend, heap = policy
    _train(backend)
    digest = save(backend, heap, tmp_path)
    assert digest == backend.weights_sha256()
    names = [slot.name for slot in backend.slots if slot.role is Role.WEIGHT]
    assert names == sorted(names) == [slot.name for slot in backend.version_slots]
    assert "model.layers.1.mlp.experts.11.up_proj.weight" in names
    assert not any("gate_up_proj" in slot.name for slot in backend.slots)
    assert set(load_file(tmp_path / "model.safetensors")) == set(names)
    training = set(load_file(tmp_path / "training.safetensors"))
    assert {f"{name}.exp_avg" for name in names} < training


def test_version_and_checkpoint_come_back_bit_equal(
    policy: tuple[Backend, Heap], dtype: str, tmp_path: Path
) -> None:
    backend, heap = policy
    _train(backend)
    save(backend, heap, tmp_path)
    expected = _train(backend), bytes(heap.buffer)
    with running(spec("sampler", dtype=dtype, **MOE)) as (sampler, other):
        assert sampler.version_slots == backend.version_slots
        take(sampler, other, 0, written(backend, heap))
        assert sampler.weights_sha256() == backend.weights_sha256()
        assert sampler.forward(Forward(batch())) == backend.forward(Forward(batch()))
    load(backend, heap, tmp_path)
    assert (_train(backend), bytes(heap.buffer)) == expected


def test_registered_model_is_read_from_its_files(
    policy: tuple[Backend, Heap], dtype: str, tmp_path: Path
) -> None:
    backend, heap = policy
    _train(backend)
    save(backend, heap, tmp_path)
    model = pinned(tmp_path)
    model = replace(model, config={**model.config, "dtype": dtype})
    with running(replace(spec("sampler"), model=model)) as (sampler, other):
        assert model.pinned is not None
        pretrained.fill(other, sampler.slots, model)
        assert sampler.weights_sha256() == backend.weights_sha256()


def test_what_cannot_be_laid_out_is_refused() -> None:
    changes = {**MOE, "moe_intermediate_size": 3, "hidden_size": 24}
    with pytest.raises(CallerError) as raised:
        backend_factory("fsdp").plan(spec("fsdp", dtype="bfloat16", **changes))
    assert raised.value.info.code is Code.FAILED_PRECONDITION
    assert raised.value.info.field == "model.config"
