"""The calls of the Tinker API, under `/api/v1`.

A call that takes time answers at once with the name of a promise; the SDK asks for the promise
until it is kept. The name is made of the numbers that the SDK gives its calls. So a call that is
made again gets the promise that it had before, also from a gateway that was restarted meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
import nats.errors
from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import (
    Adapter,
    CallerError,
    Code,
    Lost,
    OperationHandle,
    PhaseloomError,
    Prompt,
    ResourceError,
    outcome_of,
)
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.checks import MAX_TOP_LOGPROBS
from phaseloom.common.contract.errors import to_exception
from phaseloom.common.contract.ids import check_name
from phaseloom.gateway.checkpoints import clean_up, clean_up_all, told_time, ttl_of
from phaseloom.gateway.core import convert
from phaseloom.gateway.futures import Answer, Promise, failed
from phaseloom.gateway.http import PREFIX, body_of, content_of, tenant_of
from phaseloom.gateway.models import POLICY, SAMPLER, Draw, TrainedModel, context_of
from phaseloom.gateway.records import (
    CallRecord,
    CheckpointRecord,
    ModelRecord,
    SamplerRecord,
    SessionRecord,
)
from phaseloom.gateway.sampling import check_samples, source_of
from phaseloom.gateway.tenants import Tenant

log = logging.getLogger(__name__)

LONG_POLL_S = 30.0
"""Seconds for which a call waits for a promise; the SDK waits 45 s for the answer."""
_PAUSE_S = 0.1
"""Seconds before a call whose promise is lost is answered: the SDK asks again at once."""
_PROTOBUF = "application/x-protobuf"

_MAX_NAME_CHARS = 256
"""The most characters of a checkpoint's name."""
_MAX_METADATA_BYTES = 65_536
"""The most bytes of a model's or a checkpoint's metadata."""

routes = web.RouteTableDef()


def _metadata(given: dict[str, Any] | None) -> dict[str, Any]:
    """The metadata of a request. Raises: CallerError: it is too large to be kept."""
    num_bytes = len(msgspec.json.encode(given)) if given else 0
    if num_bytes > _MAX_METADATA_BYTES:
        raise CallerError(
            f"the metadata has {num_bytes} bytes",
            field="user_metadata",
            remedy=f"give at most {_MAX_METADATA_BYTES} bytes, and keep the rest elsewhere",
        )
    return given or {}


class _Loose(msgspec.Struct, frozen=True):
    """A request. Fields that it does not name are ignored."""


class CreateSession(_Loose, frozen=True):
    user_metadata: dict[str, Any] | None = None


class OfSession(_Loose, frozen=True):
    session_id: str


