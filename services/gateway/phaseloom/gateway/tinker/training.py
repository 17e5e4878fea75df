"""Calls of the Tinker API that create models and train them."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import AdamParams, CallerError, Code, PhaseloomError
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.ids import check_name
from phaseloom.gateway.core import convert
from phaseloom.gateway.futures import Answer, Promise
from phaseloom.gateway.http import PREFIX, body_of, content_of, tenant_of
from phaseloom.gateway.models import context_of
from phaseloom.gateway.records import ModelRecord, SessionRecord
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.calls import (
    answer_with,
    lora_fields,
    metadata_of,
    open_model,
    refused,
)
from phaseloom.gateway.tinker.requests import CreateModel, LoraConfig, OfModel, OptimStep

routes = web.RouteTableDef()


@routes.post(PREFIX + "/create_model")
async def create_model(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, CreateModel)
    await tenant.base(body.base_model)
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
        ModelRecord("", "", "", body.base_model, 0, metadata_of(body.user_metadata), adapter),
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
    tenant = tenant_of(request)
    body = convert.read_request(await content_of(request))
    opened = await open_model(tenant, body.model_id)
    context = context_of(await tenant.base(opened.record.base))
    refusal: PhaseloomError | None = None
    args: ops.Args
    try:
        args = convert.trained(body, context)
    except CallerError as error:
        # Submit an empty operation that the mesh refuses. It uses up the number, for which later
        # calls would otherwise wait.
        refusal = error
        empty = ops.ForwardBackward([], ops.Loss.CROSS_ENTROPY)
        args = ops.Forward([]) if body.forward_only else empty

    num_targets = args.batch[0].num_targets if args.batch else 1

    async def answer(result: Any) -> Answer:
        is_forward = isinstance(result, ops.ForwardResult)
        metrics = convert.forward_loss(body, result) if is_forward else result.metrics
        return convert.trained_output(result, metrics, num_targets)

    promised = opened.promise(body.seq_id, args, answer, num_targets)
    if refusal is not None:
        promised = refused(tenant, promised, refusal)
    return await answer_with(promised)


@routes.post(PREFIX + "/optim_step")
async def optim_step(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, OptimStep)
    opened = await open_model(tenant, body.model_id)
    refusal: PhaseloomError | None = None
    try:
        args = ops.OptimStep(convert.adam(body.adam_params, body.optimizer_params))
    except CallerError as error:
        refusal = error  # it uses up its number with a step that the mesh refuses
        args = ops.OptimStep(AdamParams(learning_rate=-1.0))

    async def answer(result: ops.OptimStepResult) -> Answer:
        return {"type": "optim_step", "metrics": result.metrics}

    promised = opened.promise(body.seq_id, args, answer)
    if refusal is not None:
        promised = refused(tenant, promised, refusal)
    return await answer_with(promised)
