"""Calls of the Tinker API that create models and train them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import AdamParams, CallerError, Code, InternalError, PhaseloomError
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.errors import to_exception
from phaseloom.common.contract.ids import check_name
from phaseloom.gateway.core import convert
from phaseloom.gateway.futures import Answer, Promise
from phaseloom.gateway.http import PREFIX, body_of, tenant_of, worked_out
from phaseloom.gateway.models import context_of
from phaseloom.gateway.records import ModelRecord, SessionRecord
from phaseloom.gateway.replicas import content_of
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.calls import (
    Opened,
    answer_with,
    lora_fields,
    metadata_of,
    numbered_body,
    open_model,
    refused,
    use_up,
)
from phaseloom.gateway.tinker.requests import CreateModel, LoraConfig, OfModel, OptimStep

_INLINE_BYTES = 2**16
"""A larger training call is converted by a worker process: its sparse tensors become larger."""
_REFUSED_TRAINING = ops.ForwardBackward([], ops.Loss.CROSS_ENTROPY)
_REFUSED_STEP = ops.OptimStep(AdamParams(learning_rate=-1.0))
"""Operations that the mesh refuses. They use up the numbers of refused calls, for which later calls
would wait forever."""

routes = web.RouteTableDef()


@routes.post(PREFIX + "/create_model")
async def create_model(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, CreateModel)
    base = await tenant.base(body.base_model)
    body.optimizer_config.check()
    lora = body.lora_config or LoraConfig(0)
    adapter = lora.adapter
    if adapter is not None and not tenant.models.has_adapters:
        raise CallerError(
            "the backends of this gateway cannot train adapters",
            code=Code.FAILED_PRECONDITION,
            field="lora_config.rank",
            remedy="use rank=0, which trains all weights",
        )
    record = await new_model(
        tenant,
        body.session_id,
        body.model_seq_id,
        ModelRecord("", "", "", base.name, 0, metadata_of(body.user_metadata), adapter),
    )
    return await answer_with(creating(tenant, record))


async def new_model(
    tenant: Tenant,
    session: str,
    number: int,
    like: ModelRecord,
) -> ModelRecord:
    """Return the record of a session's model, creating it if necessary.

    Args: number: the SDK's number of the model.
          like: the record without tenant, id, job and time.
    """
    tenant.book.get(SessionRecord, tenant.name, session)
    name = f"{session}:train:{number}"
    record = tenant.book.find(ModelRecord, tenant.name, name)
    if record is None:
        job = check_name(f"tinker-{session}-{number}", "model_seq_id")
        record = replace(like, tenant=tenant.name, id=name, job=job, made_s=time.time())
        await tenant.book.put(record)
    return record


def creating(tenant: Tenant, record: ModelRecord) -> tuple[str, Promise]:
    async def create() -> Answer:
        await tenant.models.train(record.job, record.base, record.adapter)
        return {"type": "create_model", "model_id": record.id}

    name = f"create {record.id}"
    return name, tenant.futures.promise(name, create)


@routes.post(PREFIX + "/get_info")
async def get_info(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, OfModel)
    model = tenant.book.get(ModelRecord, tenant.name, body.model_id)
    base = await tenant.base(model.base)
    return web.json_response(
        {
            "type": "get_info",
            "model_id": model.id,
            "model_name": base.name,
            **lora_fields(model.adapter),
            "model_data": {
                "arch": base.config.get("model_type"),
                "model_name": base.name,
                "tokenizer_id": base.directory.path,
            },
        }
    )


@routes.post(PREFIX + "/unload_model")
async def unload_model(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, OfModel)
    model = tenant.book.get(ModelRecord, tenant.name, body.model_id)

    async def unload() -> Answer:
        await finish(tenant, model)
        return {"type": "unload_model", "model_id": model.id}

    name = f"unload {model.id}"
    return await answer_with((name, tenant.futures.promise(name, unload)))


async def finish(tenant: Tenant, model: ModelRecord) -> None:
    try:
        await tenant.models.finish(model.job)
    except CallerError as error:
        if error.info.code is not Code.NOT_FOUND:
            raise


@routes.post(PREFIX + "/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    tenant, content = tenant_of(request), await content_of(request)
    model, seq = convert.head(content)
    opened = await open_model(tenant, model)
    try:
        context = context_of(await tenant.base(opened.record.base))
        call = await worked_out(
            request, convert.converted, content, context, inline_bytes=_INLINE_BYTES
        )
        if len(call.parts) > 1:
            await opened.split(seq, len(call.parts))
        promised = _trained(opened, seq, call)
    except (CallerError, InternalError) as error:
        await use_up(tenant, model, seq, _REFUSED_TRAINING, error)
        raise
    return await answer_with(promised)


def _trained(opened: Opened, seq: int, call: convert.Converted) -> tuple[str, Promise]:
    async def answer(result: Any) -> Answer:
        is_forward = isinstance(result, ops.ForwardResult)
        metrics = convert.forward_loss(call.weights, result) if is_forward else result.metrics
        return await asyncio.to_thread(convert.trained_output, result, metrics, call.num_targets)

    if call.refusal is None:
        return opened.promise(seq, call.args, answer, call.num_targets)
    promised = opened.promise(seq, [_REFUSED_TRAINING], answer)
    return refused(opened.tenant, promised, to_exception(call.refusal))


@routes.post(PREFIX + "/optim_step")
async def optim_step(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await numbered_body(request, OptimStep, _REFUSED_STEP)
    opened = await open_model(tenant, body.model_id)
    refusal: PhaseloomError | None = None
    args = _REFUSED_STEP
    try:
        args = ops.OptimStep(convert.adam(body.adam_params, body.optimizer_params))
    except CallerError as error:
        refusal = error

    async def answer(result: ops.OptimStepResult) -> Answer:
        return {"type": "optim_step", "metrics": result.metrics}

    promised = opened.promise(body.seq_id, [args], answer)
    if refusal is not None:
        promised = refused(tenant, promised, refusal)
    return await answer_with(promised)
