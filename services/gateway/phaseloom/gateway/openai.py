"""OpenAI's API for completions, with the token ids and log-probabilities that trainers need.

`model` is a registered model, a checkpoint's path or a sampling session of the Tinker API. Beside
OpenAI's fields, vLLM's are understood: `return_token_ids`, `stop_token_ids`, `top_k`, `min_p`,
`ignore_eos`, `return_tokens_as_token_ids`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from phaseloom.client import CallerError, Prompt, SamplingParams, Sequence, float32s, int32s
from phaseloom.gateway.http import body_of, tenant_of
from phaseloom.gateway.records import CheckpointRecord
from phaseloom.gateway.sampling import Source, check_samples, source_of
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tokenizers import ModelTokenizer, tokenizer_of

PREFIX = "/v1"
_DEFAULT_TOKENS = 16

routes = web.RouteTableDef()


class _Asked(msgspec.Struct, frozen=True):
    """What completions and chat completions have in common."""

    model: str
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class Complete(_Asked, frozen=True, kw_only=True):
    prompt: Any
    """A text, tokens, or several of one of these."""
    logprobs: int | None = None
    echo: bool = False


class Chat(_Asked, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenSampling(_Asked, frozen=True, kw_only=True):
    """The `sampling_params` of a request for tokens."""

    model: str = ""
    logprobs: int | None = None


class Tokens(msgspec.Struct, frozen=True):
    model: str
    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    request_id: str = ""


@dataclass(frozen=True)
class Drawn:
    """The samples of one prompt."""

    prompt: list[int]
    sequences: list[Sequence]


@dataclass(frozen=True)
class Call:
    """A request and the weights that it samples from."""

    tenant: Tenant
    source: Source
    asked: _Asked

    @property
    def tokenizer(self) -> ModelTokenizer:
        return tokenizer_of(self.source.base.directory.path)

    def spell(self, token: int) -> str:
        """How a token is written beside its log-probability."""
        if self.asked.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.tokenizer.token(token)

    def text(self, sequence: Sequence) -> str:
        return self.tokenizer.decode(int32s(sequence.tokens))

    async def draw(self, tokens: list[int], limit: int, top: int) -> Drawn:
        """Sample continuations of a prompt.

        Args: limit: the most new tokens. top: of how many likeliest tokens at each position the
                  log-probabilities are told.
        """
        check_samples(self.asked.n)
        room = self.source.context - len(tokens)
        if room < 1 or not tokens:
            raise CallerError(
                f"a prompt of {len(tokens)} tokens cannot be continued",
                field="prompt",
                remedy=f"use 1 to {self.source.context - 1}",
            )
        sampling = _sampling(self.asked, min(limit, room), top)
        seed = random.getrandbits(62) if self.asked.seed is None else self.asked.seed
        prompt = Prompt(tokens, seed=seed)
        handle = await self.source.generate(self.tenant, prompt, sampling, self.asked.n)
        return Drawn(tokens, (await handle).sequences[0])


def _sampling(asked: _Asked, max_tokens: int, top: int) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": 0 if asked.top_k == -1 else asked.top_k,
        "min_p": asked.min_p,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
    }
    return SamplingParams(
        max_tokens,
        stop_token_ids=asked.stop_token_ids or [],
        stop_strings=[asked.stop] if isinstance(asked.stop, str) else asked.stop or [],
        ignore_eos=asked.ignore_eos,
        top_logprobs=top,
        **{name: value for name, value in given.items() if value is not None},
    )


@routes.get(PREFIX + "/models")
async def models(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    saved = tenant.book.all(CheckpointRecord, tenant.name)
    names = [base.name for base in await tenant.bases()]
    names += [each.id for each in saved if "/sampler_weights/" in each.id]
    listed = [
        {"id": name, "object": "model", "created": 0, "owned_by": "phaseloom"} for name in names
    ]
    return web.json_response({"object": "list", "data": listed})


@routes.post(PREFIX + "/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    tenant, asked = tenant_of(request), await body_of(request, Complete)
    call = Call(tenant, await source_of(tenant, asked.model), asked)
    if asked.echo:
        raise CallerError("a prompt is not answered again", field="echo", remedy="leave it out")
    prompts = [
        call.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in _prompts(asked.prompt)
    ]
    limit = asked.max_tokens or _DEFAULT_TOKENS
    drawn = await asyncio.gather(
        *(call.draw(tokens, limit, asked.logprobs or 0) for tokens in prompts)
    )
    choices: list[dict[str, Any]] = []
    for each in drawn:
        for sequence in each.sequences:
            choice = {
                "index": len(choices),
                "text": call.text(sequence),
                "finish_reason": sequence.stop_reason,
                "logprobs": None if asked.logprobs is None else _logprobs(call, sequence),
            }
            if asked.return_token_ids:
                choice["token_ids"] = int32s(sequence.tokens)
                choice["prompt_token_ids"] = each.prompt
            choices.append(choice)
    answer = _envelope("cmpl", "text_completion", asked.model, drawn, choices)
    return await _sent(request, asked, answer)


@routes.post(PREFIX + "/chat/completions")
async def chat(request: web.Request) -> web.StreamResponse:
    tenant, asked = tenant_of(request), await body_of(request, Chat)
    call = Call(tenant, await source_of(tenant, asked.model), asked)
    values = {**(asked.chat_template_kwargs or {})}
    if asked.tools:
        values["tools"] = asked.tools
    tokens = call.tokenizer.chat(asked.messages, **values)
    limit = asked.max_completion_tokens or asked.max_tokens or call.source.context
    drawn = await call.draw(tokens, limit, asked.top_logprobs or 0)
    choices = []
    for index, sequence in enumerate(drawn.sequences):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": call.text(sequence)},
            "finish_reason": sequence.stop_reason,
            "logprobs": {"content": _chat_logprobs(call, sequence)} if asked.logprobs else None,
        }
        if asked.return_token_ids:
            choice["token_ids"] = int32s(sequence.tokens)
        choices.append(choice)
    answer = _envelope("chatcmpl", "chat.completion", asked.model, [drawn], choices)
    if asked.return_token_ids:
        answer["prompt_token_ids"] = tokens
    return await _sent(request, asked, answer)


@routes.post("/inference/v1/generate")
async def tokens(request: web.Request) -> web.StreamResponse:
    """Tokens in, tokens out, as vLLM has it and agent frameworks ask for it."""
    tenant, asked = tenant_of(request), await body_of(request, Tokens)
    params = asked.sampling_params
    call = Call(tenant, await source_of(tenant, asked.model), params)
    limit = params.max_tokens or _DEFAULT_TOKENS
    drawn = await call.draw(asked.token_ids, limit, params.logprobs or 0)
    choices = []
    for index, sequence in enumerate(drawn.sequences):
        both = zip(int32s(sequence.tokens), float32s(sequence.logprobs), strict=True)
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in both]
        choices.append(
            {
                "index": index,
                "token_ids": int32s(sequence.tokens),
                "finish_reason": sequence.stop_reason,
                "logprobs": {"content": content},
            }
        )
    name = asked.request_id or uuid.uuid4().hex
    return web.json_response({"request_id": name, "choices": choices})


def _prompts(prompt: object) -> list[str | list[int]]:
    """Raises: CallerError: they are none."""
    kinds: tuple[Any, ...] = (str | list[int], list[str], list[list[int]])
    for kind in kinds:
        with suppress(msgspec.ValidationError):
            found: Any = msgspec.convert(prompt, kind)
            return [found] if kind is kinds[0] else [*found]
    raise CallerError(
        "a prompt is a text, a list of tokens, or a list of one of these",
        field="prompt",
        remedy="give one of these",
    )


def _tops(call: Call, sequence: Sequence) -> list[dict[str, float]]:
    """The likeliest tokens at each position with their log-probabilities."""
    names = [call.spell(token) for token in int32s(sequence.top_tokens)]
    both = list(zip(names, float32s(sequence.top_logprobs), strict=True))
    length = len(int32s(sequence.tokens))
    count = len(both) // max(length, 1)
    return [dict(both[at * count : (at + 1) * count]) for at in range(length)]


def _logprobs(call: Call, sequence: Sequence) -> dict[str, Any]:
    return {
        "tokens": [call.spell(token) for token in int32s(sequence.tokens)],
        "token_logprobs": float32s(sequence.logprobs),
        "top_logprobs": _tops(call, sequence),
        "text_offset": [],
    }


def _chat_logprobs(call: Call, sequence: Sequence) -> list[dict[str, Any]]:
    both = zip(int32s(sequence.tokens), float32s(sequence.logprobs), strict=True)
    return [
        {
            "token": call.spell(token),
            "logprob": value,
            "bytes": None,
            "top_logprobs": [
                {"token": other, "logprob": its, "bytes": None} for other, its in tops.items()
            ],
        }
        for (token, value), tops in zip(both, _tops(call, sequence), strict=True)
    ]


def _envelope(
    prefix: str, kind: str, model: str, drawn: list[Drawn], choices: list[dict[str, Any]]
) -> dict[str, Any]:
    asked = sum(len(each.prompt) for each in drawn)
    made = sum(len(int32s(sequence.tokens)) for each in drawn for sequence in each.sequences)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
        },
    }


async def _sent(request: web.Request, asked: _Asked, answer: dict[str, Any]) -> web.StreamResponse:
    """Send the answer; for `stream` as events, each choice in one chunk once it is whole."""
    if not asked.stream:
        return web.json_response(answer)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    is_chat = answer["object"] == "chat.completion"
    for choice in answer["choices"]:
        part = {**choice}
        if is_chat:
            part["delta"] = part.pop("message")
        kind = "chat.completion.chunk" if is_chat else answer["object"]
        chunk = msgspec.json.encode({**answer, "object": kind, "choices": [part]})
        await stream.write(b"data: " + chunk + b"\n\n")
    await stream.write(b"data: [DONE]\n\n")
    return stream
