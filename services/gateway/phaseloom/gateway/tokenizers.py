"""A registered model's tokenizer and chat template.

Loading a tokenizer can take seconds, in which the library lets no other thread run, and encoding
long texts takes a processor. Worker processes of each model do both. Tokens are decoded here: that
needs only the vocabulary's spellings and the decoder.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import nullcontext

from aiohttp import web

from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.common.process.workers import Turns, WorkerPool
from phaseloom.common.tensors.modelfiles import check_companions, is_companion
from phaseloom.common.text.codec import TextDecoder
from phaseloom.gateway import encoding
from phaseloom.gateway.encoding import Described

_MAX_TOKENIZERS = 64
_LOADING = 2
"""Tokenizers that are loaded at once."""
_SHORT_CHARS = 2**14
"""Texts up to this length together are encoded out of turn."""
_NUM_WORKERS = 3
"""Worker processes of a model. Long texts use at most two of them."""
_MEMORY_BYTES = 2**30
_MAX_WAITING = 8192
"""Calls of a tenant that may wait: as many as it may have open."""
_ENCODE_S = 60.0
_DESCRIBE_S = 30.0


class ModelTokenizer(TextDecoder):
    """The tokenizer and the chat templates of one model."""

    def __init__(self, described: Described, pool: WorkerPool, long_texts: Turns) -> None:
        """Args: long_texts: the turns in which tenants have long texts encoded."""
        super().__init__(described.decoder, described.vocabulary.reader())
        self.templates = described.chat_templates
        self.special_texts = described.special_texts
        self.pool = pool
        self._digest = described.digest
        self._long_texts = long_texts

    async def encode(
        self, texts: list[str], num_tokens: int, tenant: str, *, special: bool = False
    ) -> list[bytes]:
        """Encode texts. Returns: the tokens of each as 32-bit integers.

        Args:   num_tokens: maximum number of tokens of one text.
                special: whether to add special tokens, such as the initial one.
        Raises: CallerError: a text has more tokens. ResourceError: the tokenizer's files have
                changed, or the tenant has too many calls.
        """
        is_short = sum(map(len, texts)) <= _SHORT_CHARS
        async with nullcontext() if is_short else self._long_texts.turn(tenant):
            return await self.pool.run(
                encoding.encode,
                self._digest,
                texts,
                num_tokens,
                special,
                deadline_s=_ENCODE_S,
                what="the text",
                key=tenant,
            )


class Tokenizers:
    """The tokenizers of models, with the worker processes of each."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[str, ...], ModelTokenizer] = {}
        self._locks: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._loading = asyncio.Semaphore(_LOADING)
        self._long_texts = Turns(num_slots=2, slots_per_key=1, max_waiting=_MAX_WAITING)

    async def __aenter__(self) -> Tokenizers:
        return self

    async def __aexit__(self, *error: object) -> None:
        for tokenizer in self._tokenizers.values():
            tokenizer.pool.close()

    async def of(self, base: RegisteredModel) -> ModelTokenizer:
        """Return the tokenizer of a model. The first call of a model waits until it is loaded.

        Raises: CallerError: FAILED_PRECONDITION: the tokenizer cannot be read. ResourceError:
                DATA_LOSS: its files are not those that were registered.
        """
        hashes = (file.blake3 for file in base.directory.files if is_companion(file.name))
        key = (base.directory.path, *hashes)
        async with self._locks[key]:
            tokenizer = self._tokenizers.pop(key, None) or await self._load(base)
            self._tokenizers[key] = tokenizer  # the newest one comes last
            if len(self._tokenizers) > _MAX_TOKENIZERS:
                self._tokenizers.pop(next(iter(self._tokenizers))).pool.close()
        return tokenizer

    async def _load(self, base: RegisteredModel) -> ModelTokenizer:
        pool = WorkerPool(
            [encoding.__name__],
            num_workers=_NUM_WORKERS,
            memory_bytes=_MEMORY_BYTES,
            max_waiting=_MAX_WAITING,
            prepare=encoding.load,
            argument=base.directory.path,
        )
        try:
            async with self._loading:
                described = await pool.run(
                    encoding.describe, base.name, deadline_s=_DESCRIBE_S, what="the tokenizer"
                )
                # After the reading: a change before it or meanwhile is found.
                await asyncio.to_thread(check_companions, base)
            return ModelTokenizer(described, pool, self._long_texts)
        except BaseException:
            pool.close()
            raise


TOKENIZERS = web.AppKey("tokenizers", Tokenizers)
