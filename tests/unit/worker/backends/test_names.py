"""Names of tensors in files, for every architecture: those that `transformers` writes and reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from phaseloom.common.contract.arrays import float32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import Datum, Forward
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.capabilities import MODEL_TYPES
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.backends.model import parameter_shapes
from phaseloom.worker.state.heap import Heap
from tests.support.pretrained import loaded, pinned
from tests.support.saved import load, save
from tests.support.tinymodel import config
from tests.unit.worker.backends.models import batch, running, spec
from tests.unit.worker.backends.test_architectures import CHANGES, NO_TOKENS
from tests.unit.worker.backends.test_fsdp import plain_logprobs

pytestmark = pytest.mark.long

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
DATA = [Datum(each.tokens, each.targets) for each in batch(2)]


def build(model_type: str, **changes: Any) -> Any:
    values = config(model_type, initializer_range=0.3, **NO_TOKENS, **CHANGES[model_type])
    values |= changes
    factory: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return factory.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).eval()


def scores(model: ModelSpec, backend: str = "sampler") -> torch.Tensor:
    """The log-probabilities of a registered model."""
    with running(replace(spec(backend), model=model)) as (built, heap):
        pretrained.fill(heap, built.slots, model)
        built.weights_changed()
        return torch.cat(
            [torch.tensor(float32s(row)) for row in built.forward(Forward(DATA)).logprobs]
        )


def expected(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat([plain_logprobs(model, datum) for datum in DATA])


def rename(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / WEIGHTS
    tensors = {name: each.clone() for name, each in change(load_file(path)).items()}
    save_file(tensors, path, {"format": "pt"})


def without_prefix(prefix: str) -> Callable[[Tensors], Tensors]:
    """Names as those of a model saved without its head's class, such as GPT-2's on the hub."""
    return lambda tensors: {name.removeprefix(f"{prefix}."): t for name, t in tensors.items()}


def with_buffers(tensors: Tensors) -> Tensors:
    """Buffers that older versions of `transformers` saved."""
    norms = [name for name in tensors if name.endswith("weight") and ".0." in name]
    layer = norms[0].partition(".0.")[0] + ".0"
    parts = ("masked_bias", "bias", "rotary_emb.inv_freq")
    ends = [f"{block}.{part}" for block in ("attn", "self_attn", "attention") for part in parts]
    return {**tensors, **{f"{layer}.{end}": torch.zeros(3) for end in ends}}


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [(each, False) for each in sorted(MODEL_TYPES)]
    + [(each, True) for each in ("gpt2", "gpt_neox", "llama", "qwen3_moe")],
)
def test_files_of_transformers_are_read_whatever_their_names(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    plain = build(model_type, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path)
    saved = load_file(tmp_path / WEIGHTS)
    assert parameter_shapes(pinned(tmp_path)).files == {
        name: [*tensor.shape] for name, tensor in saved.items()
    }
    wanted = expected(plain)
    torch.testing.assert_close(scores(pinned(tmp_path)), wanted, rtol=1e-4, atol=1e-4)
    for change in (without_prefix(plain.base_model_prefix), with_buffers):
        rename(tmp_path, lambda _, change=change: change(saved))  # type: ignore[misc]
        other = loaded(tmp_path)
        torch.testing.assert_close(expected(other), wanted, rtol=0, atol=0)
        torch.testing.assert_close(scores(pinned(tmp_path)), wanted, rtol=1e-4, atol=1e-4)
    # The names in memory, as `save_original_format=False` writes them, and the head twice.
    rename(tmp_path, lambda _: plain.state_dict())
    torch.testing.assert_close(scores(pinned(tmp_path)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_checkpoint_has_the_names_of_transformers(model_type: str, tmp_path: Path) -> None:
    build(model_type).save_pretrained(tmp_path / "theirs")
    model = pinned(tmp_path / "theirs")
    own = tmp_path / "own"
    own.mkdir()
    with running(replace(spec("fsdp"), model=model)) as (backend, heap):
        pretrained.fill(heap, backend.slots, model)
        backend.weights_changed()
        save(backend, heap, own)
    theirs, ours = load_file(tmp_path / "theirs" / WEIGHTS), load_file(own / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    factory: Any = AutoModelForCausalLM
    _, report = factory.from_pretrained(own, output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [(each, tied) for each in ("gpt2", "gpt_neox", "llama", "qwen3_moe") for tied in (False, True)],
)
def test_checkpoints_of_other_programs_are_loaded_whatever_their_names(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    """As `load_state` does."""
    plain = build(model_type, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path)
    saved, prefix, model = load_file(tmp_path / WEIGHTS), plain.base_model_prefix, pinned(tmp_path)
    head_in_memory = {"embed_out.weight": "lm_head.weight"}
    for change in (
        without_prefix(prefix),
        with_buffers,
        lambda saved: {head_in_memory.get(name, name): each for name, each in saved.items()},
        # as `save_original_format=False` writes them: fused experts, and a tied head twice
        lambda _: plain.state_dict(),
    ):
        rename(tmp_path, lambda _, change=change: change(saved))  # type: ignore[misc]
        with running(replace(spec("sampler"), model=model)) as (backend, heap):
            load(backend, heap, tmp_path, model)
            rows = backend.forward(Forward(DATA)).logprobs
        actual = torch.cat([torch.tensor(float32s(row)) for row in rows])
        torch.testing.assert_close(actual, expected(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda saved: {**saved, "lm_head.weight": saved[EMBEDDING] + 1}, "two different values"),
        (
            lambda saved: {**saved, "model.norm.weight": torch.zeros(3)},
            r"model.norm.weight: .*\[3\]",
        ),
        (
            lambda saved: {**saved, "lm_head.weight": saved[EMBEDDING].bfloat16()},
            "two different values",
        ),
        (
            lambda saved: {
                **saved,
                "model.norm.weight": saved["model.norm.weight"].half(),
                "lm_head.weight": saved[EMBEDDING],
            },
            r"expected float32\[\d+\], got float16",
        ),
    ],
)
def test_checkpoint_of_another_program_that_differs_is_refused(
    change: Callable[[Tensors], Tensors], problem: str, tmp_path: Path
) -> None:
    build("llama").save_pretrained(tmp_path)
    model = pinned(tmp_path)
    rename(tmp_path, change)
    with (
        running(replace(spec("sampler"), model=model)) as (backend, heap),
        pytest.raises(CallerError, match=problem),
    ):
        load(backend, heap, tmp_path, model)


def test_every_rank_reads_its_rows_of_renamed_and_split_tensors(tmp_path: Path) -> None:
    for model_type in ("gpt_neox", "qwen3_moe"):
        directory = tmp_path / model_type
        build(model_type, tie_word_embeddings=False).save_pretrained(directory)
        model, whole = pinned(directory), load_file(directory / WEIGHTS)
        read: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
        for rank in range(3):
            ranks = RankGroup(rank, 3)
            layout = plan(parameter_shapes(model), trainable=False, ranks=ranks)
            heap = Heap(layout.heap_bytes)
            pretrained.fill(heap, layout.slots, model)
            memory = torch.frombuffer(heap.buffer, dtype=torch.uint8)
            for slot in layout.slots:
                held = memory[slot.offset : slot.offset + slot.num_bytes]
                read[slot.name].append(held.view(torch.float32).view(slot.shape))
        for name, rows in read.items():
            assert torch.equal(torch.cat(rows), whole[name]), name


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    """`transformers` would not tie them, whatever the config says."""
    build("gpt2").save_pretrained(tmp_path)
    head = "lm_head.weight"
    rename(tmp_path, lambda saved: {**saved, head: saved["transformer.wte.weight"] + 1})
    with pytest.raises(CallerError, match="different values") as refused:
        scores(pinned(tmp_path))
    assert "tie_word_embeddings" in refused.value.info.remedy


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", "model.norm.bias", "score"])
def test_names_without_a_parameter_are_refused(name: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    rename(tmp_path, lambda saved: {**saved, name: torch.zeros(2)})
    with pytest.raises(CallerError, match=name):
        scores(pinned(tmp_path))
