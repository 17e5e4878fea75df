"""Weights of registered models: what a rank reads of the files, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams
from phaseloom.common.contract.specs import DeploymentSpec, ModelDirectory, ModelSpec
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.backends.model import parameter_shapes
from phaseloom.worker.state.devicememory import as_tensor
from phaseloom.worker.state.heap import Heap
from tests.support.pretrained import loaded, pinned, save_model
from tests.unit.worker.backends.models import generate, running


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def deployment(model: ModelSpec, backend: str = "sampler") -> DeploymentSpec:
    return DeploymentSpec("policy", "train", backend, model, trainable=backend == "fsdp")


def filled(model: ModelSpec, ranks: RankGroup | None = None) -> tuple[list[TensorSlot], Heap]:
    """A rank's weights, read from the files."""
    layout = plan(parameter_shapes(model), trainable=False, ranks=ranks or RankGroup())
    heap = Heap(layout.heap_bytes)
    assert model.pinned is not None
    pretrained.fill(heap, layout.slots, model)
    return layout.slots, heap


def tensor(slot: TensorSlot, heap: Heap) -> torch.Tensor:
    held = as_tensor(heap)[slot.offset : slot.offset + slot.num_bytes]
    return held.view(getattr(torch, slot.dtype)).view(slot.shape)