class LoraConfig(_Loose, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to train; None: the rank is 0, which trains all weights.

        Raises: CallerError: the rank is negative, or no layer is trained.
        """
        if self.rank == 0:
            return None
        if self.rank < 0 or not (self.train_attn or self.train_mlp or self.train_unembed):
            raise CallerError(
                f"nothing is trained by {self}",
                field="lora_config",
                remedy="use a rank of 1 or more and some layers, or rank=0 to train all weights",
            )
        targets = (
            *(_ATTENTION if self.train_attn else ()),
            *(_MLP if self.train_mlp else ()),
            *(_UNEMBED if self.train_unembed else ()),
        )
        return Adapter(self.rank, seed=self.seed or 0, targets=targets)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_UNEMBED = ("lm_head",)


class CreateModel(_Loose, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, Any] | None = None


class OfModel(_Loose, frozen=True):
    model_id: str


class OptimStep(_Loose, frozen=True):
    model_id: str
    seq_id: int
    adam_params: dict[str, float | None]


class SaveWeights(_Loose, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class LoadWeights(_Loose, frozen=True):
    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(_Loose, frozen=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Sample(_Loose, frozen=True):
    sampling_session_id: str
    seq_id: int
    prompt: convert.ModelInput
    sampling_params: convert.SampleParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None

    def check(self) -> None:
        """Check that all that is asked for can be answered.

        Raises: CallerError: something cannot; names the field.
        """
        check_samples(self.num_samples)
        for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(self, field) <= MAX_TOP_LOGPROBS:
                raise CallerError(
                    f"the {getattr(self, field)} likeliest tokens are not answered",
                    field=field,
                    remedy=f"use 0 to {MAX_TOP_LOGPROBS}",
                )
        for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, field):
                raise CallerError(
                    f"{field} is not answered here",
                    field=field,
                    remedy="leave it out; topk_prompt_logprobs has the likeliest tokens",
                )


class RetrieveFuture(_Loose, frozen=True):
    request_id: str


class OfPath(_Loose, frozen=True):
    tinker_path: str = ""
    path: str = ""


# --- Sessions -------------------------------------------------------------------------------------


@routes.post(PREFIX + "/client/config")
async def client_config(request: web.Request) -> web.Response:
    return web.json_response({"pjwt_auth_enabled": False})


@routes.post(PREFIX + "/client/dynamic_config")
async def dynamic_config(request: web.Request) -> web.Response:
    return web.json_response({})


@routes.post(PREFIX + "/telemetry")
async def telemetry(request: web.Request) -> web.Response:
    """Accept the SDK's telemetry, and drop it: it is meant for another service."""
    return web.json_response({"status": "accepted"})


@routes.get(PREFIX + "/healthz")
async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@routes.get(PREFIX + "/get_server_capabilities")
async def capabilities(request: web.Request) -> web.Response:
    models = [
        {
            "model_name": model.name,
            "max_context_length": context_of(model),
            "trainable": True,
            "sampleable": True,
        }
        for model in await tenant_of(request).bases()
    ]
    return web.json_response({"supported_models": models})


@routes.post(PREFIX + "/create_session")
async def create_session(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    await body_of(request, CreateSession)
    session = SessionRecord(tenant.name, uuid.uuid4().hex)
    await tenant.book.put(session)
    tenant.beats[session.id] = time.monotonic()
    return web.json_response({"type": "create_session", "session_id": session.id})


@routes.post(PREFIX + "/session_heartbeat")
async def heartbeat(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, OfSession)
    if tenant.book.find(SessionRecord, tenant.name, asked.session_id) is None:
        return web.json_response({"detail": "the session is over"}, status=410)
    tenant.beats[asked.session_id] = time.monotonic()
    return web.json_response({"type": "session_heartbeat"})


@routes.post(PREFIX + "/sessions/{session}/finish")
async def finish_session(request: web.Request) -> web.Response:
    tenant, session = tenant_of(request), request.match_info["session"]
    await _end_session(tenant, tenant.book.get(SessionRecord, tenant.name, session))
    return web.json_response({})


async def _end_session(tenant: Tenant, session: SessionRecord) -> None:
    """End a session and its models. Checkpoints stay."""
    for model in tenant.book.all(ModelRecord, tenant.name):
        if model.id.startswith(f"{session.id}:"):
            await _finish(tenant, model)
    for call in tenant.book.all(CallRecord, tenant.name):
        if call.id.startswith(f"{session.id}:"):
            await tenant.book.drop(call)
    await tenant.book.drop(session)
    tenant.beats.pop(session.id, None)


async def end_silent_sessions(tenant: Tenant, silent_s: float) -> None:
    """End every session that was silent for `silent_s` seconds; runs until cancelled.

    The programs of such sessions are gone, and their models would keep their places on the mesh.
    For a session of an earlier gateway the time counts from this one's start. Files of expired
    checkpoints are removed in the same loop.
    """
    while True:
        now = time.monotonic()
        for session in tenant.book.all(SessionRecord, tenant.name):
            if now - tenant.beats.setdefault(session.id, now) > silent_s:
                try:
                    await _end_session(tenant, session)
                except (PhaseloomError, nats.errors.Error) as error:
                    log.warning("session %s is not ended yet: %s", session.id, error)
        await clean_up_all(tenant)
        await asyncio.sleep(silent_s / 4)


# --- Models ---------------------------------------------------------------------------------------


@routes.post(PREFIX + "/create_model")
async def create_model(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, CreateModel)
    await tenant.base(asked.base_model)
    lora = asked.lora_config or LoraConfig(0)
    adapter = lora.adapter
    if adapter is not None and not tenant.models.has_adapters:
        raise CallerError(
            "the backends of this gateway train all weights, and no adapters",
            code=Code.FAILED_PRECONDITION,
            field="lora_config.rank",
            remedy="ask for rank=0, which trains all weights",
        )
    record = await _new_model(
        tenant,
        asked.session_id,
        asked.model_seq_id,
        ModelRecord("", "", "", asked.base_model, 0, _metadata(asked.user_metadata), adapter),
    )
    return await _promised(_creating(tenant, record))


async def _new_model(
    tenant: Tenant,
    session: str,
    number: int,
    like: ModelRecord,
) -> ModelRecord:
    """The record of a model of a session, made now unless there is one.

    Args: number: the SDK's number of the model. like: the record without tenant, id and job.
    """
    tenant.book.get(SessionRecord, tenant.name, session)
    name = f"{session}:train:{number}"
    record = tenant.book.find(ModelRecord, tenant.name, name)
    if record is None:
        job = check_name(f"tinker-{session}-{number}", "model_seq_id")
        record = replace(like, tenant=tenant.name, id=name, job=job)
        await tenant.book.put(record)
    return record


def _creating(tenant: Tenant, record: ModelRecord) -> tuple[str, Promise]:
    async def create() -> Answer:
        await tenant.models.train(record.job, record.base, record.adapter)
        return {"type": "create_model", "model_id": record.id}

    name = f"create {record.id}"
    return name, tenant.futures.promise(name, create)


@routes.post(PREFIX + "/get_info")
async def get_info(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, OfModel)
    model = tenant.book.get(ModelRecord, tenant.name, asked.model_id)
    base = await tenant.base(model.base)
    return web.json_response(
        {
            "type": "get_info",
            "model_id": model.id,
            "model_name": base.name,
            **_lora(model.adapter),
            "model_data": {
                "arch": base.config.get("model_type"),
                "model_name": base.name,
                "tokenizer_id": base.directory.path,
            },
        }
    )


@routes.post(PREFIX + "/unload_model")
async def unload_model(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, OfModel)
    model = tenant.book.get(ModelRecord, tenant.name, asked.model_id)

    async def unload() -> Answer:
        await _finish(tenant, model)
        return {"type": "unload_model", "model_id": model.id}

    name = f"unload {model.id}"
    return await _promised((name, tenant.futures.promise(name, unload)))


async def _finish(tenant: Tenant, model: ModelRecord) -> None:
    try:
        await tenant.models.finish(model.job)
    except CallerError as error:
        if error.info.code is not Code.NOT_FOUND:
            raise


# --- Operations of a model ------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A model of a tenant in this gateway's session of its job."""

    tenant: Tenant
    record: ModelRecord
    model: TrainedModel

    def name(self, seq: int) -> str:
        """The name of an operation of the model's policy, on the mesh and as a promise."""
        return f"{self.record.id}:{seq}"

    def submit(self, seq: int, args: ops.Args) -> OperationHandle[Any]:
        return self.model.policy.submit(seq + self.record.offset, self.name(seq), args)

    def promise(
        self,
        seq: int,
        args: ops.Args,
        answer: Callable[[Any], Coroutine[Any, Any, Answer]],
        num_targets: int = 1,
    ) -> tuple[str, Promise]:
        """The promise of an operation, which is submitted unless it was before.

        Args: answer: makes the answer from the operation's result. num_targets: targets at each
              position. Above 1 the number becomes part of the name: a later gateway that makes the
              answer needs it.
        """
        name = self.name(seq) + (f"x{num_targets}" if num_targets > 1 else "")
        promise = self.tenant.futures.find(name)
        if promise is None:
            handle = self.submit(seq, args)

            async def work() -> Answer:
                return await answer(await outcome_of(handle))

            promise = self.tenant.futures.promise(name, work, handle)
        return name, promise


async def _opened(tenant: Tenant, name: str) -> Opened:
    record = tenant.book.get(ModelRecord, tenant.name, name)
    return Opened(tenant, record, await tenant.models.trained(record.job, record.adapter))


@routes.post(PREFIX + "/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    asked = convert.read_request(await content_of(request))
    opened = await _opened(tenant, asked.model_id)
    context = context_of(await tenant.base(opened.record.base))
    refusal: PhaseloomError | None = None
    args: ops.Args
    try:
        args = convert.trained(asked, context)
    except CallerError as error:
        # It keeps its number, or all that follow would wait for it: the mesh refuses an empty one.
        refusal = error
        empty = ops.ForwardBackward([], ops.Loss.CROSS_ENTROPY)
        args = ops.Forward([]) if asked.forward_only else empty

    num_targets = args.batch[0].num_targets if args.batch else 1

    async def answer(result: Any) -> Answer:
        is_forward = isinstance(result, ops.ForwardResult)
        metrics = convert.forward_loss(asked, result) if is_forward else result.metrics
        return convert.trained_output(result, metrics, num_targets)

    promised = opened.promise(asked.seq_id, args, answer, num_targets)
    if refusal is not None:
        promised = _refused(tenant, promised, refusal)
    return await _promised(promised)


def _refused(
    tenant: Tenant, promised: tuple[str, Promise], error: PhaseloomError
) -> tuple[str, Promise]:
    """The promise of a call that this gateway refuses. It is kept once the mesh has an operation
    with the call's number.

    Args: promised: the name and the promise of that operation.
    """

    async def refuse() -> Answer:
        raise error

    name = f"refused {promised[0]}"
    return name, tenant.futures.promise(name, refuse, promised[1].handle)


@routes.post(PREFIX + "/optim_step")
async def optim_step(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, OptimStep)
    opened = await _opened(tenant, asked.model_id)
    args = ops.OptimStep(convert.adam(asked.adam_params))

    async def answer(result: ops.OptimStepResult) -> Answer:
        return {"type": "optim_step", "metrics": result.metrics}

    return await _promised(opened.promise(asked.seq_id, args, answer))


@routes.post(PREFIX + "/save_weights")
async def save_weights(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, SaveWeights)
    return await _promised(await _save_weights(tenant, asked))


async def _save_weights(tenant: Tenant, asked: SaveWeights) -> tuple[str, Promise]:
    opened = await _opened(tenant, asked.model_id)
    name = _mesh_name(asked.path or "", asked.seq_id)
    try:
        path = _path(opened.record, "weights", asked.path or f"{asked.seq_id:06d}")
        ttl_s, metadata = ttl_of(asked.ttl_seconds), _metadata(asked.user_metadata)
        before = tenant.book.find(CheckpointRecord, tenant.name, path)
        if before is not None and before.name != name and not asked.overwrite:
            raise CallerError(
                f"checkpoint {asked.path!r} exists",
                code=Code.ALREADY_EXISTS,
                field="path",
                remedy="choose another name, or save with overwrite=True",
            )
    except CallerError as error:
        return _refused_save(opened, asked.seq_id, error)
    saved = _checkpoint(opened.record, path, POLICY, name, metadata)

    def begin() -> Begun:
        handle = opened.submit(asked.seq_id, ops.SaveState(name, ttl_s=ttl_s))

        async def save() -> dict[str, Any]:
            await outcome_of(handle)
            await _keep(tenant, saved, ttl_s)
            return {"type": "save_weights", "path": path}

        return save, handle

    return await _kept(tenant, opened.name(asked.seq_id), "save_weights", asked, begin)


def _refused_save(opened: Opened, seq: int, error: CallerError) -> tuple[str, Promise]:
    """The promise of a save that this gateway refuses.

    A save without a name, which the mesh refuses, takes the call's number: otherwise all later
    operations would wait for that number.
    """

    async def never(_: Any) -> Answer:
        raise error

    return _refused(opened.tenant, opened.promise(seq, ops.SaveState(""), never), error)


async def _keep(tenant: Tenant, saved: CheckpointRecord, ttl_s: float) -> None:
    """Let a path name a checkpoint from now on; the checkpoint that it named before is removed."""
    before = tenant.book.find(CheckpointRecord, tenant.name, saved.id)
    replaces = None if before is None else (before.source, before.name)
    if before is not None and before.name == saved.name:  # an earlier gateway began this
        replaces = before.replaces
    expires_s = time.time() + ttl_s if ttl_s else None
    kept = replace(saved, expires_s=expires_s, replaces=replaces)
    await tenant.book.put(kept)
    await clean_up(tenant, kept)


@routes.post(PREFIX + "/load_weights")
async def load_weights(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, LoadWeights)
    return await _promised(await _load_weights(tenant, asked))


async def _load_weights(tenant: Tenant, asked: LoadWeights) -> tuple[str, Promise]:
    """The promise to load a checkpoint: into the model that is named, or into a new one."""
    saved = tenant.book.get(CheckpointRecord, tenant.name, asked.path)
    if asked.session_id is not None and asked.model_seq_id is not None:
        kept = _metadata(asked.user_metadata)
        like = ModelRecord("", "", "", saved.base, 1, kept, saved.adapter)
        record = await _new_model(tenant, asked.session_id, asked.model_seq_id, like)
    else:
        record = tenant.book.get(ModelRecord, tenant.name, asked.model_id or "")
    seq = asked.seq_id or 0

    def begin() -> Begun:
        async def load() -> dict[str, Any]:
            tenant.loading[saved.source, saved.name] += 1
            try:
                model = await tenant.models.train(record.job, record.base, record.adapter)
                args = ops.LoadState(saved.name, saved.source, asked.optimizer)
                await outcome_of(Opened(tenant, record, model).submit(seq, args))
            finally:
                tenant.loading[saved.source, saved.name] -= 1
            return {"type": "load_weights", "path": asked.path, "model_id": record.id}

        return load, None

    return await _kept(tenant, f"{record.id}:{seq}", "load_weights", asked, begin)


Begun = tuple[Callable[[], Coroutine[Any, Any, dict[str, Any]]], OperationHandle[Any] | None]
"""The steps of a call, and the operation that they wait for; None: the steps submit it."""


async def _kept(
    tenant: Tenant, name: str, call: str, asked: msgspec.Struct, begin: Callable[[], Begun]
) -> tuple[str, Promise]:
    """The promise of a call of several steps. A record of the call is written first, so that
    another gateway can go on with it."""
    record = tenant.book.find(CallRecord, tenant.name, name)
    if record is None:
        record = CallRecord(tenant.name, name, call, msgspec.to_builtins(asked))
        await tenant.book.put(record)
    kept = record
    promise = tenant.futures.find(name)
    if promise is None:
        steps, handle = begin() if kept.answer is None else (None, None)

        async def work() -> Answer:
            if steps is None:
                return kept.answer or {}
            answer = await steps()
            await tenant.book.put(replace(kept, answer=answer))
            return answer

        promise = tenant.futures.promise(name, work, handle)
    return name, promise


# --- Sampling -------------------------------------------------------------------------------------


@routes.post(PREFIX + "/save_weights_for_sampler")
async def save_weights_for_sampler(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, SaveWeights)
    return await _promised(await _save_for_sampler(tenant, asked))


async def _save_for_sampler(tenant: Tenant, asked: SaveWeights) -> tuple[str, Promise]:
    opened = await _opened(tenant, asked.model_id)
    record, sampler = opened.record, opened.model.sampler
    try:
        path = None if asked.path is None else _path(record, "sampler_weights", asked.path)
        ttl_s, metadata = ttl_of(asked.ttl_seconds), _metadata(asked.user_metadata)
    except CallerError as error:
        return _refused_save(opened, asked.seq_id, error)
    version = _mesh_name(asked.path or "", asked.seq_id)
    keep, kept_s = (_KEPT_VERSIONS, 0.0) if path is None else (0, ttl_s)

    def begin() -> Begun:
        # The sampler of adapters reads checkpoints of the policy.
        save_it = ops.SaveState(version, keep=keep, ttl_s=kept_s)
        handle = opened.submit(asked.seq_id, ops.PublishWeights() if sampler else save_it)

        async def save() -> dict[str, Any]:
            if sampler is not None:
                await sampler.take(handle, version, keep, kept_s)
            await outcome_of(handle)
            if path is not None:
                by = POLICY if sampler is None else SAMPLER
                saved = _checkpoint(record, path, by, version, metadata)
                await _keep(tenant, saved, ttl_s)
                return {"type": "save_weights_for_sampler", "path": path}
            session = record.id.partition(":")[0]
            sampling = f"{session}:sample:{asked.sampling_session_seq_id}"
            saved_as = SamplerRecord(tenant.name, sampling, record.base, record.id, version)
            await tenant.book.put(saved_as)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampling}

        return save, handle

    return await _kept(tenant, opened.name(asked.seq_id), "save_for_sampler", asked, begin)


_KEPT_VERSIONS = 4
"""The number of unnamed sampler weights of a model that are kept: the newest ones."""


@routes.post(PREFIX + "/create_sampling_session")
async def create_sampling_session(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, CreateSamplingSession)
    tenant.book.get(SessionRecord, tenant.name, asked.session_id)
    source = await source_of(tenant, asked.model_path or asked.base_model or "")
    name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
    await tenant.book.put(
        SamplerRecord(tenant.name, name, source.base.name, path=asked.model_path or "")
    )
    return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})


