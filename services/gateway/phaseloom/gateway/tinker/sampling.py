"""The sampling calls of the Tinker API."""

from __future__ import annotations

import asyncio
import random

import msgspec
from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import Prompt, outcome_of
from phaseloom.gateway.core import convert
from phaseloom.gateway.futures import Answer
from phaseloom.gateway.http import PREFIX, body_of, tenant_of, worked_out
from phaseloom.gateway.models import Draw
from phaseloom.gateway.records import SamplerRecord, SessionRecord
from phaseloom.gateway.replicas import content_of
from phaseloom.gateway.sampling import source_of
from phaseloom.gateway.tinker.calls import answer_with, tokenizer_name
from phaseloom.gateway.tinker.requests import CreateSamplingSession, Sample, read_sample

routes = web.RouteTableDef()


@routes.post(PREFIX + "/create_sampling_session")
async def create_sampling_session(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, CreateSamplingSession)
    tenant.book.get(SessionRecord, tenant.name, body.session_id)
    named = body.model_path or body.base_model or ""
    source = await source_of(tenant, named)
    name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    await tenant.book.put(
        SamplerRecord(
            tenant.name, name, source.base.name, path="" if named == source.base.name else named
        )
    )
    return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})


@routes.get(PREFIX + "/samplers/{sampler}")
async def get_sampler(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    record = tenant.book.get(SamplerRecord, tenant.name, request.match_info["sampler"])
    name = tokenizer_name(await tenant.base(record.base))
    return web.json_response(
        {"sampler_id": record.id, "base_model": name, "model_path": record.path or None}
    )


@routes.post(PREFIX + "/asample")
async def sample(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    short, tokens = await worked_out(request, read_sample, await content_of(request))
    body = msgspec.json.decode(short, type=Sample)
    body.check()
    source = await source_of(tenant, body.sampling_session_id)
    name = f"{body.sampling_session_id}:{body.seq_id}"
    promise = tenant.futures.find(name)
    if promise is None:
        num_tokens = len(tokens) // 4
        sampling = convert.sampling(body.sampling_params, num_tokens, source.context)
        num_top, num_prompt_top = body.topk_sample_logprobs, body.topk_prompt_logprobs
        sampling = replace(sampling, top_logprobs=num_top)
        seed = body.sampling_params.seed
        prompt = Prompt(tokens, seed=random.getrandbits(62) if seed is None else seed)

        async def draw() -> Answer:
            handle = await source.generate(
                tenant,
                Draw(
                    prompt,
                    sampling,
                    body.num_samples,
                    prompt_logprobs=bool(body.prompt_logprobs or num_prompt_top),
                    prompt_top_logprobs=num_prompt_top,
                ),
            )
            await drawing.comes_from(handle)
            last_n = body.prompt_logprobs_last_n or num_tokens
            result = await outcome_of(handle)
            return await asyncio.to_thread(
                convert.sampled_output, result, num_top, num_prompt_top, last_n
            )

        promise = drawing = tenant.futures.promise(name, draw)
    sequences = [f"{name}:{index}" for index in range(body.num_samples)]
    return await answer_with((name, promise), sample_sequence_ids=sequences)
