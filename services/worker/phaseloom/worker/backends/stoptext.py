"""Stop strings in the text of new tokens, and the text of each token as bytes.

A token may be only part of a character, so texts are compared as UTF-8 bytes. Token texts come from
the deployment's `token_texts` or from a registered model's `tokenizer.json`. Two forms of that file
are supported: byte-level tokens (GPT-2, Llama 3, Qwen), and character tokens with `▁` for a space
(Llama 2, Gemma). A special token has the text that it is written as.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from transformers.convert_slow_tokenizer import bytes_to_unicode

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.specs import ModelSpec

_FILE: Final = "tokenizer.json"
_SPACE: Final = "\u2581"


class StopText:
    """The end of a sample's text, just long enough to recognize stop strings."""

    def __init__(
        self, stops: Sequence[str], token_bytes: Sequence[bytes], generated: Sequence[int]
    ) -> None:
        """Args: token_bytes: the text of each token.
        generated: the sample's tokens so far."""
        self._stops = [stop.encode() for stop in stops]
        self._token_bytes = token_bytes
        # An incomplete stop string has at most this many bytes of the text before a token.
        self._keep = max(map(len, self._stops)) - 1
        self._tail = b""
        self._remember(b"".join(token_bytes[token] for token in generated))

    def ends_with(self, token: int) -> bool:
        """Add a token. Returns: whether its text completes a stop string."""
        text = self._tail + self._token_bytes[token]
        self._remember(text)
        return any(stop in text for stop in self._stops)

    def _remember(self, text: bytes) -> None:
        self._tail = text[-self._keep :] if self._keep else b""


def token_bytes(spec: ModelSpec, vocab_size: int) -> list[bytes]:
    """Return the UTF-8 bytes of each of the model's tokens; empty if a token has no text.

    Raises: CallerError: FAILED_PRECONDITION: the texts are unknown, or the tokenizer's form is not
             supported.
            ResourceError: DATA_LOSS: the tokenizer's file cannot be read.
    """
    if spec.token_texts:
        return [text.encode() for text in spec.token_texts]
    names = [] if spec.pinned is None else [file.name for file in spec.pinned.files]
    if spec.pinned is None or _FILE not in names:
        raise _unknown("the model has no token texts")
    path = Path(spec.pinned.path) / _FILE
    try:
        return _read(json.loads(path.read_bytes()), vocab_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResourceError(
            f"file {path} of the registered model cannot be read: {error!r}",
            code=Code.DATA_LOSS,
            field="model.registered",
            remedy="restore the file, or register the directory under another name",
        ) from error


def _read(tokenizer: Mapping[str, Any], vocab_size: int) -> list[bytes]:
    decoders = {decoder["type"] for decoder in _decoders(tokenizer["decoder"])}
    texts = [b""] * vocab_size
    for token, piece in _pieces(tokenizer["model"]["vocab"]):
        if token >= vocab_size:
            continue
        if "ByteLevel" in decoders:
            texts[token] = b"".join(_BYTES.get(char, char.encode()) for char in piece)
        elif decoders & {"ByteFallback", "Metaspace", "Replace"}:
            texts[token] = _unescaped(piece)
        else:
            raise _unknown(f"the tokenizer's decoders {sorted(decoders)} are not supported")
    for added in tokenizer.get("added_tokens") or ():
        if added["id"] < vocab_size:
            texts[added["id"]] = added["content"].encode()
    return texts


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    else:
        yield decoder


def _pieces(vocab: dict[str, int] | list[tuple[str, float]]) -> Iterator[tuple[int, str]]:
    """Yield each token id with its text as the tokenizer spells it."""
    if isinstance(vocab, dict):
        yield from ((token, piece) for piece, token in vocab.items())
    else:
        yield from ((token, piece) for token, (piece, _) in enumerate(vocab))


_BYTES: Final = {char: bytes([byte]) for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
"""The character that a byte-level tokenizer writes for a byte → the byte."""


def _unescaped(piece: str) -> bytes:
    """Return a token's text: `<0x0A>` stands for a byte and `▁` for a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(_SPACE, " ").encode()


def _unknown(problem: str) -> CallerError:
    return CallerError(
        f"stop_strings cannot be used: {problem}",
        code=Code.FAILED_PRECONDITION,
        field="args.sampling.stop_strings",
        remedy="declare the deployment with model.token_texts, or use stop_token_ids",
    )
