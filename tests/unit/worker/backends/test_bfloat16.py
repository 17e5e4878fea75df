"""Weights in bfloat16: float32 masters and gradients, on one rank and several, sealed and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    AdamParams,
    Forward,
    ForwardBackward,
    Generate,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import Layout, OptimizerOn
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.backends.model import build_model
from phaseloom.worker.state.heap import Heap
from tests.support.pretrained import loaded, pinned, save_model
from tests.support.saved import load, save
from tests.support.versions import take, written
from tests.unit.worker.backends.models import batch, generate, running, spec
from tests.unit.worker.backends.ranks import Ranks
from tests.unit.worker.backends.test_fsdp import plain_loss

BF16: dict[str, Any] = {"dtype": "bfloat16", "initializer_range": 0.2}
SPEC = spec("fsdp", **BF16)
SAMPLER = spec("sampler", **BF16)
RATE = 1e-3
STEP = OptimStep(AdamParams(RATE, weight_decay=0.1, grad_clip_norm=1.0))
PROMPTS = [Prompt([3, 1, 4, 1, 5, 9], 1), Prompt([2], 2)]


@pytest.fixture
def policy() -> Iterator[tuple[Backend, Heap]]:
    with running(SPEC) as built:
        yield built


def _tensors(backend: Backend, heap: Heap, suffix: str = "") -> dict[str, torch.Tensor]:
    """Copies of the weights, or of what is kept beside them, by parameter."""
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    names = {slot.name for slot in backend.slots if slot.role is Role.WEIGHT}
    return {
        slot.name.removesuffix(suffix): torch.frombuffer(
            heap.buffer[slot.offset : slot.offset + slot.num_bytes], dtype=dtypes[slot.dtype]
        )
        .clone()
        .view(slot.shape)
        for slot in backend.slots
        if slot.name.removesuffix(suffix) in names and slot.name.endswith(suffix)
        if (slot.name in names) == (not suffix)
    }


def _train(trainer: Backend | Ranks, steps: int = 3) -> list[dict[str, float]]:
    seen = []
    for step in range(steps):
        for part in range(2):
            args = ForwardBackward(batch(2 * step + part), Loss.PPO)
            seen.append(trainer.forward_backward(args).metrics)
        seen.append(trainer.optim_step(STEP).metrics)
    return seen


def _check_rounded(backend: Backend, heap: Heap) -> None:
    masters = _tensors(backend, heap, ".master")
    for name, weight in _tensors(backend, heap).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(masters[name].to(torch.bfloat16), weight), name


def test_training_is_a_plain_loop_with_float32_masters(policy: tuple[Backend, Heap]) -> None:
    backend, heap = policy
    model: Any = build_model(SPEC.model)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [*masters.values()], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.data = masters[name].to(torch.bfloat16)
            masters[name].grad = torch.zeros_like(masters[name])
        for part in range(2):
            args = ForwardBackward(batch(2 * step + part), Loss.PPO)
            total = 0.0
            for datum in args.batch:
                loss = plain_loss(model, replace(args, batch=[datum]))
                torch.autograd.backward(loss)
                total += loss.item()
                for name, parameter in model.named_parameters():
                    gradient = masters[name].grad
                    assert gradient is not None
                    gradient += parameter.grad
                    parameter.grad = None
            metrics = backend.forward_backward(args).metrics
            assert metrics["loss:sum"] == pytest.approx(total, rel=2e-2, abs=0.1)
        gradients = _tensors(backend, heap, ".grad")
        for name, master in masters.items():
            assert master.grad is not None
            error = (gradients[name] - master.grad).norm() / master.grad.norm()
            assert error < 8e-2, name
        norm = torch.nn.utils.clip_grad_norm_([*masters.values()], 1.0)
        reported = backend.optim_step(STEP).metrics["grad_norm:mean"]
        assert reported == pytest.approx(norm.item(), rel=1e-2)
        optimizer.step()
    trained = _tensors(backend, heap, ".master")
    for name, master in masters.items():
        # Four steps, each of the learning rate at most, whatever its gradient's last bits.
        difference = (trained[name] - master).abs()
        assert difference.mean() < 0.1 * RATE, name
        assert difference.max() < 8.1 * RATE, name


def test_gradients_and_small_steps_add_up_where_bfloat16_would_lose_them(
    policy: tuple[Backend, Heap],
) -> None:
    """A step of 1e-5 is less than half the distance of two bfloat16 at 0.1."""
    backend, heap = policy
    data = batch(groups=1, samples=2, loss=Loss.CROSS_ENTROPY)
    args = ForwardBackward(data, Loss.CROSS_ENTROPY)
    backend.forward_backward(args)
    once = _tensors(backend, heap, ".grad")
    for _ in range(299):
        backend.forward_backward(args)
    for name, gradient in _tensors(backend, heap, ".grad").items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, 300 * once[name], rtol=1e-3, atol=1e-5)
    before = _tensors(backend, heap)
    backend.zero_gradients()
    for _ in range(100):
        backend.forward_backward(args)
        backend.optim_step(OptimStep(AdamParams(1e-5)))
    after = _tensors(backend, heap)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (after[name].float() - before[name].float()).abs()
    assert moved.mean() > 2e-4


def test_weights_are_the_masters_rounded_and_everything_reads_them(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    """Version, checkpoint, digest, sampler."""
    backend, heap = policy
    _check_rounded(backend, heap)
    with running(SAMPLER) as (sampler, other):
        assert sampler.weights_sha256() == backend.weights_sha256()
        _train(backend)
        _check_rounded(backend, heap)
        digest = save(backend, heap, tmp_path)
        assert digest == backend.weights_sha256() != sampler.weights_sha256()
        version = written(backend, heap)
        assert len(version) == other.num_bytes
        take(sampler, other, 0, version)
        assert sampler.weights_sha256() == digest
        # The same kernels on the same numbers, in training and sampling.
        assert sampler.forward(Forward(batch())) == backend.forward(Forward(batch()))
    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    weights = _tensors(backend, heap)
    assert {name for name, _ in model.named_parameters()} == set(weights)
    assert all(torch.equal(p.data, weights[name]) for name, p in model.named_parameters())
    stored = load_file(tmp_path / "training.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_samples_have_the_logprobs_of_transformers_in_bfloat16() -> None:
    with running(SAMPLER) as (sampler, heap):
        (result,) = generate(sampler, Generate(PROMPTS, SamplingParams(9, 1.0, [0]), 4))
        weights = _tensors(sampler, heap)
    model: Any = build_model(SPEC.model)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    for prompt, samples in zip(PROMPTS, result.sequences, strict=True):
        for sample in samples:
            answer, start = int32s(sample.tokens), len(prompt.tokens) - 1
            tokens = torch.tensor([int32s(prompt.tokens) + answer])
            with torch.no_grad():
                logits = model(input_ids=tokens[:, :-1]).logits[0, start:].float()
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(answer)[:, None])
            actual = torch.tensor(float32s(sample.logprobs))
            torch.testing.assert_close(actual, expected[:, 0], rtol=0, atol=0.08)


def test_lost_memory_and_a_reload_change_no_bit(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    backend, heap = policy
    _train(backend)
    save(backend, heap, tmp_path)
    expected = _train(backend), bytes(heap.buffer)
    load(backend, heap, tmp_path)
    assert (_train(backend), bytes(heap.buffer)) == expected
    load(backend, heap, tmp_path)
    content = bytes(heap.buffer)
    heap.release()
    heap.buffer[:] = content
    backend.weights_changed()
    assert bytes(heap.buffer) == content
    assert (_train(backend), bytes(heap.buffer)) == expected


def test_weights_that_come_alone_become_the_masters(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    """Of a checkpoint of a sampler, and of a version."""
    backend, heap = policy
    version = written(backend, heap)
    with running(SAMPLER) as (sampler, other):
        save(sampler, other, tmp_path)
    for comes_as_version in (True, False):
        _train(backend)
        if comes_as_version:
            take(backend, heap, 0, version)
        else:
            load(backend, heap, tmp_path)
        masters = _tensors(backend, heap, ".master")
        for name, weight in _tensors(backend, heap).items():
            assert torch.equal(masters[name], weight.float())


def test_state_of_another_dtype_is_refused(policy: tuple[Backend, Heap], tmp_path: Path) -> None:
    backend, heap = policy
    with running(spec("sampler")) as (sampler, other):
        save(sampler, other, tmp_path)
    with pytest.raises(CallerError) as raised:
        load(backend, heap, tmp_path)
    assert raised.value.info.code is Code.FAILED_PRECONDITION


def test_optimizer_in_host_memory_gives_the_same_bits(policy: tuple[Backend, Heap]) -> None:
    with running(replace(SPEC, optimizer_on=OptimizerOn.HOST)) as (backend, heap):
        host = Heap(backend.host_bytes)
        backend.use_host_memory(host.buffer)
        assert heap.num_bytes < 0.6 * policy[1].num_bytes
        assert _train(backend) == _train(policy[0])
        assert backend.weights_sha256() == policy[0].weights_sha256()
        assert bytes(heap.buffer) == bytes(policy[1].buffer[: heap.num_bytes])


@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_like_one_and_a_rerun_gives_the_same_bits(
    policy: tuple[Backend, Heap], dp: int, tmp_path: Path
) -> None:
    """Each rank's share of a gradient is rounded to bfloat16 before the shares are added up."""
    backend, heap = policy
    for name in ("start", "end"):
        (tmp_path / name).mkdir()
    ranks = Ranks(replace(SPEC, layout=Layout(dp=dp)), tmp_path)
    try:
        assert ranks.weights_sha256() == backend.weights_sha256()
        ranks.save(tmp_path / "start")
        expected, actual = _train(backend), _train(ranks)
        for one, other in zip(expected, actual, strict=True):
            assert other == pytest.approx(one, rel=2e-2, abs=5e-2)
        heaps, digest = ranks.heaps(), ranks.weights_sha256()
        ranks.save(tmp_path / "end")
        ranks.offload_between_calls(is_on=True)
        ranks.load(tmp_path / "start")
        assert _train(ranks) == actual
        assert ranks.heaps() == heaps
    finally:
        ranks.close()
    masters = _tensors(backend, heap, ".master")
    load(backend, heap, tmp_path / "end")
    assert backend.weights_sha256() == digest
    for name, trained in _tensors(backend, heap, ".master").items():
        difference = (trained - masters[name]).abs()
        # Three steps, each of the learning rate at most, whatever its gradient's last bits.
        assert difference.max() < 6.1 * RATE, name
        assert np.mean(difference.numpy()) < 0.1 * RATE, name
    _check_rounded(backend, heap)


def test_masters_of_a_registered_model_are_its_files_weights(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", torch.bfloat16)
    model = pinned(directory)
    model = replace(model, config={**model.config, "dtype": "bfloat16"})
    expected = loaded(directory).state_dict()
    with running(replace(SPEC, model=model)) as (backend, heap):
        assert model.pinned is not None
        pretrained.fill(heap, backend.slots, model)
        backend.weights_changed()
        masters = _tensors(backend, heap, ".master")
        for name, weight in _tensors(backend, heap).items():
            assert torch.equal(weight.float(), expected[name].float())
            assert torch.equal(masters[name], weight.float())
