"""Floods of valid operations and calls by one tenant, and the victim: another tenant at work.

`FLOODS` names the floods. Each sends everything that it may send, does not wait for outcomes, and
returns when the mesh has accepted all of it. `victim` works at a steady rate meanwhile and returns
how long each of its operations and calls took.

The flooding tenant and the victim must run in different processes: one event loop would delay both.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from loadtest.records import quantile
from phaseloom.client import Deployment, Mesh, Prompt, SamplingParams
from phaseloom.common.contract.api import (
    Attached,
    CheckpointList,
    JobRequest,
    JobStatus,
    ListCheckpoints,
    ResultReply,
    ResultRequest,
)
from phaseloom.common.contract.arrays import pack_int32s
from phaseloom.common.contract.codec import CONTENT_TYPE, JSON, MSGPACK, encode
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import Datum as OperationDatum
from phaseloom.common.contract.operations import Forward, Generate, Operation
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES, op_subject
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.natsclient import MeshClient
from phaseloom.common.transport.services import call_api, pub_ack, publish_to_stream

VICTIM_RATE = 20.0
"""Operations of the victim per second."""
VICTIM_CALL_RATE = 5.0
"""API calls of the victim per second."""
DEPLOYMENT = "policy"
_PUBLISHING = 64
"""Operations that the flooding tenant publishes at once."""
_TIMEOUT_S = 60.0
_JSON_ROW_TOKENS = 4096
_CALLS_IN_FLIGHT = 300
_CALL_ROUNDS = 10
_DRAIN_S = 300.0
_LOOK_S = 0.5


def spec(pool: str) -> DeploymentSpec:
    """A deployment whose operations compute nothing."""
    return DeploymentSpec(DEPLOYMENT, pool, "noop", ModelSpec({}), trainable=True)


class Latencies(msgspec.Struct, frozen=True):
    """How long the victim's operations and calls took, and how many failed."""

    operations_s: list[float]
    calls_s: list[float]
    num_failed: int

    @property
    def p99_s(self) -> float:
        return quantile(sorted(self.operations_s), 0.99)

    @property
    def longest_s(self) -> float:
        return max(self.operations_s)


