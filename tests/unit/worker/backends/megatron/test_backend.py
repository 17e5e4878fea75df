"""Megatron-core in real ranks on gloo: the gradients of transformers in every layout, the same bits
each time, and weights that any other backend can take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

from loadtest.gpu import backends
from phaseloom.common.contract.arrays import float32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import DeploymentSpec, Layout, OptimizerOn
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import GroupBroken, RankGroup
from phaseloom.worker.backends.batch import loss_batch, without_loss
from phaseloom.worker.backends.model import build_model
from phaseloom.worker.backends.modelnames import saved_shapes
from phaseloom.worker.backends.packing import passes
from phaseloom.worker.state.heap import Heap
from tests.support.megatron import EXPERTS, spec, tiny
from tests.support.saved import load, save
from tests.support.tinymodel import VOCAB
from tests.support.versions import take
from tests.unit.worker.backends.models import batch, running
from tests.unit.worker.backends.rank_child import Fill, Step
from tests.unit.worker.backends.ranks import Ranks
from tests.unit.worker.backends.test_fsdp import off_policy, plain_loss, plain_metrics

STEP = OptimStep(AdamParams(1e-2, eps=1e-3, weight_decay=0.1, grad_clip_norm=1.0))
"""With an eps that keeps gradients of nearly zero from making steps of a whole learning rate."""
FOUR_LAYERS = tiny(num_hidden_layers=4)
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "alone": (Layout(), tiny()),
    "tp 2": (Layout(tp=2), tiny()),
    "pp 2": (Layout(pp=2), tiny()),
    "dp 2": (Layout(dp=2), tiny()),
    "tp 2, pp 2": (Layout(tp=2, pp=2), FOUR_LAYERS),
    "pp 2, untied": (Layout(pp=2), tiny(tie_word_embeddings=False)),
    "tp 4, two key-value heads": (Layout(tp=4), tiny()),
    "experts, alone": (Layout(), EXPERTS),
    "experts, ep 2": (Layout(dp=2, ep=2), EXPERTS),
    "experts, dp 4, ep 2": (Layout(dp=4, ep=2), EXPERTS),
    "experts, ep 2, pp 2": (Layout(dp=2, ep=2, pp=2), EXPERTS),
    "experts, tp 2": (Layout(tp=2), EXPERTS),
    "experts, tp 2, ep 2": (Layout(tp=2, ep=2), EXPERTS),
    "experts, cp 2": (Layout(cp=2), EXPERTS),
    "experts, cp 2, ep 2": (Layout(cp=2, ep=2), EXPERTS),
    "experts, dp 2, tp 2, ep 2": (Layout(dp=2, tp=2, ep=2), EXPERTS),
    "cp 2": (Layout(cp=2), tiny()),
    "cp 2, tp 2": (Layout(cp=2, tp=2), tiny()),
    "cp 2, pp 2": (Layout(cp=2, pp=2), tiny()),
    "dp 2, tp 2, llama": (Layout(dp=2, tp=2), tiny("llama", rope_parameters=LLAMA3)),
    "tp 2, qwen2 with biases": (Layout(tp=2), tiny("qwen2", rope_parameters=LINEAR)),
    "mistral, alone": (Layout(), tiny("mistral", sliding_window=None)),
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 128,
}
"""Sizes as a CPU likes them, of what a GPU is checked with."""
Tensors = Mapping[str, torch.Tensor]


def by_file(model: Any, named: Iterable[tuple[str, torch.Tensor]] | None = None) -> Tensors:
    """A model's parameters, or tensors of their names, as files name them: experts one by one."""
    shapes = saved_shapes(model)
    named = model.named_parameters() if named is None else named
    return dict(part for name, tensor in named for part in shapes.split(name, tensor))


@contextmanager
def ranks_of(deployment: DeploymentSpec, directory: Path) -> Iterator[Ranks]:
    """Its ranks. Megatron warns of everything optional that is not installed."""
    ranks = Ranks(deployment, directory, warnings="ignore")
    try:
        yield ranks
    finally:
        ranks.close()


