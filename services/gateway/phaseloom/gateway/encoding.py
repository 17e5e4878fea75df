"""Functions of the worker processes that hold a model's tokenizer and encode text.

`load` runs once, in the process from which they are forked, so all of them share its memory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from array import array

import msgspec

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.process.diewithparent import launcher
from phaseloom.common.text import files
from phaseloom.common.text.codec import DecoderFacts, TextCodec, Vocabulary

_READ_S = 120.0
_SLICE_CHARS = 2**16
_CUT_TOKENS = 64
"""Tokens that a cut between two slices may add."""


class Described(msgspec.Struct, frozen=True):
    """All of a tokenizer except what encoding needs."""

    digest: str
    """Of all of it."""
    decoder: DecoderFacts
    vocabulary: Vocabulary
    special_texts: dict[str, str]
    chat_templates: dict[str, str]


class _Tokenizer:
    """The tokenizer of this process."""

    def __init__(self, directory: str) -> None:
        facts = _read(directory)
        self.codec = TextCodec(facts)
        self.described = Described(
            hashlib.sha256(msgspec.json.encode(facts)).hexdigest(),
            self.codec.facts,
            self.codec.vocabulary(),
            facts.special_tokens,
            facts.chat_templates,
        )


def _read(directory: str) -> files.TokenizerFacts:
    """Read a tokenizer as `read_tokenizer`, in another process. Raises: ValueError: it failed."""
    command = launcher([sys.executable, "-m", files.__name__, directory])
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_READ_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes longer than {_READ_S:.0f} s") from None
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else f"the process ended with {ended.returncode}")
    return msgspec.json.decode(ended.stdout, type=files.TokenizerFacts)


_loaded: list[_Tokenizer | str] = []
"""The tokenizer, or why it cannot be read."""


def load(directory: str) -> None:
    """Read the tokenizer of a model's directory."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    try:
        _loaded.append(_Tokenizer(directory))
    except Exception as error:  # the library raises plain Exceptions
        _loaded.append(str(error) or repr(error))


def describe(model: str) -> Described:
    """Raises: CallerError: FAILED_PRECONDITION: the tokenizer cannot be read."""
    (tokenizer,) = _loaded
    if isinstance(tokenizer, str):
        raise CallerError(
            f"the tokenizer of model {model!r} cannot be read: {tokenizer}",
            code=Code.FAILED_PRECONDITION,
            field="model",
            remedy=f"send tokens, or {files.HOW_TO_CONVERT}",
        )
    return tokenizer.described


def encode(digest: str, texts: list[str], num_tokens: int, special: bool) -> list[bytes]:
    """Encode texts. Returns: the tokens of each as 32-bit integers.

    Args:   digest: that of the tokenizer at first.
            num_tokens: maximum number of tokens of one text.
            special: whether to add special tokens, such as the initial one.
    Raises: CallerError: a text has more tokens. ResourceError: DATA_LOSS: the tokenizer's files
            have changed.
    """
    (tokenizer,) = _loaded
    if isinstance(tokenizer, str) or tokenizer.described.digest != digest:
        raise ResourceError(
            "the tokenizer of the model differs from the one that was registered",
            code=Code.DATA_LOSS,
            field="model",
            remedy="restore its files, or register the directory under another name",
        )
    codec = tokenizer.codec
    for text in texts:
        if len(text) > num_tokens:
            _check_length(codec, text, num_tokens)
    return [array("i", codec.encode(text, special=special)).tobytes() for text in texts]


def _check_length(codec: TextCodec, text: str, num_tokens: int) -> None:
    # Count slices first: encoding needs 170 times the memory of a text. A slice may cut words.
    count = 0
    for start in range(0, len(text), _SLICE_CHARS):
        count += codec.num_tokens(text[start : start + _SLICE_CHARS])
        num_slices = start // _SLICE_CHARS + 1
        if count > 2 * num_tokens + _CUT_TOKENS * num_slices:
            raise CallerError(
                f"a prompt must have at most {num_tokens} tokens, got about "
                f"{count * len(text) // min(len(text), num_slices * _SLICE_CHARS)}",
                field="prompt",
                remedy="shorten it",
            )