@dataclass(frozen=True, slots=True)
class Flooder:
    """A tenant that publishes raw messages to a deployment of its own."""

    client: MeshClient
    deployment: DeploymentKey
    session: int
    next_seq: int

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, url: str, tenant: str, password: str, job: str
    ) -> AsyncIterator[Flooder]:
        """Attach to a running job with one deployment."""
        client = await connect(url, "flood", tenant, password, inbox_prefix=f"_INBOX_{tenant}")
        try:
            attached = await call_api(
                client, tenant, "session.attach", JobRequest(job), Attached, timeout_s=_TIMEOUT_S
            )
            (deployment,) = attached.status.deployments
            key = DeploymentKey(tenant, job, deployment.name)
            yield cls(client, key, attached.session, deployment.next_seq)
        finally:
            await client.close()

    async def publish(
        self, payloads: Iterable[bytes], first_seq: int, content_type: str = MSGPACK
    ) -> int:
        """Publish operations with ascending sequence numbers. Returns: how many were stored."""
        numbered = zip(itertools.count(first_seq), payloads, strict=False)
        stored = 0

        async def keep_publishing() -> None:
            nonlocal stored
            for seq, payload in numbered:
                subject = op_subject(OperationKey(*_parts(self.deployment), str(seq)))
                answer = await publish_to_stream(
                    self.client,
                    subject,
                    payload,
                    timeout_s=_TIMEOUT_S,
                    headers={CONTENT_TYPE: content_type},
                )
                stored += "error" not in pub_ack(answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(_PUBLISHING):
                group.create_task(keep_publishing())
        return stored

    async def ended(self, seq: int) -> None:
        """Wait until an operation and all before it have outcomes."""
        request = ResultRequest(self.deployment.job, self.deployment.deployment, str(seq))
        async with asyncio.timeout(_DRAIN_S):
            while True:
                with suppress(PhaseloomError):
                    await call_api(
                        self.client, self.deployment.tenant, "result.get", request, ResultReply
                    )
                    return
                await asyncio.sleep(_LOOK_S)

    async def call(self, call: str, request: object, answer: type[object], in_flight: int) -> int:
        """Make an API call over and over, with many at once. Returns: how many succeeded."""
        succeeded = 0

        async def keep_calling() -> None:
            nonlocal succeeded
            for _ in range(_CALL_ROUNDS):
                try:
                    await call_api(
                        self.client,
                        self.deployment.tenant,
                        call,
                        request,
                        answer,
                        timeout_s=_TIMEOUT_S,
                    )
                    succeeded += 1
                except PhaseloomError:
                    continue

        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(keep_calling())
        return succeeded


def _parts(deployment: DeploymentKey) -> tuple[str, str, str]:
    return deployment.tenant, deployment.job, deployment.deployment


# --- the floods -----------------------------------------------------------------------------------


async def bulk_generate(flooder: Flooder, number: int = 10_000) -> int:
    """Many small operations that nobody awaits."""
    return await flooder.publish(generates(flooder, number), flooder.next_seq)


async def behind_a_gap(flooder: Flooder, number: int = 20_000) -> int:
    """Many small operations that wait for a sequence number that is never sent."""
    return await flooder.publish(generates(flooder, number), flooder.next_seq + 1)


async def large_json(flooder: Flooder, number: int = 60) -> int:
    """Operations of maximum size in JSON."""
    row = OperationDatum([7] * _JSON_ROW_TOKENS, [7] * _JSON_ROW_TOKENS)
    row_bytes = len(encode(row, JSON)) + 1
    batch = [row] * (MAX_PAYLOAD_BYTES // row_bytes - 1)
    payload = encode(Operation("large", flooder.session, Forward(batch)), JSON)
    return await flooder.publish(itertools.repeat(payload, number), flooder.next_seq, JSON)


async def many_prompts(flooder: Flooder, number: int = 40) -> int:
    """Operations of maximum size that hold as many prompts as fit, which are refused."""
    operation = encode(Operation("many", flooder.session, Generate([], _SAMPLING)))
    prompt = encode(Prompt([1]))
    count = (MAX_PAYLOAD_BYTES - 4096) // len(prompt)
    before, empty_list, after = operation.partition(b"prompts\x90")
    assert empty_list, "a generate without prompts holds an empty array"
    header = empty_list[:-1] + b"\xdd" + count.to_bytes(4, "big")
    payload = before + header + prompt * count + after
    return await flooder.publish(itertools.repeat(payload, number), flooder.next_seq)


async def list_checkpoints(flooder: Flooder) -> int:
    """Calls that request something of every node."""
    return await flooder.call(
        "checkpoint.list", ListCheckpoints(), CheckpointList, _CALLS_IN_FLIGHT
    )


async def show_status(flooder: Flooder) -> int:
    """Calls to the scheduler."""
    request = JobRequest(flooder.deployment.job)
    return await flooder.call("job.status", request, JobStatus, _CALLS_IN_FLIGHT)


async def get_results(flooder: Flooder) -> int:
    """Calls that read a stored message."""
    request = ResultRequest(flooder.deployment.job, flooder.deployment.deployment, "1")
    return await flooder.call("result.get", request, ResultReply, _CALLS_IN_FLIGHT)


FLOODS: dict[str, Callable[[Flooder], Awaitable[int]]] = {
    "bulk_generate": bulk_generate,
    "behind_a_gap": behind_a_gap,
    "large_json": large_json,
    "many_prompts": many_prompts,
    "list_checkpoints": list_checkpoints,
    "show_status": show_status,
    "get_results": get_results,
}
"""Name → a flood, which returns how many operations were stored or calls succeeded."""
OPERATIONS = ("bulk_generate", "behind_a_gap", "large_json", "many_prompts")
"""The floods of operations, which the mesh goes on with after they are stored."""


def generates(flooder: Flooder, number: int) -> Iterator[bytes]:
    prompts, sampling = _PROMPTS, _SAMPLING
    for n in range(number):
        yield encode(Operation(f"flood-{n}", flooder.session, Generate(prompts, sampling)))


_PROMPTS = [Prompt(pack_int32s([1] * 16))]
_SAMPLING = SamplingParams(max_tokens=4)


# --- the victim -----------------------------------------------------------------------------------


async def victim(
    mesh: Mesh,
    deployment: Deployment,
    stop: asyncio.Event,
    *,
    rate: float = VICTIM_RATE,
    call_rate: float = VICTIM_CALL_RATE,
) -> Latencies:
    """Work until `stop` is set, then await everything.

    Every operation is sent at its time, even if earlier ones are still open, and its time counts
    from then.
    """
    failed: list[BaseException] = []

    async def measured(
        work: Callable[[], Awaitable[object]], due_s: float, to: list[float]
    ) -> None:
        try:
            await work()
        except PhaseloomError as error:
            failed.append(error)
        to.append(time.perf_counter() - due_s)

    async def work_at(rate: float, work: Callable[[], Awaitable[object]], to: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            due_s = time.perf_counter()
            while not stop.is_set():
                due_s += 1 / rate
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(measured(work, due_s, to))

    operations_s: list[float] = []
    calls_s: list[float] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(
            work_at(rate, lambda: deployment.generate(_PROMPTS, _SAMPLING), operations_s)
        )
        group.create_task(work_at(call_rate, mesh.list_checkpoints, calls_s))
    return Latencies(operations_s, calls_s, len(failed))
