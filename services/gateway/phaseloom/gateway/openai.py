"""OpenAI's API for completions, with the token ids and log-probabilities that trainers need.

`model` is a registered model, a checkpoint of a controller (`checkpoint:JOB/DEPLOYMENT/NAME`), or a
checkpoint's path or a sampling session of the Tinker API. In addition to OpenAI's fields, these
fields of vLLM are supported: `return_token_ids`, `stop_token_ids`, `top_k`, `min_p`, `ignore_eos`,
`return_tokens_as_token_ids`. An unsupported field is refused by name, unless its value requests
nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from phaseloom.client import (
    CallerError,
    GenerateHandle,
    PhaseloomError,
    Piece,
    Prompt,
    SamplingParams,
    Sequence,
    float32s,
    int32s,
    outcome_of,
)
from phaseloom.common.contract.arrays import length
from phaseloom.common.process import lifecycle
from phaseloom.common.text.parts import TextParts
from phaseloom.gateway.core import bodies
from phaseloom.gateway.core.bodies import Asked, Body, Chat, Complete, StreamOptions, Tokens
from phaseloom.gateway.core.templates import rendered_json
from phaseloom.gateway.http import WORKERS, error_body, status_of, tenant_of, worked_out
from phaseloom.gateway.models import Draw
from phaseloom.gateway.records import CheckpointRecord, ModelRecord
from phaseloom.gateway.replicas import HUNG_UP, LOOK_S, content_of
from phaseloom.gateway.sampling import NATIVE, Source, check_samples, source_of
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tokenizers import TOKENIZERS, ModelTokenizer

PREFIX = "/v1"
_NEVER = -9999.0
_DEFAULT_TOKENS = 16
_MAX_ANSWER_BYTES = 128 * 2**20
"""Maximum bytes of the tokens and log-probabilities of an answer."""
_RENDER_S = 2.0
"""Processor time that rendering a chat template may take."""

routes = web.RouteTableDef()


@dataclass(frozen=True)
class Call:
    """A request and the weights that it samples from."""

    tenant: Tenant
    source: Source
    body: Asked
    tokenizer: ModelTokenizer | None = None
    """None: the request has tokens only, and so has the answer."""

    def spell(self, token: int, *, is_first: bool = False) -> tuple[str, list[int] | None]:
        """Return a token's text, as it is shown with its log-probability, and bytes.

        Args: is_first: neither the prompt nor the sample has text before it.
        """
        if self.tokenizer is None:
            return _token_id(token), None
        text = self.tokenizer.token_text(token, is_first=is_first)
        spelling = _token_id(token) if self.body.return_tokens_as_token_ids else text
        return spelling, [*self.tokenizer.token_bytes(token, text)]

    def text(self, prompt: bytes) -> TextParts:
        """Create a `TextParts` for the text of one sample of a packed prompt."""
        assert self.tokenizer is not None
        return TextParts(
            self.tokenizer,
            memoryview(prompt).cast("i"),
            _stops(self.body),
            includes_stop=self.body.include_stop_str_in_output,
        )

    async def submit(self, tokens: bytes, limit: int, top: int) -> GenerateHandle:
        """Submit a `generate` that continues a prompt.

        Args:   tokens: the prompt, packed.
                limit: maximum new tokens.
                top: number of likeliest tokens at each position whose log-probabilities are
                    returned.
        Raises: CallerError: the prompt fills the context.
        """
        check_samples(self.body.n, "n")
        num_tokens = length(tokens)
        room = self.source.context - num_tokens
        if room < 1 or not tokens:
            raise CallerError(
                f"a prompt must have 1 to {self.source.context - 1} tokens, got {num_tokens}",
                field="prompt",
                remedy=f"use 1 to {self.source.context - 1}",
            )
        sampling = _sampling(self.body, min(limit, room), top)
        seed = random.getrandbits(62) if self.body.seed is None else self.body.seed
        prompt = Prompt(tokens, seed=seed)
        draw = Draw(prompt, sampling, self.body.n, stream=self.body.stream)
        return await self.source.generate(self.tenant, draw)


@dataclass(frozen=True)
class Part:
    """A choice, or a part of one."""

    piece: Piece
    text: str
    offsets: list[int]
    """Position in the text at which each token begins. Empty if the form has no offsets."""
    is_first: bool
    """Whether neither the prompt nor the sample has text before it."""


@dataclass(frozen=True)
class Form:
    """The form in which an answer is written."""

    envelope: dict[str, Any]
    """Fields of every answer, and of every event of a stream."""
    choice: Callable[[int, Part], dict[str, Any]]
    """Builds a choice, or a part of one, from its index and the part."""
    event: str = ""
    """The `object` of a stream's events. Empty: they have none."""
    once: dict[str, Any] = field(default_factory=dict)
    """Additional fields of a whole answer, and of the first event of a stream."""
    has_text: bool = True
    has_offsets: bool = False


