"""Calls of the Tinker API that take time: they return the name of a promise at once.

The name is built from the SDK's own call numbers. A repeated call therefore gets the same promise,
even from a gateway that was restarted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import (
    Adapter,
    CallerError,
    OperationHandle,
    PhaseloomError,
    outcome_of,
)
from phaseloom.common.contract import operations as ops
from phaseloom.gateway.futures import Answer, Promise
from phaseloom.gateway.models import TrainedModel
from phaseloom.gateway.records import CallRecord, ModelRecord
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.requests import ATTENTION, MLP, UNEMBED

_MAX_METADATA_BYTES = 65_536
"""Maximum bytes of a model's or a checkpoint's metadata."""


async def answer_with(promised: tuple[str, Promise], **fields: Any) -> web.Response:
    """Return the name of a promise, once the mesh has stored the promise's operation.

    Raises: Lost: it is unknown whether the mesh has it. Repeating the call makes a new promise.
    """
    await promised[1].stored()
    return web.json_response({"request_id": promised[0], **fields})


@dataclass(frozen=True)
class Opened:
    """A tenant's model, with this gateway's session of its job."""

    tenant: Tenant
    record: ModelRecord
    model: TrainedModel

    def name(self, seq: int) -> str:
        """Return the name of an operation of the model's policy, on the mesh and as a promise."""
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
        """Return the promise of an operation, submitting the operation unless that was done before.

        Args: answer: builds the answer from the operation's result.
              num_targets: targets per position. If above 1, it becomes part of the name, because a
                  later gateway needs it to build the answer.
        """
        name = self.name(seq) + (f"x{num_targets}" if num_targets > 1 else "")
        promise = self.tenant.futures.find(name)
        if promise is None:
            handle = self.submit(seq, args)

            async def work() -> Answer:
                return await answer(await outcome_of(handle))

            promise = self.tenant.futures.promise(name, work, handle)
        return name, promise


async def open_model(tenant: Tenant, name: str) -> Opened:
    """Return the model with this name. Raises: CallerError: NOT_FOUND: the tenant has none."""
    record = tenant.book.get(ModelRecord, tenant.name, name)
    tenant.asked_s[name] = time.time()
    return Opened(tenant, record, await tenant.models.trained(record.job, record.adapter))


def refused(
    tenant: Tenant, promised: tuple[str, Promise], error: PhaseloomError
) -> tuple[str, Promise]:
    """Return the promise of a call that this gateway refuses. It counts once the mesh has an
    operation with the call's number.

    Args: promised: name and promise of that operation.
    """

    async def refuse() -> Answer:
        raise error

    name = f"refused {promised[0]}"
    return name, tenant.futures.promise(name, refuse, promised[1].handle)


Begun = tuple[Callable[[], Coroutine[Any, Any, dict[str, Any]]], OperationHandle[Any] | None]
"""The steps of a call, and the operation that they wait for. None: the steps submit it."""


async def kept_call(
    tenant: Tenant, name: str, call: str, body: msgspec.Struct, begin: Callable[[], Begun]
) -> tuple[str, Promise]:
    """Return the promise of a call of several steps. A record is written first, so that another
    gateway can finish the call."""
    record = tenant.book.find(CallRecord, tenant.name, name)
    if record is None:
        record = CallRecord(tenant.name, name, call, msgspec.to_builtins(body))
        await tenant.book.put(record)
    call_record = record
    promise = tenant.futures.find(name)
    if promise is None:
        steps, handle = begin() if call_record.answer is None else (None, None)

        async def work() -> Answer:
            if steps is None:
                return call_record.answer or {}
            answer = await steps()
            await tenant.book.put(replace(call_record, answer=answer))
            return answer

        promise = tenant.futures.promise(name, work, handle)
    return name, promise


def metadata_of(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return a request's metadata. Raises: CallerError: it is too large to store."""
    num_bytes = len(msgspec.json.encode(metadata)) if metadata else 0
    if num_bytes > _MAX_METADATA_BYTES:
        raise CallerError(
            f"metadata must have at most {_MAX_METADATA_BYTES} bytes, got {num_bytes}",
            field="user_metadata",
            remedy="store large data elsewhere",
        )
    return metadata or {}


def lora_fields(adapter: Adapter | None) -> dict[str, Any]:
    """Return the fields of an answer that describe an adapter. The SDK requires a rank."""
    if adapter is None:
        return {"is_lora": False, "lora_rank": 0}
    return {
        "is_lora": True,
        "lora_rank": adapter.rank,
        "train_attn": {*ATTENTION} <= {*adapter.targets},
        "train_mlp": {*MLP} <= {*adapter.targets},
        "train_unembed": {*UNEMBED} <= {*adapter.targets},
    }
