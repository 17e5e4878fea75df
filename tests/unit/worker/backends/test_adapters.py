"""Adapters on a shared base: exact beside `peft`, and only they are state."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, PeftModel, get_peft_model

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError, ResourceError
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
from phaseloom.common.contract.specs import (
    ALL_ATTENTION,
    ALL_LINEAR,
    ALL_MLP,
    UNEMBED,
    Adapter,
    DeploymentSpec,
    DeviceKind,
    Layout,
    ModelSpec,
    OptimizerOn,
)
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup
from phaseloom.worker.backends.capabilities import MODEL_TYPES
from phaseloom.worker.backends.lora.adapters import layer_and_part
from phaseloom.worker.rank.life import _identity
from phaseloom.worker.state.devicememory import scratch_tensor
from phaseloom.worker.state.heap import Heap
from tests.support.pretrained import loaded, pinned, save_model
from tests.support.saved import load, save
from tests.unit.worker.backends.models import batch, generate
from tests.unit.worker.backends.ranks import ROOT, Ranks
from tests.unit.worker.backends.test_architectures import CHANGES, NO_TOKENS

ADAPTER = Adapter(rank=4, alpha=8.0, seed=5)
ADAM = AdamParams(learning_rate=0.02)
STEPS = 6


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def started(tmp_path: Path) -> Callable[[DeploymentSpec], tuple[Backend, Heap]]:
    """Starts a rank of this node."""
    place = RankGroup(node_directory=str(tmp_path))

    def start(spec: DeploymentSpec, ranks: RankGroup = place) -> tuple[Backend, Heap]:
        factory = backend_factory(spec.backend)
        memory = factory.plan(spec, ranks)
        heap = Heap(memory.heap_bytes, memory.scratch_bytes)
        return factory(spec, heap, ranks), heap

    return start


def deployment(
    directory: Path, backend: str = "fsdp", adapter: Adapter = ADAPTER, **changes: Any
) -> DeploymentSpec:
    model = replace(pinned(directory, **changes), adapter=adapter)
    return DeploymentSpec("policy", "train", backend, model, trainable=backend == "fsdp")


def train(backend: Backend | Ranks, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        made = backend.forward_backward(
            ForwardBackward(batch(1, loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY)
        )
        losses.append(made.metrics["loss:sum"])
        backend.optim_step(OptimStep(ADAM))
    return losses


def scores(backend: Backend) -> list[np.ndarray[Any, Any]]:
    data = [Datum(each.tokens, each.targets) for each in batch(2)]
    return [np.array(float32s(each)) for each in backend.forward(Forward(data)).logprobs]


def of_transformers(model: Any) -> list[np.ndarray[Any, Any]]:
    found = []
    for datum in batch(2):
        tokens, targets = torch.tensor(datum.tokens), torch.tensor(datum.targets)
        with torch.no_grad():
            lp = torch.log_softmax(model(tokens[None]).logits[0], -1)
        found.append(lp.gather(1, targets[:, None])[:, 0].numpy())
    return found


def largest_difference(ours: list[Any], theirs: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def test_it_begins_as_the_base_and_peft_loads_what_was_trained(
    directory: Path, tmp_path: Path, started: Any
) -> None:
    backend, heap = started(deployment(directory))
    base = loaded(directory)
    assert largest_difference(scores(backend), of_transformers(base)) <= 1e-5
    losses = train(backend)
    assert losses[-1] < 0.7 * losses[0]
    saved = tmp_path / "saved"
    saved.mkdir()
    save(backend, heap, saved)
    assert {path.name for path in saved.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    merged = PeftModel.from_pretrained(loaded(directory), str(saved)).eval()
    assert largest_difference(scores(backend), of_transformers(merged)) <= 1e-5

    again, its_heap = started(deployment(directory))
    load(again, its_heap, saved)
    assert its_heap.buffer == heap.buffer
    assert train(again, 2) == train(backend, 2)


def test_base_may_have_experts(tmp_path: Path, started: Any) -> None:
    """Files name its experts one by one; memory has them in one parameter."""
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    directory = save_model(tmp_path / "experts", model_type="qwen3_moe", **sizes)
    attention = replace(ADAPTER, targets=("q_proj", "v_proj"))
    backend, _ = started(deployment(directory, adapter=attention))
    assert largest_difference(scores(backend), of_transformers(loaded(directory))) <= 1e-5
    losses = train(backend)
    assert losses[-1] < losses[0]


def test_what_peft_has_saved_is_loaded(
    directory: Path, tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first, heap = started(deployment(directory))
    train(first)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    save(first, heap, ours)
    PeftModel.from_pretrained(loaded(directory), str(ours)).save_pretrained(
        str(theirs), save_embedding_layers=False
    )
    (theirs / "README.md").unlink()
    sampler, its_heap = started(deployment(directory, "sampler"))
    load(sampler, its_heap, theirs)
    assert sampler.weights_sha256() == first.weights_sha256()


def test_gradients_are_those_of_autograd_through_the_merged_weights(
    directory: Path, started: Any
) -> None:
    backend, heap = started(deployment(directory))
    train(backend, 1)  # so that B is not zero
    views = {slot.name: as_array(heap, slot) for slot in backend.slots}
    data = batch(3, loss=Loss.CROSS_ENTROPY)
    backend.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY))
    model, scale = loaded(directory), ADAPTER.alpha / ADAPTER.rank
    names = [name.removesuffix(".lora_A.weight") for name in views if "lora_A.weight" in name]
    names = [name for name in names if f"{name}.lora_A.weight.grad" in views]
    assert len(names) == 14
    with torch.no_grad():
        for name in names:
            a, b = (torch.from_numpy(views[f"{name}.lora_{x}.weight"].copy()) for x in "AB")
            model.get_parameter(name.removeprefix("base_model.model.") + ".weight").add_(
                b @ a * scale
            )
    for datum in data:
        lp = torch.log_softmax(model(torch.tensor(datum.tokens)[None]).logits[0], -1)
        chosen = lp.gather(1, torch.tensor(datum.targets)[:, None])[:, 0]
        torch.autograd.backward(-(chosen * torch.tensor(datum.weights)).sum())
    for name in names:
        whole = model.get_parameter(name.removeprefix("base_model.model.") + ".weight").grad
        a, b = (torch.from_numpy(views[f"{name}.lora_{x}.weight"].copy()) for x in "AB")
        for part, expected in (("A", b.T @ whole * scale), ("B", whole @ a.T * scale)):
            found = views[f"{name}.lora_{part}.weight.grad"]
            error = np.abs(found - expected.numpy()).max()
            assert error <= 1e-5 * expected.abs().max(), (name, part)


def as_array(heap: Heap, slot: Any) -> np.ndarray[Any, Any]:
    held = np.frombuffer(heap.buffer[slot.offset : slot.offset + slot.num_bytes], "<f4")
    return held.reshape(slot.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_the_adapters_alone(directory: Path, started: Any, dtype: str) -> None:
    backend, heap = started(deployment(directory, dtype=dtype))
    full = backend_factory("fsdp").plan(
        DeploymentSpec("policy", "train", "fsdp", pinned(directory, dtype=dtype), trainable=True)
    )
    weights = [slot for slot in backend.slots if slot.role is Role.WEIGHT]
    assert all(".lora_" in slot.name for slot in weights)
    assert [slot.name for slot in backend.version_slots] == [slot.name for slot in weights]
    assert heap.num_bytes < full.heap_bytes / 2
    before = heap.buffer.tobytes()
    losses = train(backend)
    assert losses[-1] < losses[0]
    heap.buffer[:] = before  # as a switch brings a state back
    backend.weights_changed()
    assert train(backend) == losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_draws_and_scores_as_the_trainer_does(
    directory: Path, started: Any, dtype: str
) -> None:
    policy, heap = started(deployment(directory, dtype=dtype))
    train(policy)
    sampler, its_heap = started(deployment(directory, "sampler", dtype=dtype))
    request = Generate(
        [Prompt(int32s([1, 2, 3]), seed=9)], SamplingParams(12, ignore_eos=True), num_samples=3
    )
    [of_base] = generate(sampler, request)
    size = its_heap.num_bytes
    its_heap.buffer[:] = heap.buffer[:size]  # weights come first in both
    sampler.weights_changed()
    assert sampler.weights_sha256() == policy.weights_sha256()
    [drawn] = generate(sampler, request)
    tokens = [int32s(each.tokens) for each in drawn.sequences[0]]
    assert tokens != [int32s(each.tokens) for each in of_base.sequences[0]]
    for sequence in drawn.sequences[0]:
        whole = [1, 2, 3, *int32s(sequence.tokens)]
        [lp] = policy.forward(Forward([Datum(whole[:-1], whole[1:])])).logprobs
        told = np.array(float32s(sequence.logprobs))
        tolerance = 1e-5 if dtype == "float32" else 0.1
        assert np.abs(np.array(float32s(lp))[2:] - told).max() <= tolerance


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("lm_head", "down_proj")])
def test_layers_are_those_that_were_asked_for(
    directory: Path, started: Any, targets: tuple[str, ...]
) -> None:
    backend, _ = started(deployment(directory, adapter=replace(ADAPTER, targets=targets)))
    layers = {
        slot.name.rpartition(".lora_")[0].rpartition(".")[2] for slot in backend.version_slots
    }
    assert layers == {*targets}
    losses = train(backend)
    assert losses[-1] < losses[0]
    sampler, _ = started(deployment(directory, "sampler", replace(ADAPTER, targets=targets)))
    request = Generate([Prompt(int32s([1, 2, 3]), seed=9)], SamplingParams(4))
    assert generate(sampler, request)[0].sequences


def test_unknown_layers_are_refused(directory: Path, started: Any) -> None:
    spec = deployment(directory, adapter=Adapter(targets=("q_proj", "c_attn")))
    with pytest.raises(CallerError, match="c_attn") as caught:
        started(spec)
    assert caught.value.info.field == "model.adapter.targets"
    assert "q_proj" in caught.value.info.remedy


@pytest.mark.parametrize(
    ("adapter", "changes"),
    [
        (ADAPTER, {}),
        (ADAPTER, {"dtype": "bfloat16"}),
        (replace(ADAPTER, rank=5, targets=("lm_head", "o_proj")), {}),
    ],
    ids=["float32", "bfloat16", "head"],
)
def test_two_ranks_train_an_adapter_like_one(
    directory: Path, tmp_path: Path, started: Any, adapter: Adapter, changes: dict[str, Any]
) -> None:
    """Each holds half of the adapter's rows and maps the whole base; what they have in the end a
    rank alone loads, and both go on alike."""
    spec = deployment(directory, adapter=adapter, **changes)
    alone, heap = started(spec)
    initial, trained = tmp_path / "initial", tmp_path / "trained"
    initial.mkdir()
    trained.mkdir()
    save(alone, heap, initial)
    ranks = Ranks(replace(spec, layout=Layout(dp=2)), tmp_path)
    try:
        ranks.load(initial)
        assert ranks.weights_sha256() == alone.weights_sha256()
        is_exact = "dtype" not in changes
        expected = train(alone)
        assert train(ranks) == pytest.approx(expected, rel=1e-5 if is_exact else 0.05)
        undisturbed = ranks.heaps()
        ranks.load(initial)
        ranks.offload_between_calls(is_on=True)
        train(ranks)
        assert ranks.heaps() == undisturbed
        args = ForwardBackward(batch(4, loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY)
        ranks.forward_backward(args)
        ranks.save(trained)
        load(alone, heap, trained)
        assert ranks.weights_sha256() == alone.weights_sha256()
        norms = [
            each.optim_step(OptimStep(ADAM)).metrics["grad_norm:mean"] for each in (alone, ranks)
        ]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        held = [{slot.name: slot.shape for slot in slots} for slots in ranks.slots]
        for slot in alone.version_slots:
            assert held[0][slot.name][0] + held[1][slot.name][0] == slot.shape[0]
    finally:
        ranks.close()


def test_a_node_has_a_base_once_a_dtype(directory: Path, tmp_path: Path, started: Any) -> None:
    for _ in range(2):
        started(deployment(directory))
        started(deployment(directory, "sampler"))
    started(deployment(directory, dtype="bfloat16"))
    files = [path for path in (tmp_path / "bases").iterdir() if path.suffix != ".lock"]
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o777 == 0o400 for path in files)


def test_nobody_can_write_to_a_base(directory: Path, tmp_path: Path) -> None:
    spec = msgspec.json.encode(deployment(directory, "sampler")).decode()
    program = [sys.executable, "-m", "tests.unit.worker.backends.base_child"]
    done = subprocess.run([*program, spec, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_a_rank_that_dies_while_it_writes_a_base_leaves_none(
    directory: Path, tmp_path: Path, started: Any
) -> None:
    first, _ = started(deployment(directory))
    expected = scores(first)
    [base] = [path for path in (tmp_path / "bases").iterdir() if path.suffix != ".lock"]
    content = base.read_bytes()
    base.unlink()
    base.with_suffix(".draft").write_bytes(content[: len(content) // 2])
    again, _ = started(deployment(directory))
    assert largest_difference(scores(again), expected) == 0.0
    assert base.read_bytes() == content


def test_files_that_are_gone_are_told(directory: Path, started: Any) -> None:
    spec = deployment(directory)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ResourceError) as caught:
        started(spec)
    assert caught.value.info.field == "model.registered"


def test_a_device_of_its_own_has_a_copy_that_comes_back(
    directory: Path, tmp_path: Path, started: Any
) -> None:
    place = RankGroup(node_directory=str(tmp_path), device_kind=DeviceKind.CUDA)
    here, _ = started(deployment(directory))
    there, heap = started(deployment(directory), place)
    assert heap.scratch_bytes > 0
    assert largest_difference(scores(there), scores(here)) == 0.0
    scratch_tensor(heap).fill_(255)  # as it is after a switch
    there.weights_changed()
    assert largest_difference(scores(there), scores(here)) == 0.0


def test_a_host_optimizer_takes_the_same_steps(directory: Path, started: Any) -> None:
    here, _ = started(deployment(directory))
    spec = replace(deployment(directory), optimizer_on=OptimizerOn.HOST)
    there, _ = started(spec)
    there.use_host_memory(memoryview(bytearray(there.host_bytes)))
    assert train(there) == train(here)
    assert there.weights_sha256() == here.weights_sha256()


def test_a_seed_is_the_adapters_own(directory: Path, started: Any) -> None:
    def drawn(adapter: Adapter) -> str:
        backend, _ = started(deployment(directory, adapter=adapter))
        return str(backend.weights_sha256())

    torch.manual_seed(1)
    first = drawn(ADAPTER)
    torch.manual_seed(2)
    assert drawn(ADAPTER) == first != drawn(replace(ADAPTER, seed=6))


def test_the_identity_of_a_model_has_its_adapter() -> None:
    base = ModelSpec({"a": 1})
    assert _identity(base) != _identity(replace(base, adapter=ADAPTER))


def test_memory_is_that_of_the_same_layers_by_name(directory: Path, started: Any) -> None:
    groups = replace(ADAPTER, targets=(ALL_ATTENTION, ALL_MLP, UNEMBED))
    by_group, heap = started(deployment(directory, adapter=groups))
    names = replace(ADAPTER, targets=(*Adapter().targets, "lm_head"))
    by_name, other_heap = started(deployment(directory, adapter=names))
    assert (by_group.slots, heap.buffer) == (by_name.slots, other_heap.buffer)
    assert by_group.config["target_modules"] == sorted(names.targets)


@pytest.mark.filterwarnings("ignore")  # of `peft`, about GPT-2's layers and fused experts
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_groups_are_the_linear_layers_of_every_architecture(
    model_type: str, tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of `all-linear` in `peft`, and the head; `peft` opens what was trained."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    changes = {**NO_TOKENS, **CHANGES[model_type], "model_type": model_type}
    changes |= {"tie_word_embeddings": False, "initializer_range": 0.3}
    directory = save_model(tmp_path / "model", torch.float32, **changes)
    groups = replace(ADAPTER, targets=(ALL_ATTENTION, ALL_MLP, UNEMBED))
    policy, heap = started(deployment(directory, adapter=groups))
    base = loaded(directory)
    base.set_attn_implementation("eager")
    assert largest_difference(scores(policy), of_transformers(base)) <= 1e-4
    layers = {layer_and_part(slot.name)[0] for slot in policy.version_slots}
    theirs: Any = get_peft_model(loaded(directory), LoraConfig(target_modules="all-linear"))
    modules = theirs.base_model.model.named_modules()
    expected = {name for name, module in modules if hasattr(module, "lora_A")}
    # Experts and their routers, which `peft` adapts too, are no linear layers.
    expected = {name for name in expected if "moe" not in model_type or ".mlp." not in name}
    assert layers == {*expected, "lm_head"}

    losses = train(policy, 3)
    assert losses[-1] < losses[0]
    saved = tmp_path / "saved"
    saved.mkdir()
    save(policy, heap, saved)
    merged = PeftModel.from_pretrained(base, str(saved)).eval()
    assert largest_difference(scores(policy), of_transformers(merged)) <= 1e-4

    sampler, its_heap = started(deployment(directory, "sampler", groups))
    its_heap.buffer[:] = heap.buffer[: its_heap.num_bytes]
    sampler.weights_changed()
    assert largest_difference(scores(sampler), scores(policy)) <= 1e-4
    request = Generate([Prompt(int32s([1, 2, 3]), seed=9)], SamplingParams(4))
    assert generate(sampler, request)[0].sequences


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ((ALL_ATTENTION,), {"c_attn", "attn.c_proj"}),
        ((ALL_MLP,), {"c_fc", "mlp.c_proj"}),
        ((ALL_LINEAR,), {"c_attn", "c_fc", "c_proj"}),
        ((UNEMBED,), {"lm_head"}),
    ],
    ids=["attention", "mlp", "linear", "unembed"],
)
def test_groups_of_a_model_whose_layers_share_a_name(
    targets: tuple[str, ...], layers: set[str], tmp_path: Path, started: Any
) -> None:
    """GPT-2 has a `c_proj` in attention and another in the MLP."""
    changes: dict[str, Any] = {"model_type": "gpt2", "tie_word_embeddings": False, **NO_TOKENS}
    directory = save_model(tmp_path / "model", torch.float32, **changes)
    policy, heap = started(deployment(directory, adapter=replace(ADAPTER, targets=targets)))
    assert {*policy.config["target_modules"]} == layers
    train(policy, 2)
    saved = tmp_path / "saved"
    saved.mkdir()
    save(policy, heap, saved)
    merged = PeftModel.from_pretrained(loaded(directory), str(saved)).eval()
    assert largest_difference(scores(policy), of_transformers(merged)) <= 1e-4


def test_group_without_layers_is_refused_alone(tmp_path: Path, started: Any) -> None:
    """Fused experts are not linear layers."""
    directory = save_model(tmp_path / "m", model_type="qwen3_moe", **CHANGES["qwen3_moe"])
    with pytest.raises(CallerError, match="all-mlp") as refused:
        started(deployment(directory, adapter=replace(ADAPTER, targets=(ALL_MLP,))))
    assert "q_proj" in refused.value.info.remedy
