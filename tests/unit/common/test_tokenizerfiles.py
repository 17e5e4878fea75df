"""Tokenizers of model directories, read as transformers' `AutoTokenizer` reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE as BPEModel
from transformers import AutoTokenizer

from phaseloom.common.text import files
from phaseloom.common.text.codec import TextCodec, TextDecoder, clean_up
from phaseloom.common.text.files import NotConvertibleError, TokenizerFacts, read_tokenizer
from tests.support.bytetokens import llama, pieces, tokenizer
from tests.unit.common.test_textparts import word_piece

SPECIAL = ["<s>", "</s>", "<pad>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
DICTS: dict[str, Any] = {
    name: {"content": text, "lstrip": True, "normalized": False, "rstrip": False}
    for name, text in NAMES.items()
}
TYPED = {name: {"__type": "AddedToken", **value} for name, value in DICTS.items()}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
NEW = {
    "id": {"content": "<new>", "special": True, "normalized": False},
    "no": {"content": "ab a", "special": False, "normalized": False},
}
TEXTS = ["ab ab", " a</s> b", "<new>a<s>", "ab a", "a  'ba'."]


def byte_level() -> Tokenizer:
    return tokenizer([bytes([byte]) for byte in b"ab '.<>/snew"] + [b"ab", b" a"])


def cut(made: Tokenizer) -> Tokenizer:
    made.enable_truncation(max_length=2)
    return made


def padded(made: Tokenizer) -> Tokenizer:
    made.enable_padding(pad_token="<pad>", length=32)
    return made


CASES: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "no config": (byte_level, {}),
    "strings": (byte_level, {"tokenizer_config.json": {**FAST, **NAMES}}),
    "dicts": (byte_level, {"tokenizer_config.json": {**FAST, **TYPED}}),
    "map": (byte_level, {"tokenizer_config.json": FAST, "special_tokens_map.json": NAMES}),
    "map of dicts": (byte_level, {"tokenizer_config.json": FAST, "special_tokens_map.json": DICTS}),
    "map and decoder": (
        byte_level,
        {
            "tokenizer_config.json": {**FAST, "added_tokens_decoder": {"40": NEW["id"]}},
            "special_tokens_map.json": NAMES,
        },
    ),
    "added decoder": (
        byte_level,
        {
            "tokenizer_config.json": {
                **FAST,
                **NAMES,
                "added_tokens_decoder": {"17": NEW["id"], "18": NEW["no"]},
            }
        },
    ),
    "added tokens": (
        byte_level,
        {"tokenizer_config.json": {**FAST, **NAMES}, "added_tokens.json": {"<new>": 17}},
    ),
    "more special tokens": (
        byte_level,
        {"tokenizer_config.json": {**FAST, "additional_special_tokens": ["<new>"]}},
    ),
    "own special token": (
        byte_level,
        {"tokenizer_config.json": {**FAST, **NAMES, "image_token": "<new>"}},
    ),
    "begin and end": (
        byte_level,
        {"tokenizer_config.json": {**FAST, **NAMES, "add_bos_token": True, "add_eos_token": True}},
    ),
    "special text split": (
        byte_level,
        {"tokenizer_config.json": {**FAST, **NAMES, "split_special_tokens": True}},
    ),
    "truncation": (lambda: cut(byte_level()), {"tokenizer_config.json": {**FAST, **NAMES}}),
    "padding": (lambda: padded(byte_level()), {"tokenizer_config.json": {**FAST, **NAMES}}),
    "class of its own": (
        lambda: padded(cut(llama())),
        {"tokenizer_config.json": {**FAST, **NAMES, "tokenizer_class": "LlamaTokenizerFast"}},
    ),
    "cleaned up": (
        word_piece,
        {"tokenizer_config.json": {**FAST, **NAMES, "clean_up_tokenization_spaces": True}},
    ),
    "cleaned up BPE": (
        byte_level,
        {"tokenizer_config.json": {**FAST, **NAMES, "clean_up_tokenization_spaces": True}},
    ),
    "template in a file": (
        byte_level,
        {
            "tokenizer_config.json": {**FAST, **NAMES},
            "chat_template.jinja": "a{{ messages[0].content }}",
        },
    ),
    "templates in files": (
        byte_level,
        {
            "tokenizer_config.json": {**FAST, **NAMES},
            "chat_template.jinja": "a{{ messages[0].content }}",
            "additional_chat_templates/tool_use.jinja": "b{{ tools }}",
        },
    ),
    "templates in a list": (
        byte_level,
        {
            "tokenizer_config.json": {
                **FAST,
                "chat_template": [{"name": "default", "template": TEMPLATE}],
            }
        },
    ),
}


def save(directory: Path, made: Tokenizer, contents: dict[str, Any]) -> None:
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made.save(str(directory / "tokenizer.json"))
    for name, content in contents.items():
        (directory / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_directory_is_read_as_transformers_does(case: str, tmp_path: Path) -> None:
    make, contents = CASES[case]
    save(tmp_path, make(), contents)
    check_as_transformers(tmp_path)


AB = 15
BPE = BPEModel(pieces(*SPECIAL, *"ab'.<>/snewĠ", "ab", "Ġa"), [("a", "b"), ("Ġ", "a")])


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gpt2", {}),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer", **NAMES, "add_prefix_space": True}),
        ("qwen2", {"chat_template": TEMPLATE, **NAMES}),
        ("llama", {"tokenizer_class": "GPT2Tokenizer", **NAMES}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_vocabulary_and_merges_are_read_as_transformers_does(
    model_type: str, config: dict[str, Any], tmp_path: Path
) -> None:
    BPE.save(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert sorted(path.name for path in tmp_path.glob("*[!g].*")) == ["merges.txt", "vocab.json"]
    assert TextCodec(read_tokenizer(tmp_path)).encode("ab ab").count(AB) == 2
    check_as_transformers(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "contents", "problem"),
    [
        ("gpt2", {"vocab.json": "{}"}, "vocab.json cannot be converted: .*merges"),
        ("gpt2", {"vocab.json": "[]", "merges.txt": ""}, "vocab.json cannot be converted: .*Bad"),
        ("llama", {"tokenizer.model": "\n"}, "tokenizer.model cannot be converted: .*install"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_vocabulary_that_cannot_be_converted_is_refused_with_the_reason(
    model_type: str, contents: dict[str, str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(NotConvertibleError, match=f"tokenizer.json is missing, and {problem}"):
        read_tokenizer(tmp_path)


def test_large_vocabulary_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BPE.save(str(tmp_path), None)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 20)
    with pytest.raises(ValueError, match=r"vocab.json has .* bytes, more than 20"):
        read_tokenizer(tmp_path)


def check_as_transformers(tmp_path: Path) -> None:
    factory: Any = AutoTokenizer
    theirs = factory.from_pretrained(tmp_path)
    facts = read_tokenizer(tmp_path)
    codec = TextCodec(facts)
    light = TextDecoder(codec.facts, codec.vocabulary().reader())
    for text in TEXTS:
        for special in (False, True):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            assert codec.encode(text, special=special) == expected, text
        decoded = codec.decode(expected)
        assert light.decode(expected) == decoded
        decoded = clean_up(decoded) if codec.cleans_up else decoded
        assert decoded == theirs.decode(expected, skip_special_tokens=True)
    assert facts.special_tokens == theirs.special_tokens_map
    template = theirs.chat_template or {}
    expected_templates = {"default": template} if isinstance(template, str) else template
    assert facts.chat_templates == expected_templates
    assert set(codec.special_tokens) >= set(theirs.all_special_ids)


def test_tokenizer_with_code_of_its_own_is_read_without_it(tmp_path: Path) -> None:
    code = {"auto_map": {"AutoTokenizer": ["code.Mine", None]}, "tokenizer_class": "Mine"}
    save(tmp_path, byte_level(), {"tokenizer_config.json": {**NAMES, **code}})
    (tmp_path / "code.py").write_text("raise SystemExit('this must not run')")
    facts = read_tokenizer(tmp_path)
    assert facts.special_tokens == NAMES
    assert TextCodec(facts).encode("ab") == TextCodec(read_tokenizer(tmp_path)).encode("ab")


def test_program_writes_the_same_facts(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), {"tokenizer_config.json": {**FAST, **NAMES}})
    command = [sys.executable, "-m", files.__name__, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert msgspec.json.decode(run.stdout, type=TokenizerFacts) == read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    run = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert run.returncode == 1
    assert run.stderr.strip()


def test_tokens_have_text_and_bytes() -> None:
    codec = decoder_of(byte_level())
    encode = TextCodec(read_of(byte_level())).encode
    tokens = encode("a a'")
    texts = [codec.token_text(token) for token in tokens]
    assert "".join(texts) == "a a'"
    assert [codec.token_bytes(t, text) for t, text in zip(tokens, texts, strict=True)] == [
        text.encode() for text in texts
    ]
    assert codec.token_text(10_000) == ""


def test_bytes_of_parts_of_characters_are_theirs() -> None:
    parts = "é".encode()
    codec = decoder_of(tokenizer([b"a", *(bytes([part]) for part in parts)]))
    assert [codec.token_bytes(t, codec.token_text(t)) for t in (1, 2)] == [parts[:1], parts[1:]]
    codec = decoder_of(llama())
    token = llama().token_to_id("<0xC3>")
    assert token is not None
    assert codec.token_text(token) == "\ufffd"
    assert codec.token_bytes(token, codec.token_text(token)) == b"\xc3"


def test_text_of_a_token_has_the_space_before_it() -> None:
    made = llama()
    codec = decoder_of(made)
    token = made.token_to_id("▁ab")
    assert token is not None
    assert codec.token_text(token) == " ab"
    assert codec.token_text(token, is_first=True) == "ab"


def read_of(made: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(made.to_str(), {}, {}, False, False)


def decoder_of(made: Tokenizer) -> TextDecoder:
    codec = TextCodec(read_of(made))
    return TextDecoder(codec.facts, codec.vocabulary().reader())
