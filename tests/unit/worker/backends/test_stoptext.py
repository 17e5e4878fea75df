"""Stop strings over a registered model's own tokenizer, whose tokens may be parts of characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams
from phaseloom.common.contract.specs import DeploymentSpec, ModelDirectory, ModelFile, ModelSpec
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.stoptext import StopText, token_bytes
from tests.support.pretrained import pinned, save_model
from tests.unit.worker.backends.models import generate, running

END = "<|end|>"
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


def of_characters() -> Tokenizer:
    """As Llama 2 and Gemma have: `▁` for a space, and bytes for what is not in the vocabulary."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [*"▁catshemo"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    fallback, fuse = decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), fallback, fuse])
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [("▁the", -2.0), ("▁", -3.0), ("c", -3.0), ("at", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def saved(tokenizer: Tokenizer, directory: Path) -> ModelSpec:
    """A registered model's spec with this tokenizer and no weights."""
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return with_file(directory)


def with_file(directory: Path) -> ModelSpec:
    file = ModelFile("tokenizer.json", 0, "")
    return ModelSpec(registered="tiny", pinned=ModelDirectory(str(directory), [file]))


@pytest.fixture(scope="module", params=[of_bytes, of_characters, unigram])
def read(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Tokenizer, list[bytes]]:
    tokenizer = request.param()
    spec = saved(tokenizer, tmp_path_factory.mktemp("model"))
    return tokenizer, token_bytes(spec, tokenizer.get_vocab_size() + 3)


@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_tokens_of_a_text_have_its_bytes(read: tuple[Tokenizer, list[bytes]], text: str) -> None:
    tokenizer, pieces = read
    assert b"".join(pieces[token] for token in tokenizer.encode(text).ids) == text.encode()


def test_special_tokens_have_their_text_and_unused_ids_none(
    read: tuple[Tokenizer, list[bytes]],
) -> None:
    tokenizer, pieces = read
    end = tokenizer.token_to_id(END)
    assert end is not None
    assert pieces[end] == END.encode()
    assert pieces[-3:] == [b""] * 3


def test_string_is_found_where_a_character_comes_in_parts() -> None:
    cat = "🐈".encode()
    pieces = [b"a", cat[:1], cat[1:3], cat[3:], b"b"]
    text = StopText(["🐈b"], pieces, generated=[0, 1])
    assert [text.ends_with(token) for token in (2, 3, 0, 1, 2, 3, 4)] == [False] * 6 + [True]


def test_sampler_stops_at_a_string_of_the_models_own_tokenizer(
    tmp_path: Path,
) -> None:
    """The same as with the texts given by hand."""
    tokenizer = of_bytes()
    size = tokenizer.get_vocab_size()
    save_model(tmp_path, vocab_size=size)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = pinned(tmp_path)
    pieces = token_bytes(model, size)
    args = Generate([Prompt([1, 2, 3], seed=4)], SamplingParams(60, ignore_eos=True))
    with running(DeploymentSpec("sampler", "rollout", "sampler", model)) as (backend, heap):
        assert model.pinned is not None
        pretrained.fill(heap, backend.slots, model)
        ((whole,),) = generate(backend, args)[0].sequences
        tokens = int32s(whole.tokens)
        texts = [pieces[token] for token in tokens]
        at = next(i for i in range(20, 59) if texts[i].isascii() and texts[i + 1].isascii())
        stop = (texts[at] + texts[at + 1]).decode()
        sampling = SamplingParams(60, ignore_eos=True, stop_strings=[stop])
        ((ended,),) = generate(backend, Generate(args.prompts, sampling))[0].sequences
    first = next(i for i in range(60) if stop.encode() in b"".join(texts[: i + 1]))
    assert (int32s(ended.tokens), ended.stop_reason) == (tokens[: first + 1], "stop")


def test_what_tells_no_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError) as nothing:
        token_bytes(ModelSpec({}), 3)
    with pytest.raises(CallerError) as no_file:
        token_bytes(ModelSpec(registered="m", pinned=ModelDirectory(str(tmp_path), [])), 3)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(CallerError) as other:
        token_bytes(saved(words, tmp_path), 3)
    for raised in (nothing, no_file, other):
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        assert raised.value.info.field == "args.sampling.stop_strings"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"decoder": 3, "model": 3}', b"\xff"])
def test_torn_file_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ResourceError) as raised:
        token_bytes(with_file(tmp_path), 3)
    assert raised.value.info.code is Code.DATA_LOSS