async def _read(request: web.Request, kind: type[Asked | Tokens]) -> Body:
    """Read the body of a request. Raises: CallerError: as `bodies.read`."""
    return await worked_out(request, bodies.read, await content_of(request), kind.__name__)


def _stops(body: Asked) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


def _sampling(body: Asked, max_tokens: int, top: int) -> SamplingParams:
    optional_values: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    return SamplingParams(
        max_tokens,
        stop_token_ids=body.stop_token_ids or [],
        stop_strings=_stops(body),
        ignore_eos=body.ignore_eos,
        top_logprobs=top,
        **{name: value for name, value in optional_values.items() if value is not None},
    )


@routes.get(PREFIX + "/models")
async def models(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    saved = tenant.book.all(CheckpointRecord, tenant.name)
    trained = {model.job for model in tenant.book.all(ModelRecord, tenant.name)}
    names = [base.name for base in await tenant.bases()]
    names += [checkpoint.id for checkpoint in saved if "/sampler_weights/" in checkpoint.id]
    names += [
        f"{NATIVE}{native.job}/{native.deployment}/{native.name}"
        for native in await tenant.models.native()
        if native.model in names and native.job not in trained
    ]
    return web.json_response({"object": "list", "data": [*map(_model, names)]})


@routes.get(PREFIX + "/models/{model:.+}")
async def model(request: web.Request) -> web.Response:
    tenant, name = tenant_of(request), request.match_info["model"]
    await source_of(tenant, name)
    return web.json_response(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "phaseloom"}


@routes.post(PREFIX + "/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    tenant, given = tenant_of(request), await _read(request, Complete)
    body = msgspec.json.decode(given.fields, type=Complete)
    source = await source_of(tenant, body.model)
    tokenizer = await request.app[TOKENIZERS].of(source.base)
    call = Call(tenant, source, body, tokenizer)
    texts = [prompt.text for prompt in given.prompts if prompt.text is not None]
    if texts:  # then all prompts are texts
        prompts = await tokenizer.encode(
            texts, source.context, tenant.name, special=body.add_special_tokens
        )
    else:
        prompts = [prompt.tokens for prompt in given.prompts]

    def choice(index: int, part: Part) -> dict[str, Any]:
        piece = part.piece
        written = {
            "index": index,
            "text": part.text,
            "finish_reason": piece.stop_reason or None,
            "logprobs": None if body.logprobs is None else _logprobs(call, part),
        }
        if body.return_token_ids:
            written["token_ids"] = piece.tokens
            if not piece.offset:
                written["prompt_token_ids"] = int32s(prompts[piece.prompt])
        return written

    form = Form(
        _envelope("cmpl", "text_completion", body.model),
        choice,
        "text_completion",
        has_offsets=body.logprobs is not None,
    )
    limit = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    return await _answer(request, call, form, prompts, limit=limit, top=body.logprobs or 0)


@routes.post(PREFIX + "/chat/completions")
async def chat(request: web.Request) -> web.StreamResponse:
    tenant, given = tenant_of(request), await _read(request, Chat)
    body = msgspec.json.decode(given.fields, type=Chat)
    _check_chat(body)
    source = await source_of(tenant, body.model)
    tokenizer = await request.app[TOKENIZERS].of(source.base)
    call = Call(tenant, source, body, tokenizer)
    text = await request.app[WORKERS].run(
        rendered_json,
        tokenizer.templates,
        tokenizer.special_texts,
        given.conversation,
        body.tool_choice != "none",
        deadline_s=_RENDER_S,
        what=f"the chat template of model {source.base.name!r}",
        key=tenant.name,
    )
    (prompt,) = await tokenizer.encode([text], source.context, tenant.name)
    message = "delta" if body.stream else "message"

    def choice(index: int, part: Part) -> dict[str, Any]:
        piece = part.piece
        role = {} if piece.offset else {"role": "assistant"}
        written: dict[str, Any] = {
            "index": index,
            message: {**role, "content": part.text},
            "finish_reason": piece.stop_reason or None,
            "logprobs": {"content": _chat_logprobs(call, part)} if body.logprobs else None,
        }
        if body.return_token_ids:
            written["token_ids"] = piece.tokens
        return written

    form = Form(
        _envelope("chatcmpl", "chat.completion", body.model),
        choice,
        "chat.completion.chunk",
        {"prompt_token_ids": int32s(prompt)} if body.return_token_ids else {},
    )
    limits = (body.max_completion_tokens, body.max_tokens, call.source.context)
    limit = next(bound for bound in limits if bound is not None)
    return await _answer(request, call, form, [prompt], limit=limit, top=body.top_logprobs or 0)


def _check_chat(body: Chat) -> None:
    """Raises: CallerError: the request forces a tool call, or asks for likeliest tokens without
    log-probabilities."""
    if body.tool_choice not in (None, "auto", "none"):
        raise CallerError(
            "a tool call cannot be forced",
            field="tool_choice",
            remedy='use "auto" or "none"',
        )
    if body.top_logprobs and not body.logprobs:
        raise CallerError(
            "top_logprobs needs logprobs",
            field="top_logprobs",
            remedy="set logprobs=true, or omit top_logprobs",
        )


@routes.post("/inference/v1/generate")
async def tokens(request: web.Request) -> web.StreamResponse:
    """Sample from tokens and return tokens, in the form of vLLM that agent frameworks use."""
    tenant, given = tenant_of(request), await _read(request, Tokens)
    body = msgspec.json.decode(given.fields, type=Tokens)
    params = msgspec.structs.replace(
        body.sampling_params,
        stream=body.stream,
        stream_options=body.stream_options,
        return_tokens_as_token_ids=True,
    )
    call = Call(tenant, await source_of(tenant, body.model), params)

    def choice(index: int, part: Part) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": part.piece.tokens,
            "finish_reason": part.piece.stop_reason or None,
            "logprobs": {"content": _chat_logprobs(call, part)},
        }

    form = Form({"request_id": body.request_id or uuid.uuid4().hex}, choice, has_text=False)
    prompts = [prompt.tokens for prompt in given.prompts]
    limit = _DEFAULT_TOKENS if params.max_tokens is None else params.max_tokens
    return await _answer(request, call, form, prompts, limit=limit, top=params.logprobs or 0)


def _token_id(token: int) -> str:
    return f"token_id:{token}"


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: -inf, of a token that the model excludes, is
    -9999.0, as in OpenAI's API."""
    return max(logprob, _NEVER)


def _tops(piece: Piece) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens at each position, with their log-probabilities."""
    both = list(zip(piece.top_tokens, map(_finite, piece.top_logprobs), strict=True))
    length = len(piece.tokens)
    count = len(both) // max(length, 1)
    return [both[at * count : (at + 1) * count] for at in range(length)]


def _logprobs(call: Call, part: Part) -> dict[str, Any]:
    names: list[str] = []
    tops: list[dict[str, float]] = []
    drawn = zip(part.piece.tokens, part.piece.logprobs, _tops(part.piece), strict=True)
    for i, (token, logprob, likeliest) in enumerate(drawn):
        is_first = part.is_first and not i
        name, _ = call.spell(token, is_first=is_first)
        if all(other != token for other, _ in likeliest):
            likeliest.append((token, _finite(logprob)))
        by_text: dict[str, float] = {}
        for other, value in likeliest:
            text, _ = call.spell(other, is_first=is_first)
            is_taken = text in by_text or (text == name and other != token)
            by_text[_token_id(other) if is_taken else text] = value
        names.append(name)
        tops.append(by_text)
    return {
        "tokens": names,
        "token_logprobs": [*map(_finite, part.piece.logprobs)],
        "top_logprobs": tops,
        "text_offset": part.offsets,
    }


def _chat_logprobs(call: Call, part: Part) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float, *, is_first: bool) -> dict[str, Any]:
        text, content = call.spell(token, is_first=is_first)
        return {"token": text, "logprob": _finite(logprob), "bytes": content}

    entries = []
    drawn = zip(part.piece.tokens, part.piece.logprobs, _tops(part.piece), strict=True)
    for i, (token, logprob, likeliest) in enumerate(drawn):
        is_first = part.is_first and not i
        tops = [entry(*other, is_first=is_first) for other in likeliest]
        entries.append({**entry(token, logprob, is_first=is_first), "top_logprobs": tops})
    return entries


def _envelope(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


# --- Answers, whole and as streams ----------------------------------------------------------------


async def _answer(
    request: web.Request,
    call: Call,
    form: Form,
    prompts: list[bytes],
    *,
    limit: int,
    top: int,
) -> web.StreamResponse:
    """Sample from the prompts and write the answer. If the caller disconnects, sampling is
    cancelled."""
    handles: list[GenerateHandle] = []
    num_bytes = len(prompts) * call.body.n * min(limit, call.source.context) * 8 * (1 + top)
    if num_bytes > _MAX_ANSWER_BYTES:
        raise CallerError(
            f"the answer may have {num_bytes} bytes, but at most {_MAX_ANSWER_BYTES} are allowed",
            field="max_tokens",
            remedy="request fewer tokens, samples or log-probabilities, or send several requests",
        )

    async def submitted(tokens: bytes) -> GenerateHandle:
        handle = await call.submit(tokens, limit, top)
        handles.append(handle)
        return handle

    async def work() -> web.StreamResponse:
        answer_handles = await asyncio.gather(*map(submitted, prompts))
        answer = _Answer(request, call, prompts, form)
        try:
            return await (
                answer.stream(answer_handles) if call.body.stream else answer.whole(answer_handles)
            )
        except ConnectionResetError:
            return web.Response(status=HUNG_UP)

    task = asyncio.create_task(work())
    try:
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if request.transport is None:
                return web.Response(status=HUNG_UP)
        return await task
    finally:
        await lifecycle.end([task])
        for handle in handles:
            if not handle.done():
                with suppress(PhaseloomError):  # nobody awaits it, so it may end later
                    await handle.cancel()


class _Answer:
    """One answer, written whole or as a stream."""

    def __init__(self, request: web.Request, call: Call, prompts: list[bytes], form: Form) -> None:
        self._request = request
        self._call = call
        self._form = form
        self._prompts = prompts
        self._texts: dict[int, TextParts] = {}
        self._num_drawn = 0
        self._events = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._first = asyncio.Lock()

    async def whole(self, handles: list[GenerateHandle]) -> web.StreamResponse:
        results = await asyncio.gather(*(outcome_of(handle) for handle in handles))
        pieces = [
            _whole(prompt, sample, sequence)
            for prompt, result in enumerate(results)
            for sample, sequence in enumerate(result.sequences[0])
        ]
        choices = await asyncio.to_thread(
            lambda: [msgspec.Raw(msgspec.json.encode(self._choice(piece))) for piece in pieces]
        )
        answer = {**self._form.envelope, **self._form.once}
        # OpenAI's clients can read this field; here it names the job that sampled.
        tenant, job, *_ = handles[0].key.split(".")
        answer["system_fingerprint"] = f"{tenant}.{job}"
        content = msgspec.json.encode({**answer, "choices": choices, "usage": self._usage()})
        return web.Response(body=content, content_type="application/json")

    async def stream(self, handles: list[GenerateHandle]) -> web.StreamResponse:
        """Write the pieces of all samples as they are drawn.

        An error before the first piece becomes an error response. Later it becomes an event of the
        stream.
        """
        options = self._call.body.stream_options or StreamOptions()
        writers = [
            asyncio.create_task(self._write_pieces(i, handle)) for i, handle in enumerate(handles)
        ]
        try:
            await asyncio.gather(*writers)
            if options.include_usage:
                await self._write({"choices": [], "usage": self._usage()})
        except PhaseloomError as error:
            if not self._events.prepared:
                raise
            error_fields = (status_of(error), str(error), error.info.field or "")
            await self._write(error_body(self._request.path, *error_fields))
        finally:
            await lifecycle.end(writers)
        await self._events.write(b"data: [DONE]\n\n")
        return self._events

    async def _write_pieces(self, prompt: int, handle: GenerateHandle) -> None:
        async for piece in handle.stream():
            choice = self._choice(msgspec.structs.replace(piece, prompt=prompt))
            await self._write({"choices": [choice]})

    async def _write(self, fields: dict[str, Any]) -> None:
        once: dict[str, Any] = {}
        async with self._first:
            if not self._events.prepared:
                once = self._form.once
                await self._events.prepare(self._request)
        kind = {"object": self._form.event} if self._form.event else {}
        event = msgspec.json.encode({**self._form.envelope, **kind, **once, **fields})
        await self._events.write(b"data: " + event + b"\n\n")

    def _choice(self, piece: Piece) -> dict[str, Any]:
        self._num_drawn += len(piece.tokens)
        index = piece.prompt * self._call.body.n + piece.sample
        if not self._form.has_text:
            return self._form.choice(index, Part(piece, "", [], False))
        if index not in self._texts:
            self._texts[index] = self._call.text(self._prompts[piece.prompt])
        parts = self._texts[index]
        is_first = not parts.has_text
        text, offsets, tokens = "", [], piece.tokens
        if self._form.has_offsets:
            for token in tokens:
                offsets.append(parts.num_chars)
                text += parts.take([token], is_last=False)
            tokens = []
        text += parts.take(tokens, is_last=bool(piece.stop_reason))
        return self._form.choice(index, Part(piece, text, offsets, is_first))

    def _usage(self) -> dict[str, int]:
        prompt_tokens = sum(map(length, self._prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_drawn,
            "total_tokens": prompt_tokens + self._num_drawn,
        }


def _whole(prompt: int, sample: int, sequence: Sequence) -> Piece:
    return Piece(
        prompt,
        sample,
        0,
        int32s(sequence.tokens),
        float32s(sequence.logprobs),
        int32s(sequence.top_tokens),
        float32s(sequence.top_logprobs),
        0,
        sequence.stop_reason,
    )
