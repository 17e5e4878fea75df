"""A registered model's tokenizer and chat template."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from aiohttp import web

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.common.process.diewithparent import launcher
from phaseloom.common.tensors.modelfiles import check_companions, is_companion
from phaseloom.common.text import files
from phaseloom.common.text.codec import TextCodec
from phaseloom.common.text.files import TokenizerFacts

_MAX_TOKENIZERS = 64
_READ_S = 120.0
_SHORT_CHARS = 2048
"""A text up to this length is encoded at once."""
_SLICE_CHARS = 2**16
_CUT_TOKENS = 64
"""Tokens that a cut between two slices may add."""
Turn = Callable[[], AbstractAsyncContextManager[None]]


class ModelTokenizer(TextCodec):
    """The tokenizer and the chat templates of one model."""

    def __init__(self, facts: TokenizerFacts) -> None:
        super().__init__(facts)
        self.templates = facts.chat_templates
        self.special_texts = facts.special_tokens

    async def encode_within(
        self, text: str, num_tokens: int, turn: Turn, *, special: bool = False
    ) -> list[int]:
        """Encode a text in a thread, if it has at most so many tokens.

        Args:   turn: the tenant's turn to use the threads.
        Raises: CallerError: it has more.
        """
        if len(text) <= _SHORT_CHARS:
            return self.encode(text, special=special)
        async with turn():
            return await asyncio.to_thread(self._encode_within, text, num_tokens, special)

    def _encode_within(self, text: str, num_tokens: int, special: bool) -> list[int]:
        # Count slices first: encoding needs 170 times the memory of a text. A slice may cut words.
        count = 0
        for start in range(0, len(text), _SLICE_CHARS):
            count += self.num_tokens(text[start : start + _SLICE_CHARS])
            num_slices = start // _SLICE_CHARS + 1
            if count > 2 * num_tokens + _CUT_TOKENS * num_slices:
                raise CallerError(
                    f"a prompt must have at most {num_tokens} tokens, got about "
                    f"{count * len(text) // min(len(text), num_slices * _SLICE_CHARS)}",
                    field="prompt",
                    remedy="shorten it",
                )
        return self.encode(text, special=special)


class Tokenizers:
    """The tokenizers of models. Each is read once, by a process of its own."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[str, ...], ModelTokenizer] = {}
        self._locks: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, base: RegisteredModel) -> ModelTokenizer:
        """Raises: CallerError: FAILED_PRECONDITION: the tokenizer cannot be read. ResourceError:
        DATA_LOSS: its files are not those that were registered."""
        hashes = (file.blake3 for file in base.directory.files if is_companion(file.name))
        key = (base.directory.path, *hashes)
        async with self._locks[key]:
            if key not in self._tokenizers:
                tokenizer = await _read(base)
                # After the reading: a change before it or meanwhile is found.
                await asyncio.to_thread(check_companions, base)
                if len(self._tokenizers) == _MAX_TOKENIZERS:
                    del self._tokenizers[next(iter(self._tokenizers))]
                self._tokenizers[key] = tokenizer
        return self._tokenizers[key]


TOKENIZERS = web.AppKey("tokenizers", Tokenizers)


async def _read(base: RegisteredModel) -> ModelTokenizer:
    process = await asyncio.create_subprocess_exec(
        *launcher([sys.executable, "-m", files.__name__, base.directory.path]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_READ_S):
            output, errors = await process.communicate()
        if process.returncode:
            raise ValueError(errors.decode(errors="replace").strip().rpartition("\n")[2])
        facts = msgspec.json.decode(output, type=TokenizerFacts)
        # The library raises plain Exceptions, and parsing a large file takes it a second.
        return await asyncio.to_thread(ModelTokenizer, facts)
    except Exception as error:
        raise CallerError(
            f"the tokenizer of model {base.name!r} cannot be read: {error or 'it takes too long'}",
            code=Code.FAILED_PRECONDITION,
            field="model",
            remedy="send tokens, or register the model with its tokenizer.json",
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
