"""Adapters under Megatron-core: the gradients of `fsdp`, the names of `peft`, and only they are
state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file

from phaseloom.common.contract.arrays import float32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import Datum, Forward
from phaseloom.common.contract.specs import Adapter, DeploymentSpec, Layout
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup
from phaseloom.worker.state.heap import Heap
from tests.support.megatron import EXPERTS, spec, tiny
from tests.support.pretrained import pinned, save_model
from tests.support.saved import load, save
from tests.support.versions import take
from tests.unit.worker.backends.megatron.test_backend import (
    STEP,
    Tensors,
    fill,
    lessons,
    ranks_of,
    train,
    view,
    worst,
)
from tests.unit.worker.backends.models import batch

ADAPTER = Adapter(rank=4, alpha=8.0, seed=5)
WITH_HEAD = replace(ADAPTER, targets=(*ADAPTER.targets, "lm_head"))
SOME = replace(ADAPTER, rank=3, targets=("q_proj", "v_proj", "up_proj"))


@dataclass(frozen=True)
class Case:
    layout: Layout
    adapter: Adapter = ADAPTER
    changes: tuple[tuple[str, Any], ...] = ()
    """Of the model's config."""


CASES = {
    "alone": Case(Layout()),
    "tp 2, with the head": Case(Layout(tp=2), WITH_HEAD),
    "tp 4, two key-value heads, some layers": Case(Layout(tp=4), SOME),
    "pp 2, untied head": Case(Layout(pp=2), WITH_HEAD, (("tie_word_embeddings", False),)),
    "dp 2": Case(Layout(dp=2)),
    "tp 2, cp 2": Case(Layout(tp=2, cp=2)),
    "tp 2, pp 2": Case(Layout(tp=2, pp=2), WITH_HEAD),
}


def deployment(case: Case, directory: Path, backend: str = "megatron") -> DeploymentSpec:
    model = replace(pinned(directory), adapter=case.adapter)
    is_megatron = backend == "megatron"
    layout = case.layout if is_megatron else Layout()
    return replace(spec(layout, backend=backend, trainable=backend != "sampler"), model=model)


def base(case: Case, directory: Path) -> Path:
    """The directory of a case's base, which is made there."""
    return save_model(directory / "model", **tiny(**dict(case.changes)))


@contextmanager
def alone(of: DeploymentSpec, directory: Path) -> Iterator[tuple[Backend, Heap]]:
    factory, place = backend_factory(of.backend), RankGroup(node_directory=str(directory))
    heap = Heap(factory.plan(of, place).heap_bytes)
    backend = factory(of, heap, place)
    yield backend, heap
    backend.close()


def tensors(backend: Backend, heap: Heap, role: Role, suffix: str = "") -> Tensors:
    return {
        slot.name.removesuffix(suffix): view(bytes(heap.buffer), slot)
        for slot in backend.slots
        if slot.role is role
    }


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_fsdp(name: str, tmp_path: Path) -> None:
    """From the same seed, accumulated over several operations, once a step has made B more than
    zero."""
    case = CASES[name]
    directory = base(case, tmp_path)
    with (
        alone(deployment(case, directory, "fsdp"), tmp_path) as (fsdp, heap),
        ranks_of(deployment(case, directory), tmp_path) as ranks,
    ):
        assert ranks.weights_sha256() == fsdp.weights_sha256()
        for args in lessons()[:1]:
            fsdp.forward_backward(args)
            ranks.forward_backward(args)
        norm = fsdp.optim_step(STEP).metrics["grad_norm:mean"]
        assert ranks.optim_step(STEP).metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-5)
        error, where = worst(ranks, tensors(fsdp, heap, Role.WEIGHT), Role.WEIGHT)
        assert error <= 1e-3, where
        fill(ranks, tensors(fsdp, heap, Role.WEIGHT))
        for args in lessons():
            expected = fsdp.forward_backward(args)
            found = ranks.forward_backward(replace(args, logprobs=True))
            assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-4)
            asked = Forward([Datum(each.tokens, each.targets) for each in args.batch])
            for ours, theirs in zip(found.logprobs, fsdp.forward(asked).logprobs, strict=True):
                assert float32s(ours) == pytest.approx(float32s(theirs), abs=1e-4)
        gradients = tensors(fsdp, heap, Role.GRADIENT, ".grad")
        error, where = worst(ranks, gradients, Role.GRADIENT, ".grad")
        assert error <= 1e-5, where


