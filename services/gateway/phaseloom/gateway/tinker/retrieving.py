"""Calls with which the SDK retrieves or cancels promises, including those of an earlier gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from aiohttp import web

from phaseloom.client import Lost, ResourceError
from phaseloom.client.job import merge_packed
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.errors import to_exception
from phaseloom.gateway.core import convert
from phaseloom.gateway.futures import Answer, Promise, failed
from phaseloom.gateway.http import PREFIX, body_of, tenant_of
from phaseloom.gateway.models import POLICY
from phaseloom.gateway.records import CallRecord, ModelRecord, SamplerRecord
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.requests import LoadWeights, RetrieveFuture, SaveWeights
from phaseloom.gateway.tinker.saving import (
    load_promise,
    save_external_promise,
    save_for_sampler_promise,
    save_promise,
)
from phaseloom.gateway.tinker.training import creating

LONG_POLL_S = 30.0
"""How long a call waits for a promise. The SDK waits 45 s for the answer."""
_PAUSE_S = 0.1
"""Delay before answering a call whose promise is lost, because the SDK retries at once."""
_PROTOBUF = "application/x-protobuf"

routes = web.RouteTableDef()


@routes.post(PREFIX + "/retrieve_future")
async def retrieve_future(request: web.Request) -> web.Response:
    tenant, body = tenant_of(request), await body_of(request, RetrieveFuture)
    promise = tenant.futures.find(body.request_id) or await _earlier(tenant, body.request_id)
    if promise is None:
        return web.json_response({"detail": "nothing was promised by that name"}, status=410)
    try:
        answer = await asyncio.wait_for(promise.answer(), LONG_POLL_S)
    except Lost:
        await asyncio.sleep(_PAUSE_S)  # the SDK retries at once
        raise
    except TimeoutError:
        state, reason = await promise.queue()
        pending = {
            "type": "try_again",
            "request_id": body.request_id,
            "queue_state": state,
            "queue_state_reason": reason,
        }
        return web.json_response(pending, status=408)
    if isinstance(answer, bytes):
        return web.Response(body=answer, content_type=_PROTOBUF)
    return web.json_response(answer)


@routes.post(PREFIX + "/cancel_future")
async def cancel_future(request: web.Request) -> web.Response:
    """Cancel a sample. Other calls are not cancelled, because later calls build on them."""
    tenant, body = tenant_of(request), await body_of(request, RetrieveFuture)
    sampler = body.request_id.rpartition(":")[0]
    promise = tenant.futures.find(body.request_id)
    if promise is not None and tenant.book.find(SamplerRecord, tenant.name, sampler) is not None:
        await promise.cancel()
    return web.json_response({})


async def _earlier(tenant: Tenant, name: str) -> Promise | None:
    """Rebuild the promise of this name that an earlier gateway gave, or return None."""
    call = tenant.book.find(CallRecord, tenant.name, name)
    if call is not None:
        kind, again = _CALLS[call.call]
        return (await again(tenant, msgspec.convert(call.asked, kind)))[1]
    if name.startswith("create "):
        model_record = tenant.book.find(ModelRecord, tenant.name, name.removeprefix("create "))
        return None if model_record is None else creating(tenant, model_record)[1]
    model, _, numbers = name.rpartition(":")
    seq, _, num_targets = numbers.partition("x")
    record = tenant.book.find(ModelRecord, tenant.name, model)
    if record is None or not (seq.isdecimal() and (num_targets or "1").isdecimal()):
        return None

    async def found() -> Answer:
        try:
            job = (await tenant.models.trained(record.job, record.adapter)).job
            numbers = tenant.book.numbers(record, int(seq))
            done = [await job.outcome(POLICY, number) for number in numbers]
        except ResourceError as error:  # about the connection, not about the operation
            raise Lost(error.info.message, remedy="ask again") from error
        return _answer_of(done, int(num_targets or 1))

    return tenant.futures.promise(name, found)


_CALLS: dict[str, tuple[type[Any], Callable[..., Coroutine[Any, Any, tuple[str, Promise]]]]] = {
    "save_weights": (SaveWeights, save_promise),
    "save_weights_external": (SaveWeights, save_external_promise),
    "load_weights": (LoadWeights, load_promise),
    "save_for_sampler": (SaveWeights, save_for_sampler_promise),
}
"""Calls of several steps: the type of the request, and the function that returns the promise."""


def _answer_of(done: list[ops.Completion], num_targets: int) -> Answer:
    """Build the answer to a call whose operation, or its parts, another gateway submitted."""
    for part in done:
        if part.error is not None:
            return failed(to_exception(part.error))
        if part.result is None:
            return {"error": f"the operation was {part.outcome}", "category": "server"}
    match merge_packed([part.result for part in done]):
        case ops.ForwardResult() as result:
            return convert.trained_output(result, {}, num_targets)
        case ops.ForwardBackwardResult() as result:
            return convert.trained_output(result, result.metrics, num_targets)
        case ops.OptimStepResult() as result:
            return {"type": "optim_step", "metrics": result.metrics}
        case other:
            raise AssertionError(f"{other} is the result of no call that is asked for here")
