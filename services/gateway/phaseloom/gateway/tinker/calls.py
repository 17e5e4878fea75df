"""Calls of the Tinker API that take time: they return the name of a promise at once.

The name is built from the SDK's own call numbers. A repeated call therefore gets the same promise,
even from a gateway that was restarted meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from phaseloom.client import (
    Adapter,
    CallerError,
    Code,
    OperationHandle,
    PhaseloomError,
    outcome_of,
)
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.specs import (
    ALL_ATTENTION,
    ALL_MLP,
    UNEMBED,
    RegisteredModel,
)
from phaseloom.gateway.futures import Answer, Promise
from phaseloom.gateway.http import INLINE_BYTES, body_of, tenant_of
from phaseloom.gateway.models import TrainedModel
from phaseloom.gateway.records import CallRecord, ModelRecord
from phaseloom.gateway.replicas import content_of
from phaseloom.gateway.tenants import Tenant
from phaseloom.gateway.tinker.requests import Numbered

T = TypeVar("T", bound=msgspec.Struct)

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

    def submit(self, seq: int, *parts: ops.Args) -> OperationHandle[Any]:
        """Submit a call's operation, or all parts of one for which `split` was called."""
        numbers = self.tenant.book.numbers(self.record, seq)
        if len(numbers) != len(parts):
            raise CallerError(
                f"call {seq} was sent with other data before",
                code=Code.ALREADY_EXISTS,
                field="seq_id",
                remedy="use a new number for other data",
            )
        return self.model.policy.submit(numbers[0], self.name(seq), [*parts])

    async def split(self, seq: int, num_parts: int) -> None:
        """Let a call use several numbers of the mesh, and later calls the numbers after them.

        Raises: CallerError: later calls have their numbers already.
        """
        numbers = self.tenant.book.numbers(self.record, seq)
        if len(numbers) == 1 and self.model.policy.next_seq > numbers[0]:
            raise CallerError(
                f"call {seq} needs {num_parts} messages, but later calls were sent before it",
                field="data",
                remedy="send calls in order, or fewer datums per call",
            )
        await self.tenant.book.split(self.record, seq, self.name(seq), num_parts)

    def promise(
        self,
        seq: int,
        parts: Sequence[ops.Args],
        answer: Callable[[Any], Coroutine[Any, Any, Answer]],
        num_targets: int = 1,
    ) -> tuple[str, Promise]:
        """Return the promise of an operation, submitting the operation unless that was done before.

        Args: parts: the operation's arguments, as `submit` takes them.
              answer: builds the answer from the operation's result.
              num_targets: targets per position. If above 1, it becomes part of the name, because a
                  later gateway needs it to build the answer.
        """
        name = self.name(seq) + (f"x{num_targets}" if num_targets > 1 else "")
        promise = self.tenant.futures.find(name)
        if promise is None:
            handle = self.submit(seq, *parts)

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


async def use_up(
    tenant: Tenant, model: str, seq: int, refused_args: ops.Args, error: PhaseloomError
) -> None:
    """Give the number of a call that cannot be read to an operation that the mesh refuses.

    Otherwise later calls of the model would wait for it forever. Does nothing if the tenant has no
    such model.
    """
    if tenant.book.find(ModelRecord, tenant.name, model) is None or seq < 1:
        return
    opened = await open_model(tenant, model)

    async def never(_: Any) -> Answer:
        raise error

    parts = [refused_args] * len(tenant.book.numbers(opened.record, seq))
    await opened.promise(seq, parts, never)[1].stored()


async def numbered_body(request: web.Request, kind: type[T], refused_args: ops.Args) -> T:
    """Return the JSON body of a numbered call.

    Args:   refused_args: an operation that the mesh refuses. It uses up the number of a call that
                is invalid.
    Raises: CallerError: as `decoded`.
    """
    content = await content_of(request)
    try:
        return await body_of(request, kind)
    except CallerError as error:
        with suppress(ValueError, RecursionError, msgspec.ValidationError):
            # Python reads NaN as well
            loose = json.loads(content) if len(content) <= INLINE_BYTES else {}
            number = msgspec.convert(loose, Numbered)
            await use_up(tenant_of(request), number.model_id, number.seq_id, refused_args, error)
        raise


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


def tokenizer_name(base: RegisteredModel) -> str:
    """Return the name by which the SDK's sampling clients find a model's tokenizer.

    The SDK takes it for a Hub id or a directory. It cuts names at a colon, and drops the last of
    three parts, so a directory with two slashes gets another one.
    """
    path = base.directory.path
    if "/" in base.name or ":" in path:
        return base.name
    return f"{path}/" if path.count("/") == 2 else path


_TRAINED = {
    "train_attn": {ALL_ATTENTION, "q_proj"},
    "train_mlp": {ALL_MLP, "down_proj"},
    "train_unembed": {UNEMBED, "lm_head"},
}
"""Targets that show what an adapter trains. Records of earlier versions name single layers."""


def lora_fields(adapter: Adapter | None) -> dict[str, Any]:
    """Return the fields of an answer that describe an adapter. The SDK requires a rank."""
    if adapter is None:
        return {"is_lora": False, "lora_rank": 0}
    return {
        "is_lora": True,
        "lora_rank": adapter.rank,
        **{field: not names.isdisjoint(adapter.targets) for field, names in _TRAINED.items()},
    }