def sharp_model(deployment: DeploymentSpec) -> PreTrainedModel:
    """A model whose attention is sharp and whose norms and biases differ from element to element:
    an error of where something lies shows."""
    model = build_model(deployment.model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(4)
    return model


def inside(slot: TensorSlot) -> tuple[slice, ...]:
    start = slot.start or [0] * len(slot.shape)
    return tuple(slice(at, at + size) for at, size in zip(start, slot.shape, strict=True))


def view(heap: bytes | bytearray, slot: TensorSlot) -> torch.Tensor:
    memory = memoryview(heap)[slot.offset : slot.offset + slot.num_bytes]
    return torch.from_numpy(np.frombuffer(memory, np.float32)).view(slot.shape)


def fill(ranks: Ranks, tensors: Tensors) -> None:
    """Replace all ranks' weights by their slices of these."""
    contents = []
    for slots, heap in zip(ranks.slots, ranks.heaps(), strict=True):
        memory = bytearray(heap)
        for slot in slots:
            if slot.role is Role.WEIGHT:
                view(memory, slot).copy_(tensors[slot.name].detach()[inside(slot)])
        contents.append(bytes(memory))
    ranks.ask([Fill(content) for content in contents])


def worst(ranks: Ranks, expected: Tensors, role: Role, suffix: str = "") -> tuple[float, str]:
    """The largest error of any rank's slice, as a share of its tensor's largest element."""
    errors = []
    for slots, heap in zip(ranks.slots, ranks.heaps(), strict=True):
        for slot in slots:
            if slot.role is role:
                whole = expected[slot.name.removesuffix(suffix)].detach()
                error = (view(heap, slot) - whole[inside(slot)]).abs().max() / whole.abs().max()
                errors.append((float(error), slot.name))
    return max(errors)


def of_lengths(*lengths: int) -> list[Datum]:
    """Samples that have nothing in common, of lengths too different to share a pass."""
    data = []
    for number, length in enumerate(length for length in lengths for _ in range(4)):
        tokens = [(2 * number + 3 * i) % VOCAB for i in range(length + 1)]
        weights = [0.01 * (i % 7) - 0.02 for i in range(length)]
        data.append(Datum(tokens[:-1], tokens[1:], weights=weights))
    return data


def lessons() -> list[ForwardBackward]:
    """Batches of all losses; one of more passes than a pipeline has stages; of the last, one sample
    only: a replica has none."""
    long = Datum([3] * 40, [4] * 40, weights=[0.5, -0.25] * 20)
    return [
        off_policy(Loss.PPO, 1),
        ForwardBackward([long, *batch(3, loss=Loss.CROSS_ENTROPY)], Loss.CROSS_ENTROPY),
        ForwardBackward(of_lengths(62, 1, 30), Loss.CROSS_ENTROPY),
        off_policy(Loss.CISPO, 2),
        ForwardBackward(batch(4)[:1], Loss.IMPORTANCE_SAMPLING),
    ]


def test_some_lesson_has_more_passes_than_stages() -> None:
    counts = [len([*passes(loss_batch(args, VOCAB), only_used=True)]) for args in lessons()]
    assert max(counts) >= 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Accumulated over several operations, then stepped with: what is replicated counts once."""
    layout, config = LAYOUTS[name]
    deployment = spec(layout, config)
    model = sharp_model(deployment)
    adam = STEP.adam
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
    )
    with ranks_of(deployment, tmp_path) as ranks:
        fill(ranks, by_file(model))
        for args in lessons():
            expected = plain_loss(model, args)
            torch.autograd.backward(expected)
            metrics = ranks.forward_backward(args).metrics
            assert metrics.pop("loss:sum") == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
            if args.loss is not Loss.CROSS_ENTROPY:
                defined = plain_metrics(model, args)
                assert metrics == pytest.approx({name: defined[name] for name in metrics}, rel=1e-3)
                assert ("entropy:sum" in metrics) == args.entropy
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        gradients = by_file(model, named)
        error, where = worst(ranks, gradients, Role.GRADIENT, ".grad")
        assert error <= 1e-5, where
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), adam.grad_clip_norm)
        stepped = ranks.optim_step(STEP).metrics
        assert stepped["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        error, where = worst(ranks, by_file(model), Role.WEIGHT)
        assert error <= 1e-3, where


def train(ranks: Ranks) -> list[Any]:
    seen: list[Any] = []
    for args in lessons()[:2]:
        seen.append(ranks.forward_backward(args).metrics)
        seen.append(ranks.optim_step(STEP).metrics)
        seen.append(ranks.forward(Forward(batch(9))))
    return seen


@pytest.mark.parametrize("name", ["tp 2, pp 2", "dp 2, tp 2, llama", "experts, ep 2", "cp 2"])
def test_state_given_back_and_loaded_between_calls_changes_no_bit(
    name: str, tmp_path: Path
) -> None:
    """Two runs from the same state, the second with its memory given back between any two calls."""
    with ranks_of(spec(*LAYOUTS[name]), tmp_path) as ranks:
        ranks.save(tmp_path)
        undisturbed = train(ranks), ranks.heaps()
        ranks.load(tmp_path)
        ranks.offload_between_calls(is_on=True)
        assert (train(ranks), ranks.heaps()) == undisturbed


@pytest.mark.parametrize(
    "name", ["tp 2, pp 2", "tp 4, two key-value heads", "dp 2", "experts, ep 2"]
)
def test_version_and_checkpoint_are_those_of_any_other_backend(name: str, tmp_path: Path) -> None:
    """A sampler takes the version, fsdp and transformers the checkpoint, and fsdp's comes back."""
    layout, model = LAYOUTS[name]
    other = spec(model=model, backend="fsdp")
    saved, again = tmp_path / "saved", tmp_path / "again"
    saved.mkdir()
    again.mkdir()
    with ranks_of(spec(layout, model), tmp_path) as ranks:
        with running(other) as (fsdp, heap):
            drawn = fsdp.weights_sha256()
            assert ranks.weights_sha256() == drawn, "from the same seed"
            ranks.forward_backward(lessons()[0])
            ranks.optim_step(STEP)
            ranks.save(saved)
            load(fsdp, heap, saved)
            assert fsdp.weights_sha256() == ranks.weights_sha256()
            assert fsdp.weights_sha256() != drawn
            expected = float32s(fsdp.forward(Forward(batch(5)[:1])).logprobs[0])
            found = float32s(ranks.forward(Forward(batch(5)[:1])).logprobs[0])
            assert found == pytest.approx(expected, abs=1e-5)
            fsdp.forward_backward(lessons()[1])
            fsdp.optim_step(STEP)
            save(fsdp, heap, again)
            trained = fsdp.weights_sha256()
        version = ranks.publish()
        with running(replace(other, backend="sampler", trainable=False)) as (sampler, memory):
            take(sampler, memory, 0, version)
            assert sampler.weights_sha256() == ranks.weights_sha256()
        loaded = AutoModelForCausalLM.from_pretrained(saved)
        error, where = worst(ranks, by_file(loaded), Role.WEIGHT)
        assert error == 0, where
        ranks.forward_backward(lessons()[1])
        ranks.optim_step(STEP)
        trained_on = AutoModelForCausalLM.from_pretrained(again)
        error, where = worst(ranks, by_file(trained_on), Role.WEIGHT)
        assert error <= 1e-3, where
        ranks.load(again)
        assert ranks.weights_sha256() == trained
        ranks.sync(version)
        assert ranks.publish() == version


def test_ids_that_pad_the_vocabulary_have_no_probability(tmp_path: Path) -> None:
    """29 ids over two ranks are padded to 30; the 30th's logit would be 0."""
    each = Forward([Datum([1, 2, 3], [2, 3, target]) for target in range(VOCAB)])
    with ranks_of(spec(Layout(tp=2)), tmp_path) as ranks:
        logprobs = [float32s(found)[-1] for found in ranks.forward(each).logprobs]
    assert math.fsum(math.exp(lp) for lp in logprobs) == pytest.approx(1.0, abs=1e-5)


def test_activations_computed_again_give_the_same_bits(tmp_path: Path) -> None:
    heaps = []
    for recomputes in (False, True):
        directory = tmp_path / str(recomputes)
        directory.mkdir()
        deployment = spec(Layout(tp=2), activation_checkpointing=recomputes)
        with ranks_of(deployment, directory) as ranks:
            train(ranks)
            heaps.append(ranks.heaps())
    assert heaps[0] == heaps[1]


@pytest.mark.parametrize("name", ["tp 2, pp 2", "experts, ep 2"])
def test_bfloat16_weights_are_their_masters_rounded(name: str, tmp_path: Path) -> None:
    layout, model = LAYOUTS[name]
    deployment = spec(layout, {**model, "dtype": "bfloat16"})
    with (
        ranks_of(deployment, tmp_path) as ranks,
        running(replace(deployment, layout=Layout(), backend="fsdp")) as (fsdp, _),
    ):
        assert ranks.weights_sha256() == fsdp.weights_sha256()
        for args in lessons()[:2]:
            expected = fsdp.forward_backward(args).metrics
            assert ranks.forward_backward(args).metrics == pytest.approx(
                expected, rel=0.05, abs=0.05
            )
        norm = fsdp.optim_step(STEP).metrics["grad_norm:mean"]
        assert ranks.optim_step(STEP).metrics["grad_norm:mean"] == pytest.approx(norm, rel=0.02)
        for slots, heap in zip(ranks.slots, ranks.heaps(), strict=True):
            named = {slot.name: slot for slot in slots}
            for slot in slots:
                if slot.role is Role.WEIGHT:
                    memory = bytearray(heap[slot.offset : slot.offset + slot.num_bytes])
                    weight = torch.frombuffer(memory, dtype=torch.bfloat16).view(slot.shape)
                    master = view(heap, named[f"{slot.name}.master"])
                    assert torch.equal(weight, master.bfloat16()), slot.name


def test_optimizer_in_host_memory_takes_the_same_step() -> None:
    def trained(optimizer_on: OptimizerOn) -> str:
        deployment = spec(optimizer_on=optimizer_on)
        with running(deployment) as (backend, _):
            if backend.host_bytes:
                backend.use_host_memory(memoryview(bytearray(backend.host_bytes)))
            for args in lessons()[:2]:
                backend.forward_backward(args)
                backend.optim_step(STEP)
            return backend.weights_sha256()

    assert trained(OptimizerOn.HOST) == trained(OptimizerOn.DEVICE)


def test_loss_that_is_not_finite_is_refused_by_all_ranks(tmp_path: Path) -> None:
    data = [Datum([1, 2], [2, 3], logprobs=[-1e30, -1e30], advantages=[1.0, 1.0])]
    with (
        ranks_of(spec(Layout(pp=2)), tmp_path) as ranks,
        pytest.raises(AssertionError, match="not finite"),
    ):
        ranks.forward_backward(ForwardBackward(data, Loss.IMPORTANCE_SAMPLING))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_killed_rank_breaks_the_group_and_hangs_nobody(layout: Layout, tmp_path: Path) -> None:
    with ranks_of(spec(layout), tmp_path) as ranks:
        ranks.ranks[1].close()
        for _ in range(2):
            ranks.send(0, Step(STEP))
            error = ranks.receive(0).error
            assert error is not None
            assert error.code is Code.UNAVAILABLE
            assert "another rank" in error.message


def test_rank_that_never_comes_breaks_the_group(tmp_path: Path) -> None:
    deployment = spec(Layout(tp=2))
    first = RankGroup(0, 2, str(tmp_path / "store"), timeout_s=0.5)
    factory = backend_factory("megatron")
    heap = Heap(factory.plan(deployment, first).heap_bytes)
    with pytest.raises(GroupBroken, match="not all 2 ranks"):
        factory(deployment, heap, first)


REFUSED: Sequence[tuple[str, Layout, dict[str, Any]]] = (
    ("layout.ep", Layout(dp=2, ep=2), tiny()),
    ("layout.ep", Layout(dp=5, ep=5), EXPERTS),
    ("model.config.mlp_only_layers", Layout(), {**EXPERTS, "mlp_only_layers": [0]}),
    ("layout.ep", Layout(dp=2, ep=2), tiny()),
    ("layout.tp", Layout(tp=3), tiny()),
    ("layout.tp", Layout(tp=2), tiny(vocab_size=1)),
    ("layout.pp", Layout(pp=2), tiny(num_hidden_layers=3)),
    ("model.config.model_type", Layout(), tiny("gemma")),
    ("model.config.attention_bias", Layout(), tiny("llama", attention_bias=True)),
    ("model.config.hidden_act", Layout(), tiny("llama", hidden_act="gelu")),
    ("model.config.sliding_window", Layout(), tiny("mistral", sliding_window=8)),
    ("model.config.head_dim", Layout(), tiny("qwen2", head_dim=8)),
    (
        "model.config.rope_parameters",
        Layout(),
        tiny(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
    ),
)


@pytest.mark.parametrize(("field", "layout", "config"), REFUSED)
def test_what_is_not_built_is_refused_with_its_field_and_a_remedy(
    field: str, layout: Layout, config: dict[str, Any]
) -> None:
    with pytest.raises(CallerError) as raised:
        backend_factory("megatron").plan(spec(layout, config), RankGroup(0, layout.num_ranks))
    assert raised.value.info.field == field
    assert raised.value.info.code is Code.FAILED_PRECONDITION
    assert raised.value.info.remedy


def test_generate_is_refused() -> None:
    with running(spec(trainable=False)) as (backend, _):
        with pytest.raises(CallerError, match="does not generate"):
            backend.check_generate(Generate([Prompt([1])], SamplingParams(4)))
        with pytest.raises(CallerError, match="not trainable"):
            backend.check_forward_backward(lessons()[0])


def test_sample_longer_than_the_models_positions_is_refused() -> None:
    long = Datum([1] * 65, [2] * 65, weights=[1.0] * 65)
    with running(spec()) as (backend, _):
        for check in (
            partial(backend.check_forward, Forward([without_loss(long)])),
            partial(backend.check_forward_backward, ForwardBackward([long], Loss.CROSS_ENTROPY)),
        ):
            with pytest.raises(CallerError, match="65 tokens exceed the 64") as raised:
                check()
            assert raised.value.info.field == "args.batch[0].tokens"


@pytest.mark.parametrize("kind", [backends.MODEL, backends.EXPERTS], ids=["dense", "experts"])
def test_what_a_gpu_is_checked_with_is_the_same_over_switches(kind: dict[str, Any]) -> None:
    """On an emulated device; see `make gpu-check`."""
    model = {**kind, **SMALL}

    def run(*, is_switched: bool) -> list[object]:
        heap = Heap(backend_factory("megatron").plan(backends.spec("megatron", model)).heap_bytes)

        def switch() -> None:
            if is_switched:
                kept = bytes(heap.buffer)
                heap.buffer[:] = b"\xff" * heap.num_bytes
                heap.buffer[:] = kept

        return backends.results("megatron", heap, switch, model)

    undisturbed = run(is_switched=False)
    assert len(undisturbed) == backends.CALLS + 1
    assert run(is_switched=True) == undisturbed