@routes.get(PREFIX + "/samplers/{sampler}")
async def get_sampler(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    record = tenant.book.get(SamplerRecord, tenant.name, request.match_info["sampler"])
    return web.json_response(
        {"sampler_id": record.id, "base_model": record.base, "model_path": record.path or None}
    )


@routes.post(PREFIX + "/asample")
async def sample(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, Sample)
    asked.check()
    source = await source_of(tenant, asked.sampling_session_id)
    name = f"{asked.sampling_session_id}:{asked.seq_id}"
    promise = tenant.futures.find(name)
    if promise is None:
        tokens = convert.prompt_tokens(asked.prompt)
        sampling = convert.sampling(asked.sampling_params, len(tokens), source.context)
        num_top, num_prompt_top = asked.topk_sample_logprobs, asked.topk_prompt_logprobs
        sampling = replace(sampling, top_logprobs=num_top)
        seed = asked.sampling_params.seed
        prompt = Prompt(tokens, seed=random.getrandbits(62) if seed is None else seed)

        async def draw() -> Answer:
            handle = await source.generate(
                tenant,
                Draw(
                    prompt,
                    sampling,
                    asked.num_samples,
                    prompt_logprobs=bool(asked.prompt_logprobs or num_prompt_top),
                    prompt_top_logprobs=num_prompt_top,
                ),
            )
            drawing.handle = handle
            last_n = asked.prompt_logprobs_last_n or len(tokens)
            return convert.sampled_output(await outcome_of(handle), num_top, num_prompt_top, last_n)

        promise = drawing = tenant.futures.promise(name, draw)
    sequences = [f"{name}:{index}" for index in range(asked.num_samples)]
    return await _promised((name, promise), sample_sequence_ids=sequences)


# --- Promises -------------------------------------------------------------------------------------


async def _promised(promised: tuple[str, Promise], **more: Any) -> web.Response:
    """Answer with the name of a promise, once the mesh has the promise's operation.

    Raises: Lost: it is not known whether the mesh has it; the same call again gets a new promise.
    """
    await promised[1].stored()
    return web.json_response({"request_id": promised[0], **more})


@routes.post(PREFIX + "/retrieve_future")
async def retrieve_future(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, RetrieveFuture)
    promise = tenant.futures.find(asked.request_id) or await _earlier(tenant, asked.request_id)
    if promise is None:
        return web.json_response({"detail": "nothing was promised by that name"}, status=410)
    try:
        answer = await asyncio.wait_for(promise.answer(), LONG_POLL_S)
    except Lost:
        await asyncio.sleep(_PAUSE_S)  # the SDK asks again at once
        raise
    except TimeoutError:
        state, reason = await promise.queue()
        pending = {
            "type": "try_again",
            "request_id": asked.request_id,
            "queue_state": state,
            "queue_state_reason": reason,
        }
        return web.json_response(pending, status=408)
    if isinstance(answer, bytes):
        return web.Response(body=answer, content_type=_PROTOBUF)
    return web.json_response(answer)


async def _earlier(tenant: Tenant, name: str) -> Promise | None:
    """The promise of this name that an earlier gateway gave; None: no gateway gave it."""
    call = tenant.book.find(CallRecord, tenant.name, name)
    if call is not None:
        kind, again = _CALLS[call.call]
        return (await again(tenant, msgspec.convert(call.asked, kind)))[1]
    if name.startswith("create "):
        made = tenant.book.find(ModelRecord, tenant.name, name.removeprefix("create "))
        return None if made is None else _creating(tenant, made)[1]
    model, _, numbers = name.rpartition(":")
    seq, _, num_targets = numbers.partition("x")
    record = tenant.book.find(ModelRecord, tenant.name, model)
    if record is None or not (seq.isdecimal() and (num_targets or "1").isdecimal()):
        return None

    async def found() -> Answer:
        try:
            trained = await tenant.models.trained(record.job, record.adapter)
            done = await trained.job.outcome(POLICY, int(seq) + record.offset)
        except ResourceError as error:  # of the way there, and none of the operation's
            raise Lost(error.info.message, remedy="ask again") from error
        return _answer_of(done, int(num_targets or 1))

    return tenant.futures.promise(name, found)


_CALLS: dict[str, tuple[type[Any], Callable[..., Coroutine[Any, Any, tuple[str, Promise]]]]] = {
    "save_weights": (SaveWeights, _save_weights),
    "load_weights": (LoadWeights, _load_weights),
    "save_for_sampler": (SaveWeights, _save_for_sampler),
}
"""The calls of several steps: the type of the request, and the function that gives the promise."""


def _answer_of(done: ops.Completion, num_targets: int) -> Answer:
    """The answer to a call whose operation another gateway submitted."""
    match done.result:
        case ops.ForwardResult() as result:
            return convert.trained_output(result, {}, num_targets)
        case ops.ForwardBackwardResult() as result:
            return convert.trained_output(result, result.metrics, num_targets)
        case ops.OptimStepResult() as result:
            return {"type": "optim_step", "metrics": result.metrics}
    if done.error is not None:
        return failed(to_exception(done.error))
    return {"error": f"the operation was {done.outcome}", "category": "server"}


# --- What there is --------------------------------------------------------------------------------


@routes.get(PREFIX + "/training_runs")
async def list_runs(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    runs = [_run(model) for model in tenant.book.all(ModelRecord, tenant.name)]
    return web.json_response({"training_runs": runs, "cursor": _cursor(runs)})


@routes.get(PREFIX + "/training_runs/{run}")
async def get_run(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    return web.json_response(
        _run(tenant.book.get(ModelRecord, tenant.name, request.match_info["run"]))
    )


@routes.post(PREFIX + "/weights_info")
async def weights_info(request: web.Request) -> web.Response:
    tenant, asked = tenant_of(request), await body_of(request, OfPath)
    saved = tenant.book.get(CheckpointRecord, tenant.name, asked.tinker_path or asked.path)
    return web.json_response({"base_model": saved.base, **_lora(saved.adapter)})


@routes.get(PREFIX + "/sessions")
async def list_sessions(request: web.Request) -> web.Response:
    tenant = tenant_of(request)
    sessions = [each.id for each in tenant.book.all(SessionRecord, tenant.name)]
    return web.json_response({"sessions": sessions})


@routes.get(PREFIX + "/sessions/{session}")
async def get_session(request: web.Request) -> web.Response:
    tenant, session = tenant_of(request), request.match_info["session"]
    tenant.book.get(SessionRecord, tenant.name, session)
    of = f"{session}:"
    models = [each.id for each in tenant.book.all(ModelRecord, tenant.name)]
    samplers = [each.id for each in tenant.book.all(SamplerRecord, tenant.name)]
    return web.json_response(
        {
            "training_run_ids": [name for name in models if name.startswith(of)],
            "sampler_ids": [name for name in samplers if name.startswith(of)],
        }
    )


def _checkpoint(
    record: ModelRecord, path: str, deployment: str, name: str, metadata: dict[str, Any]
) -> CheckpointRecord:
    source = f"{record.job}/{deployment}"
    return CheckpointRecord(
        record.tenant,
        path,
        record.id,
        record.base,
        source,
        name,
        time.time(),
        metadata,
        record.adapter,
    )


def _path(record: ModelRecord, kind: str, name: str) -> str:
    # The SDK puts names in addresses as they are.
    is_told = name.isprintable() and len(name) <= _MAX_NAME_CHARS
    if name in ("", ".", "..") or set(name) & set("/%?#\\") or not is_told:
        raise CallerError(
            f"{name[:_MAX_NAME_CHARS]!r} cannot be a checkpoint's name",
            field="path",
            remedy=f"use at most {_MAX_NAME_CHARS} characters, without / % ? # \\ and control "
            "characters",
        )
    return f"tinker://{record.id}/{kind}/{name}"


def _mesh_name(name: str, seq: int) -> str:
    """The name of a save on the mesh, which allows fewer characters; `seq` keeps it unique."""
    return f"{seq}-{re.sub('[^A-Za-z0-9_-]', '_', name)}"[:64].rstrip("-")


def _lora(adapter: Adapter | None) -> dict[str, Any]:
    """The fields about an adapter in an answer. The rank is always a number: the SDK needs one."""
    if adapter is None:
        return {"is_lora": False, "lora_rank": 0}
    return {
        "is_lora": True,
        "lora_rank": adapter.rank,
        "train_attn": {*_ATTENTION} <= {*adapter.targets},
        "train_mlp": {*_MLP} <= {*adapter.targets},
        "train_unembed": {*_UNEMBED} <= {*adapter.targets},
    }


def _run(model: ModelRecord) -> dict[str, Any]:
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": model.tenant,
        **_lora(model.adapter),
        "corrupted": False,
        "last_request_time": told_time(time.time()),
        "user_metadata": model.metadata or None,
    }


def _cursor(items: list[Any]) -> dict[str, int]:
    return {"offset": 0, "limit": len(items), "total_count": len(items)}
