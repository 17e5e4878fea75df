"""A tokenizer whose tokens are bytes, as GPT-2's kin has them: characters are cut over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode


def tokenizer(tokens: Sequence[bytes]) -> Tokenizer:
    """Args: tokens: what each token says."""
    spelling: Any = bytes_to_unicode
    spelled = spelling()
    words = {"".join(spelled[byte] for byte in token): i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def save_tokenizer(directory: Path, tokens: Sequence[bytes]) -> None:
    """Write the tokenizer of a model's directory anew."""
    tokenizer(tokens).save(str(directory / "tokenizer.json"))


def pieces(*words: str) -> dict[str, int]:
    return {word: i for i, word in enumerate(words)}


FALLBACK = [f"<0x{byte:02X}>" for byte in "é中a".encode()]
WORDS = ["▁", "▁a", "a", "ab", "▁ab", "▁b", "ba", "."]


def llama() -> Tokenizer:
    """A tokenizer as Llama 2 has: `▁` for a space, bytes for other characters, and a decoder that
    drops a leading space."""
    made = Tokenizer(models.BPE(pieces(*FALLBACK, *WORDS), [], byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made
