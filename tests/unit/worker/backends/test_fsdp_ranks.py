"""Two real ranks on gloo train like one: shards, sums, uneven shares, lost memory, lost peers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from phaseloom.common.contract.arrays import float32s
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Loss,
    OptimStep,
)
from phaseloom.common.contract.specs import DeploymentSpec, Layout
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, GroupBroken, RankGroup
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.state.heap import Heap
from tests.support.saved import load, save
from tests.support.versions import take, written
from tests.unit.worker.backends.models import batch, running, spec
from tests.unit.worker.backends.rank_child import Step, Train
from tests.unit.worker.backends.ranks import Ranks

STEP = OptimStep(AdamParams(1e-2, weight_decay=0.1, grad_clip_norm=1.0))
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
"""Five experts: two ranks have three and two of them."""
CHANGES: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS}
PAIR = Layout(dp=2)


@pytest.fixture(scope="module", params=CHANGES)
def policy(request: pytest.FixtureRequest) -> DeploymentSpec:
    """29 token ids, a prime: its embedding cannot be sharded evenly."""
    return spec("fsdp", **CHANGES[request.param])


@pytest.fixture(scope="module")
def pair(policy: DeploymentSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(replace(policy, layout=PAIR), tmp_path_factory.mktemp("pair"))
    yield ranks
    ranks.close()


@pytest.fixture
def both(policy: DeploymentSpec, pair: Ranks, tmp_path: Path) -> Iterator[tuple[Backend, Heap]]:
    """One rank, and the pair in the same state: the initial one."""
    with running(policy) as (backend, heap):
        save(backend, heap, tmp_path)
        pair.load(tmp_path)
        yield backend, heap


@pytest.fixture
def alone(both: tuple[Backend, Heap]) -> Backend:
    return both[0]


def _steps() -> list[list[ForwardBackward]]:
    """Steps of accumulated batches of all losses: one whose samples differ much in length, one of
    a single sample, which leaves a rank without any, and one without loss on a rank."""
    long = Datum([3] * 40, [4] * 40, weights=[0.5, -0.25] * 20)
    quiet = [Datum([1, 2], [2, 3], weights=[0.0, 0.0]), *batch(9, loss=Loss.CROSS_ENTROPY)[:1]]
    stale = [replace(datum, staleness=i) for i, datum in enumerate(batch(2))]
    return [
        [ForwardBackward(batch(1), Loss.PPO), ForwardBackward(stale, Loss.CISPO, entropy=True)],
        [
            ForwardBackward([long, *batch(3, loss=Loss.CROSS_ENTROPY)], Loss.CROSS_ENTROPY),
            ForwardBackward(batch(4)[:1], Loss.IMPORTANCE_SAMPLING),
        ],
        [ForwardBackward(quiet, Loss.CROSS_ENTROPY)],
    ]


def _train(trainer: Backend | Ranks) -> list[dict[str, float]]:
    seen = []
    for step in _steps():
        seen += [trainer.forward_backward(args).metrics for args in step]
        seen.append(trainer.optim_step(STEP).metrics)
    return seen


def _version(backend: Backend, heap: Heap) -> dict[str, npt.NDArray[np.float32]]:
    return _arrays(written(backend, heap), backend.version_slots)


def _arrays(content: bytes, slots: list[TensorSlot]) -> dict[str, npt.NDArray[np.float32]]:
    return {
        slot.name: np.frombuffer(
            content[slot.offset : slot.offset + slot.num_bytes], dtype="<f4"
        ).reshape(slot.shape)
        for slot in slots
    }


def test_two_ranks_train_like_one(pair: Ranks, both: tuple[Backend, Heap]) -> None:
    """Losses, norms and weights; averaged gradients would halve every norm."""
    alone, heap = both
    for expected, actual in zip(_train(alone), _train(pair), strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights = _version(alone, heap)
    for name, trained in _arrays(pair.publish(), alone.version_slots).items():
        np.testing.assert_allclose(trained, weights[name], rtol=1e-3, atol=1e-5)


def test_forward_over_ranks_keeps_the_order(pair: Ranks, alone: Backend) -> None:
    for data in (batch(5), batch(5)[:1]):
        expected, actual = alone.forward(Forward(data)), pair.forward(Forward(data))
        for one, other in zip(expected.logprobs, actual.logprobs, strict=True):
            assert float32s(other) == pytest.approx(float32s(one), abs=1e-4)


@pytest.mark.usefixtures("alone")
def test_lost_memory_between_calls_changes_no_bit(pair: Ranks, tmp_path: Path) -> None:
    pair.save(tmp_path)
    undisturbed = _train(pair), pair.heaps()
    pair.load(tmp_path)
    pair.offload_between_calls(is_on=True)
    try:
        assert (_train(pair), pair.heaps()) == undisturbed
    finally:
        pair.offload_between_calls(is_on=False)


def test_digest_and_version_are_of_the_whole_weights(
    policy: DeploymentSpec, pair: Ranks, alone: Backend
) -> None:
    assert pair.weights_sha256() == alone.weights_sha256()
    pair.forward_backward(_steps()[0][0])
    pair.optim_step(STEP)
    version = pair.publish()
    assert pair.weights_sha256() != alone.weights_sha256()
    assert pair.weights_sha256() == weights_sha256(_arrays(version, alone.version_slots).items())
    sampler_spec = replace(policy, backend="sampler", trainable=False)
    with running(sampler_spec) as (sampler, heap):
        assert sampler.version_slots == alone.version_slots
        assert len(version) == heap.num_bytes
        take(sampler, heap, 0, version)
        assert sampler.weights_sha256() == pair.weights_sha256()
        assert written(sampler, heap) == version


def test_version_comes_back_to_every_rank(pair: Ranks, both: tuple[Backend, Heap]) -> None:
    alone, memory = both
    before, heaps = pair.publish(), pair.heaps()
    pair.forward_backward(_steps()[0][0])
    pair.optim_step(STEP)
    assert pair.publish() != before
    pair.sync(before)
    assert pair.publish() == before
    for heap, old, slots in zip(pair.heaps(), heaps, pair.slots, strict=True):
        weights = [slot for slot in slots if slot.role is Role.WEIGHT]
        stop = weights[-1].offset + weights[-1].num_bytes
        assert heap[:stop] == old[:stop]
    take(alone, memory, 0, before)
    assert alone.weights_sha256() == pair.weights_sha256()


def test_checkpoint_loads_under_another_layout(
    pair: Ranks, both: tuple[Backend, Heap], tmp_path: Path
) -> None:
    """Mid-accumulation, moments and step included: two ranks to one, and back again."""
    alone, heap = both
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    _train(pair)
    pair.forward_backward(_steps()[0][0])
    pair.save(first)
    heaps = pair.heaps()
    load(alone, heap, first)
    assert alone.weights_sha256() == pair.weights_sha256()
    save(alone, heap, second)
    for name in ("model.safetensors", "training.safetensors"):
        saved, again = load_file(first / name), load_file(second / name)
        assert saved.keys() == again.keys()
        assert all(np.array_equal(saved[key], again[key]) for key in saved)
    expected = alone.optim_step(STEP).metrics
    assert pair.optim_step(STEP).metrics == pytest.approx(expected, rel=1e-4)
    pair.load(second)
    assert pair.heaps() == heaps


def test_heaps_hold_the_shards_and_nothing_else(
    policy: DeploymentSpec, pair: Ranks, alone: Backend
) -> None:
    """Half the rows of each tensor; of experts, which are several tensors, half of these."""
    whole = {slot.name: slot.shape for slot in alone.slots}
    first, second = ({slot.name: slot.shape for slot in slots} for slots in pair.slots)
    assert first.keys() | second.keys() == whole.keys()
    for name, shape in whole.items():
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            assert (first.get(name), second.get(name)) == (
                (shape, None) if expert < 3 else (None, shape)
            )
        elif shape:
            assert first[name][0] + second[name][0] == shape[0]
            assert first[name][0] == -(-shape[0] // 2)
    factory, halved = backend_factory("fsdp"), replace(policy, layout=PAIR)
    sizes = [factory.plan(halved, RankGroup(rank, 2)).heap_bytes for rank in (0, 1)]
    assert sizes[0] == sizes[1] < 0.65 * factory.plan(policy).heap_bytes


def test_all_ranks_fail_alike_when_one_has_a_loss_that_overflows(
    pair: Ranks, both: tuple[Backend, Heap], tmp_path: Path
) -> None:
    """And all are ready for the next operation: none waits for another."""
    alone, heap = both
    fine = Datum([1, 2], [2, 3], logprobs=[0.0, -1.0], advantages=[0.0, 1.0])
    huge = Datum([1, 2], [2, 3], logprobs=[0.0, -1e4], advantages=[0.0, 1.0])
    for rank, data in enumerate((fine, huge)):
        pair.send(rank, Train(ForwardBackward([data], Loss.IMPORTANCE_SAMPLING)))
    errors = [pair.receive(rank).error for rank in (0, 1)]
    assert [error and error.field for error in errors] == ["args.batch"] * 2
    save(alone, heap, tmp_path)
    pair.load(tmp_path)
    assert pair.weights_sha256() == alone.weights_sha256()


def test_rank_whose_peers_never_come_gives_up_after_the_timeout(tmp_path: Path) -> None:
    first = RankGroup(0, 2, str(tmp_path / "store"), timeout_s=0.5)
    factory, deployment = backend_factory("fsdp"), replace(spec("fsdp"), layout=PAIR)
    heap = Heap(factory.plan(deployment, first).heap_bytes)
    with pytest.raises(GroupBroken, match="not all 2 ranks"):
        factory(deployment, heap, first)


def test_killed_rank_breaks_the_group_and_hangs_nobody(pair: Ranks) -> None:
    """The last test of each pair: it spoils it."""
    pair.ranks[1].close()
    for _ in range(2):
        pair.send(0, Step(STEP))
        error = pair.receive(0).error
        assert error is not None
        assert error.code is Code.UNAVAILABLE
        assert "another rank" in error.message