@pytest.mark.parametrize("name", ["tp 2, with the head", "tp 2, pp 2"])
def test_state_given_back_and_loaded_between_calls_changes_no_bit(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    with ranks_of(deployment(case, base(case, tmp_path)), tmp_path) as ranks:
        ranks.save(tmp_path)
        undisturbed = train(ranks), ranks.heaps()
        ranks.load(tmp_path)
        ranks.offload_between_calls(is_on=True)
        assert (train(ranks), ranks.heaps()) == undisturbed


def test_version_and_checkpoint_are_those_of_other_backends_and_of_peft(tmp_path: Path) -> None:
    """A sampler takes the version, fsdp and peft the checkpoint, and fsdp's comes back."""
    case = CASES["tp 2, pp 2"]
    directory = base(case, tmp_path)
    saved, again = tmp_path / "saved", tmp_path / "again"
    saved.mkdir()
    again.mkdir()
    with ranks_of(deployment(case, directory), tmp_path) as ranks:
        train(ranks)
        ranks.save(saved)
        digest = ranks.weights_sha256()
        expected = ranks.forward(Forward(scored := batch(5)[:2]))
        version = ranks.publish()
        with alone(deployment(case, directory, "fsdp"), tmp_path) as (fsdp, heap):
            load(fsdp, heap, saved)
            assert fsdp.weights_sha256() == digest
            found = fsdp.forward(Forward(scored))
            for ours, theirs in zip(expected.logprobs, found.logprobs, strict=True):
                assert float32s(ours) == pytest.approx(float32s(theirs), abs=1e-4)
            fsdp.forward_backward(lessons()[1])
            fsdp.optim_step(STEP)
            save(fsdp, heap, again)
            trained = fsdp.weights_sha256()
        with alone(deployment(case, directory, "sampler"), tmp_path) as (sampler, memory):
            take(sampler, memory, 0, version)
            assert sampler.weights_sha256() == digest
        files = load_file(saved / "adapter_model.safetensors")
        error, where = worst(ranks, files, Role.WEIGHT)
        assert error == 0, where
        ranks.load(again)
        assert ranks.weights_sha256() == trained
        ranks.sync(version)
        assert ranks.publish() == version


def test_bfloat16_matrices_are_their_masters_rounded(tmp_path: Path) -> None:
    case = Case(Layout(tp=2), changes=(("dtype", "bfloat16"),))
    directory = base(Case(Layout()), tmp_path)
    own = deployment(case, directory)
    own = replace(own, model=replace(own.model, config={**own.model.config, "dtype": "bfloat16"}))
    on_one = replace(own, backend="fsdp", layout=Layout())
    with ranks_of(own, tmp_path) as ranks, alone(on_one, tmp_path) as (fsdp, _):
        assert ranks.weights_sha256() == fsdp.weights_sha256()
        norms = []
        for backend in (ranks, fsdp):
            for args in lessons()[:2]:
                backend.forward_backward(args)
            norms.append(backend.optim_step(STEP).metrics["grad_norm:mean"])
        assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_adapter_on_a_model_with_experts_is_refused() -> None:
    experts = spec(model=EXPERTS)
    refused = replace(experts, model=replace(experts.model, adapter=ADAPTER))
    with pytest.raises(CallerError, match="experts") as raised:
        backend_factory("megatron").plan(refused, RankGroup())
    assert raised.value.info.field == "model.adapter"
    assert raised.value.info.code is Code.FAILED_PRECONDITION
    assert raised.value.info.remedy