def rewrite(directory: Path, change: Any) -> None:
    """Put all tensors in one file, after a change of them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize("backend", ["sampler", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_ranks_hold_what_transformers_loads(
    tmp_path: Path, backend: str, dtype: torch.dtype
) -> None:
    directory = save_model(tmp_path / "model", dtype)
    assert len(list(directory.glob("*.safetensors"))) > 1
    model = pinned(directory)
    expected = loaded(directory).state_dict()
    with running(deployment(model, backend)) as (built, heap):
        assert model.pinned is not None
        pretrained.fill(heap, built.slots, model)
        weights = [slot for slot in built.slots if slot.role is Role.WEIGHT]
        assert weights
        for slot in weights:
            assert torch.equal(tensor(slot, heap), expected[slot.name]), slot.name
        others = [slot for slot in built.slots if slot.role is not Role.WEIGHT]
        assert not any(tensor(slot, heap).any() for slot in others)


def test_generation_is_that_of_transformers(directory: Path) -> None:
    model = pinned(directory)
    prompt = [1, 5, 9]
    with running(deployment(model)) as (built, heap):
        assert model.pinned is not None
        pretrained.fill(heap, built.slots, model)
        greedy = SamplingParams(8, temperature=0.0, ignore_eos=True)
        (result,) = generate(built, Generate([Prompt(prompt)], greedy))
    expected = loaded(directory).generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert int32s(result.sequences[0][0].tokens) == expected[0, len(prompt) :].tolist()


def test_each_rank_reads_its_own_rows(directory: Path) -> None:
    model = pinned(directory)
    whole = loaded(directory).state_dict()
    read: dict[str, list[torch.Tensor]] = {}
    for rank in range(3):
        slots, heap = filled(model, RankGroup(rank, 3))
        for slot in slots:
            read.setdefault(slot.name, []).append(tensor(slot, heap))
    assert read
    for name, rows in read.items():
        assert torch.equal(torch.cat(rows), whole[name]), name


def test_bfloat16_comes_back_exactly(directory: Path) -> None:
    """bfloat16 files into float32 ranks, and from there into bfloat16 again."""
    slots, heap = filled(pinned(directory))
    original = loaded(directory, torch.bfloat16).state_dict()
    for slot in slots:
        assert torch.equal(tensor(slot, heap).bfloat16(), original[slot.name]), slot.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_of_bfloat16_are_rounded_and_their_masters_are_not(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    directory = save_model(tmp_path / "model", dtype)
    model = pinned(directory, dtype="bfloat16")
    exact = loaded(directory).state_dict()
    with running(deployment(model, "fsdp")) as (built, heap):
        assert model.pinned is not None
        pretrained.fill(heap, built.slots, model)
        built.weights_changed()
        slots = {slot.name: slot for slot in built.slots}
        for name in parameter_shapes(model):
            assert torch.equal(tensor(slots[name], heap), exact[name].bfloat16()), name
            assert torch.equal(tensor(slots[f"{name}.master"], heap), exact[name]), name


def test_tensor_larger_than_a_piece_is_read_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "_PIECE_BYTES", 300)
    slots, heap = filled(pinned(directory))
    expected = loaded(directory).state_dict()
    for slot in slots:
        assert torch.equal(tensor(slot, heap), expected[slot.name]), slot.name


@pytest.mark.parametrize("is_tied", [True, False])
def test_file_may_name_the_head_where_embeddings_are_tied(directory: Path, is_tied: bool) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(directory, rename)
    model = pinned(directory, tie_word_embeddings=is_tied)
    if is_tied:
        slots, heap = filled(model)
        (held,) = [tensor(s, heap) for s in slots if s.name == "model.embed_tokens.weight"]
        stored = load_file(directory / "model.safetensors")["lm_head.weight"]
        assert torch.equal(held, stored.float())
    else:
        with pytest.raises(CallerError, match=r"lack model\.embed_tokens\.weight"):
            filled(model)


def test_untied_head_is_read(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", tie_word_embeddings=False)
    slots, heap = filled(pinned(directory))
    (head,) = [tensor(slot, heap) for slot in slots if slot.name == "lm_head.weight"]
    assert torch.equal(head, loaded(directory).state_dict()["lm_head.weight"])


def lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(31)


def quantize(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose, r"lack model\.norm\.weight"),
        (add, r"contain model\.layers\.0\.self_attn\.q_proj\.bias"),
        (reshape, r"model\.norm\.weight with shape \[32\], got \[31\]"),
        (quantize, r"model\.norm\.weight has the unsupported dtype I8"),
    ],
    ids=["missing", "more", "shape", "dtype"],
)
def test_files_of_another_model_are_refused(directory: Path, change: Any, message: str) -> None:
    rewrite(directory, change)
    with pytest.raises(CallerError, match=message) as refused:
        filled(pinned(directory))
    assert refused.value.info.field == "model.registered"
    assert refused.value.info.remedy


def test_buffers_of_old_files_are_ignored(directory: Path) -> None:
    def add_buffer(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    rewrite(directory, add_buffer)
    filled(pinned(directory))


def test_file_that_cannot_be_read_is_a_loss(directory: Path) -> None:
    model = pinned(directory)
    first = min(directory.glob("*.safetensors"))
    first.write_bytes(b"torn")
    with pytest.raises(ResourceError, match=first.name) as lost:
        filled(model)
    assert lost.value.info.code is Code.DATA_LOSS


def test_file_that_changes_while_it_is_read_is_a_loss(directory: Path) -> None:
    """Its time and size stay."""
    model = pinned(directory)
    layout = plan(parameter_shapes(model), trainable=False)
    first = min(directory.glob("*.safetensors"))

    def slots() -> Iterator[TensorSlot]:
        yield from layout.slots
        before = first.stat()
        with first.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"x")
        os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(ResourceError, match="changed while it was read") as lost:
        pretrained.fill(Heap(layout.heap_bytes), slots(), model)
    assert lost.value.info.code is Code.DATA_LOSS


def test_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    """The heap alone has the weights: what the runtime itself allocates for them stays untouched.
    Pages of the files count as well, which are half as large and of which the system can drop
    any."""
    directory = save_model(tmp_path / "model", hidden_size=256, intermediate_size=16384)
    model = pinned(directory)
    _peak_bytes()
    before_bytes = _peak_bytes()
    state = torch.random.get_rng_state()
    with running(deployment(model)) as (built, heap):
        assert model.pinned is not None
        pretrained.fill(heap, built.slots, model)
        assert _peak_bytes() - before_bytes < 1.8 * heap.num_bytes
        assert heap.resident_bytes() > 0.9 * heap.num_bytes > 50e6
    assert torch.equal(torch.random.get_rng_state(), state), "nothing is drawn"


def _peak_bytes() -> int:
    """Most memory that this process has had since this was asked last."""
    status = Path("/proc/self/status").read_text()
    (kibibytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    Path("/proc/self/clear_refs").write_text("5")
    return int(kibibytes) * 1024


def test_spec_survives_the_wire(directory: Path) -> None:
    model = pinned(directory)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelSpec) == model
    assert isinstance(model.pinned, ModelDirectory)
