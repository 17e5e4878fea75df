"""Stop strings over a registered model's own tokenizer, whose tokens may be parts of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams
from phaseloom.common.contract.specs import DeploymentSpec, ModelDirectory, ModelFile, ModelSpec
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.stoptext import text_decoder
from tests.support.pretrained import pinned, save_model
from tests.unit.worker.backends.models import generate, running

CORPUS = ["the cat sat on the mat", "naïve café, 猫 🐈", "one  two\nthree"] * 4


def of_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer
    tokenizer.train_from_iterator(
        CORPUS, trainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def with_file(directory: Path) -> ModelSpec:
    file = ModelFile("tokenizer.json", 0, "")
    return ModelSpec(registered="tiny", pinned=ModelDirectory(str(directory), [file]))


def test_sampler_stops_at_a_string_of_the_models_own_tokenizer(
    tmp_path: Path,
) -> None:
    """The same as with the texts given by hand."""
    tokenizer = of_bytes()
    size = tokenizer.get_vocab_size()
    save_model(tmp_path, vocab_size=size)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = pinned(tmp_path)
    args = Generate([Prompt([1, 2, 3], seed=4)], SamplingParams(60, ignore_eos=True))
    with running(DeploymentSpec("sampler", "rollout", "sampler", model)) as (backend, heap):
        assert model.pinned is not None
        pretrained.fill(heap, backend.slots, model)
        ((whole,),) = generate(backend, args)[0].sequences
        tokens = int32s(whole.tokens)
        stop = next(
            text
            for i in range(20, 59)
            if (text := tokenizer.decode(tokens[i : i + 2])).isascii() and text
        )
        sampling = SamplingParams(60, ignore_eos=True, stop_strings=[stop])
        ((ended,),) = generate(backend, Generate(args.prompts, sampling))[0].sequences
    first = next(i for i in range(60) if stop in tokenizer.decode(tokens[: i + 1]))
    assert (int32s(ended.tokens), ended.stop_reason) == (tokens[: first + 1], "stop")


def test_model_without_token_texts_is_refused(tmp_path: Path) -> None:
    nameless = ModelDirectory(str(tmp_path), [])
    for spec in (ModelSpec({}), ModelSpec(registered="m", pinned=nameless)):
        with pytest.raises(CallerError) as raised:
            text_decoder(spec)
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        assert raised.value.info.field == "args.sampling.stop_strings"


def test_vocabulary_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    files = [ModelFile("vocab.json", 2, "")]
    spec = ModelSpec(registered="m", pinned=ModelDirectory(str(tmp_path), files))
    with pytest.raises(CallerError, match=r"vocab.json cannot be converted") as raised:
        text_decoder(spec)
    assert raised.value.info.code is Code.FAILED_PRECONDITION
    assert "save_pretrained" in raised.value.info.remedy


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"decoder": 3, "model": 3}', b"\xff"])
def test_damaged_file_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ResourceError) as raised:
        text_decoder(with_file(tmp_path))
    assert raised.value.info.code is Code.DATA_LOSS
