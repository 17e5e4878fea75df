"""The optimizer on state that lives in host memory: the same bits as on the device's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import AdamParams, ForwardBackward, Loss, OptimStep
from phaseloom.common.contract.specs import OptimizerOn
from phaseloom.common.contract.state_layout import Role, extent_bytes, host_start
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.backends.optimizer import (
    Hyperparameters,
    Moments,
    take_step,
    take_step_in_pieces,
)
from phaseloom.worker.state.heap import ALIGNMENT_BYTES, Heap
from tests.unit.worker.backends.models import batch, running, spec

STEP = OptimStep(AdamParams(1e-3, weight_decay=0.1, grad_clip_norm=1.0))
ON_HOST = replace(spec(), optimizer_on=OptimizerOn.HOST)
SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    min_size=1,
    max_size=8,
)


@contextmanager
def on_host() -> Iterator[tuple[Backend, Heap, Heap]]:
    """The backend, its device memory, and what it works on in host memory."""
    with running(ON_HOST) as (backend, heap):
        host = Heap(backend.host_bytes)
        backend.use_host_memory(host.buffer)
        yield backend, heap, host


def step(backend: Backend, seed: int) -> None:
    backend.forward_backward(ForwardBackward(batch(seed), Loss.PPO))
    backend.optim_step(STEP)


@given(SHAPES, st.integers(1, 4))
def test_plan_puts_moments_behind_the_heap(shapes: dict[str, list[int]], num_ranks: int) -> None:
    ranks = RankGroup(num_ranks - 1, num_ranks)
    whole = plan(shapes, trainable=True, ranks=ranks)
    split = plan(shapes, trainable=True, ranks=ranks, optimizer_on=OptimizerOn.HOST)
    assert split.slots[: 2 * len(shapes)] == whole.slots[: 2 * len(shapes)]
    assert whole.host_bytes == 0
    size = extent_bytes(split.heap_bytes, split.host_bytes)
    for slot in split.slots:
        is_behind = slot.offset >= host_start(split.heap_bytes)
        assert is_behind == (slot.role is Role.OPTIMIZER)
        assert slot.offset % ALIGNMENT_BYTES == 0
        assert slot.offset + slot.num_bytes <= (size if is_behind else split.heap_bytes)
    moved = {slot.name: slot.offset for slot in split.slots if slot.role is Role.OPTIMIZER}
    stayed = {slot.name: slot.offset for slot in whole.slots if slot.role is Role.OPTIMIZER}
    assert len({moved[name] - stayed[name] for name in moved}) == 1


def test_training_gives_the_same_bits_and_half_the_device_memory() -> None:
    with running(spec()) as (plain, whole), on_host() as (backend, heap, host):
        for seed in range(4):
            step(plain, seed)
            content = bytes(heap.buffer)
            heap.release()
            assert not any(heap.buffer)
            heap.buffer[:] = content  # a switch in between
            step(backend, seed)
        assert backend.weights_sha256() == plain.weights_sha256()
        assert heap.num_bytes + host.num_bytes == whole.num_bytes
        assert whole.num_bytes / 2 <= heap.num_bytes + ALIGNMENT_BYTES
        assert whole.buffer[: heap.num_bytes] == heap.buffer
        assert whole.buffer[heap.num_bytes :] == host.buffer


def test_heap_and_host_memory_are_the_whole_state() -> None:
    with on_host() as (first, heap, host), on_host() as (second, other, other_host):
        step(first, 0)
        first.forward_backward(ForwardBackward(batch(1), Loss.PPO))
        other.buffer[:] = heap.buffer
        other_host.buffer[:] = host.buffer
        for backend in (first, second):
            backend.optim_step(STEP)
        assert heap.buffer == other.buffer
        assert host.buffer == other_host.buffer


@pytest.mark.parametrize("backend", ["fsdp", "sampler"])
def test_optimizer_on_the_host_is_refused_where_there_is_none(backend: str) -> None:
    asked = replace(spec(backend, trainable=False), optimizer_on=OptimizerOn.HOST)
    with pytest.raises(CallerError) as raised:
        backend_factory(backend).plan(asked)
    assert (raised.value.info.code, raised.value.info.field) == (
        Code.FAILED_PRECONDITION,
        "optimizer_on",
    )


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**31))
def test_step_in_pieces_equals_the_step_in_one(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    adam = Hyperparameters(1e-2, 0.9, 0.95, 1e-8, 0.1)
    states = []
    start = torch.randn(4, size, generator=generator)
    for steps_in_pieces in (False, True):
        weights, gradients, exp_avg, exp_avg_sq = start.clone().abs()
        moments = Moments(exp_avg, exp_avg_sq, torch.zeros(()))
        for _ in range(3):
            if steps_in_pieces:
                take_step_in_pieces(weights, gradients, moments, adam, piece=64)
            else:
                take_step(weights, gradients, moments, adam)
        assert moments.step.item() == 3
        states.append(torch.stack([weights, exp_avg, exp_avg_sq]))
    assert torch.equal(*states)
    assert not torch.equal(states[0][0], start[0].abs())
