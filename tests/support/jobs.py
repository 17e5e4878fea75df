"""GRPO jobs cut down to seconds, on a mesh of real processes and on the in-process oracle."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from grpo import deployments, train
from nats.aio.client import Client
from nats.aio.msg import Msg
from settings import SETTINGS, Settings

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import ResultReply, ResultRequest
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, content_type_of, decode, encode
from phaseloom.common.contract.events import Event, OperationFinished, QueuedOperation, WpgStarted
from phaseloom.common.contract.operations import Completion, Operation, Outcome
from phaseloom.common.contract.specs import JobSpec
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.services import call_api, pub_ack
from tests.support import inprocess
from tests.support.processes import gone

T = TypeVar("T")

TENANT = "demo"
TASKS = ("chain_sum", "letter_counting")
WARMUP_STEPS = 3
MICRO_BATCHES = 2
FIRST_GRPO_SEQ = 2 * WARMUP_STEPS + 2
"""Of the policy: after the warm-up's updates and the version that is cut from them."""
_PATIENCE_S = 120.0
SEQS_PER_STEP = MICRO_BATCHES + 2
NOOP = [
    client.DeploymentSpec("policy", "train", "noop", client.ModelSpec({}), trainable=True),
    client.DeploymentSpec("sampler", "rollout", "noop", client.ModelSpec({})),
]
"""Two deployments that need no time."""


def short(task: str, steps: int) -> Settings:
    """Enough of everything to have every kind of operation several times."""
    base = SETTINGS[task]
    return Settings(
        steps=steps,
        prompts=4,
        train_groups=3,
        micro_batches=MICRO_BATCHES,
        max_tokens=base.max_tokens,
        warmup_steps=WARMUP_STEPS,
        group=4,
        warmup_batch=16,
        eval_prompts=8,
    )


def policy_seq(step: int, nth: int = 1) -> int:
    """The policy's `nth` operation of a GRPO step, both counted from 1."""
    return FIRST_GRPO_SEQ + (step - 1) * SEQS_PER_STEP + nth - 1


@dataclass
class Reports:
    """What a controller has said."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, event: str, **values: Any) -> None:
        self.values[event] = values

    @property
    def weights_sha256(self) -> str:
        return cast("str", self.values["done"]["weights_sha256"])


async def no_barrier(_: str) -> None:
    """The controllers of a test wait for nobody."""


def oracle(task: str, settings: Settings, root: Path) -> str:
    """SHA-256 of the weights that the same controller ends with where nothing is shared."""
    reports = Reports()
    with inprocess.Job(JobSpec(deployments=deployments(settings)), root) as job:
        # It offers what the controller uses of a mesh's job.
        asyncio.run(train(cast("client.Job", job), task, settings, reports, no_barrier))
    return reports.weights_sha256


@asynccontextmanager
async def tenant(mesh: Mesh, name: str = TENANT) -> AsyncIterator[client.Mesh]:
    """A tenant's connection."""
    password = mesh.credentials.tenants[name]
    async with client.connect(mesh.url, name, password) as connection:
        yield connection


async def run_job(
    mesh: Mesh,
    task: str,
    settings: Settings,
    name: str = "",
    barrier: Callable[[str], Awaitable[None]] = no_barrier,
    *,
    durability: client.Durability = client.Durability.NODE,
) -> str:
    """Submit a GRPO job, called like its task where not told, run it, and give the final SHA."""
    reports = Reports()
    async with tenant(mesh) as connection:
        job = await connection.submit_job(
            name or task, deployments(settings), durability=durability
        )
        await train(job, task, settings, reports, barrier)
        await job.finish()
    return reports.weights_sha256


class Log:
    """The decision log so far, whatever is truncated of it. Made by `following`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._bus: Bus
        self._sequence = 0
        self._grown = asyncio.Condition()

    async def follow(self, bus: Bus) -> None:
        self._bus = bus
        async with aclosing(bus.log.read_entries()) as entries:
            async for entry in entries:
                async with self._grown:
                    self.events += [one.event for one in entry.split()]
                    self._sequence = entry.sequence
                    self._grown.notify_all()

    async def caught_up(self) -> None:
        """Until all is here that the log has by now. An outcome comes to its client another way:
        what the log told before may be on its way here still."""
        end = await self._bus.log.end()
        async with asyncio.timeout(_PATIENCE_S), self._grown:
            await self._grown.wait_for(lambda: self._sequence >= end)

    async def until(self, is_met: Callable[[Event], bool]) -> Event:
        """The first event that meets a condition, there already or to come."""
        num_seen = 0
        async with asyncio.timeout(_PATIENCE_S), self._grown:
            while True:
                for event in self.events[num_seen:]:
                    if is_met(event):
                        return event
                num_seen = len(self.events)
                await self._grown.wait()

    async def until_finished(self, operation: str) -> None:
        """Until an operation (`<job>.<deployment>.<seq>`) has run and has its outcome."""
        key = f"{TENANT}.{operation}"
        await self.until(lambda e: isinstance(e, OperationFinished) and str(e.key) == key)

    async def until_queued(self, operation: str) -> None:
        """Until an operation (`<job>.<deployment>.<seq>`) has its place in the order."""
        key = f"{TENANT}.{operation}"
        await self.until(lambda e: isinstance(e, QueuedOperation) and str(e.key) == key)

    def finished(self, deployment: str) -> list[int]:
        """The seqs of a deployment's operations in the order of their ends, replays left out."""
        ends = [e for e in self.events if isinstance(e, OperationFinished) and not e.replay]
        key = f"{TENANT}.{deployment}"
        return [e.key.seq or 0 for e in ends if str(e.key.deployment_key) == key]

    def starts(self, deployment: str) -> list[WpgStarted]:
        """The lives of a deployment (`<job>.<name>`), in order."""
        key = f"{TENANT}.{deployment}"
        return [e for e in self.events if isinstance(e, WpgStarted) and str(e.deployment) == key]

    def failures(self) -> list[OperationFinished]:
        """Operations that ran and did not complete."""
        finished = [e for e in self.events if isinstance(e, OperationFinished)]
        return [e for e in finished if e.outcome is not Outcome.COMPLETED]


@asynccontextmanager
async def running_mesh(
    config: MeshConfig, directory: Path, *, ready_s: float = _PATIENCE_S
) -> AsyncIterator[tuple[Mesh, Log]]:
    """A mesh that is up, and its decision log. Its server does not fsync: that takes turns on the
    disk of a test machine, and `test_power_cuts` shows what it is for."""
    async with Mesh(msgspec.structs.replace(config, fsync=False), directory) as mesh:
        await mesh.ready(ready_s)
        async with following(mesh) as log:
            yield mesh, log


@asynccontextmanager
async def following(mesh: Mesh) -> AsyncIterator[Log]:
    """The decision log of a mesh that is up."""
    bus = await Bus.open(mesh.credentials.bus, "test")
    log = Log()
    task = asyncio.create_task(log.follow(bus))
    try:
        yield log
    finally:
        task.cancel()
        await asyncio.wait([task])
        await bus.close()


def rank_pid(mesh: Mesh, deployment: str, node: str = "*", tenant: str = TENANT) -> int:
    """The process of a deployment's (`<job>.<name>`) newest life, as its log tells. Args: node: on
    which, where it is on several."""
    service = re.escape(f'"worker:{tenant}.{deployment}"')
    starts = re.compile(rf'"service": {service}, .*"message": "rank of .* starts, pid (\d+)"')
    files = sorted((mesh.run_dir / "logs").glob(f"worker-{node}.log"))
    return [int(pid) for file in files for pid in starts.findall(file.read_text())][-1]


def living_ranks(mesh: Mesh) -> list[int]:
    """The processes of all ranks that have not ended, as the agents' logs tell."""
    starts = re.compile(r'"service": "worker:.*"message": ".* starts, pid (\d+)"')
    files = (mesh.run_dir / "logs").glob("worker-*.log")
    pids = {int(pid) for file in files for pid in starts.findall(file.read_text())}
    return sorted(pid for pid in pids if not gone(pid))


def kill_rank(mesh: Mesh, deployment: str, node: str = "*") -> None:
    """As the kernel does when memory runs out."""
    os.kill(rank_pid(mesh, deployment, node), signal.SIGKILL)


class Wire:
    """A tenant without the client library: raw messages, as any NATS client would send them."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.tenant = name
        self._outcomes: dict[str, asyncio.Future[Completion]] = {}

    @classmethod
    @asynccontextmanager
    async def connected(cls, mesh: Mesh, name: str = TENANT) -> AsyncIterator[Wire]:
        credentials = mesh.credentials
        client = await connect(
            credentials.url, "wire", name, credentials.tenants[name], inbox_prefix=f"_INBOX_{name}"
        )
        wire = cls(client, name)
        await client.subscribe(f"{streams.PREFIX}.out.{name}.>", cb=wire._take)
        await client.flush()
        try:
            yield wire
        finally:
            await client.close()

    async def send(
        self, operation: str, payload: Operation | bytes, content_type: str = MSGPACK
    ) -> dict[str, Any]:
        """Publish on an operation's (`<job>.<deployment>.<slot>`) subject; the server's PubAck."""
        data = payload if isinstance(payload, bytes) else encode(payload, content_type)
        reply = await self._client.request(
            f"{streams.PREFIX}.op.{self.tenant}.{operation}",
            data,
            timeout=_PATIENCE_S,
            headers={CONTENT_TYPE: content_type},
        )
        return pub_ack(reply)

    async def request(self, subject: str, body: bytes) -> Any:
        """Send JSON as a person would, without headers; the answer, decoded."""
        return json.loads((await self._client.request(subject, body, timeout=30)).data)

    async def outcome(self, operation: str) -> Completion:
        """What was first stored for it."""
        return await asyncio.wait_for(asyncio.shield(self._outcome(operation)), _PATIENCE_S)

    def has_outcome(self, operation: str) -> bool:
        return self._outcome(operation).done()

    async def call(self, name: str, request: object, answer: type[T]) -> T:
        """An API call of this tenant."""
        reply: T = await call_api(
            self._client, self.tenant, name, request, answer, timeout_s=_PATIENCE_S
        )
        return reply

    async def ask(self, operation: str) -> ResultReply:
        """What the router knows of it."""
        request = ResultRequest(*operation.split("."))
        reply: ResultReply = await call_api(
            self._client, self.tenant, "result.get", request, ResultReply, timeout_s=_PATIENCE_S
        )
        return reply

    def _outcome(self, operation: str) -> asyncio.Future[Completion]:
        key = f"{self.tenant}.{operation}"
        if key not in self._outcomes:
            self._outcomes[key] = asyncio.get_running_loop().create_future()
        return self._outcomes[key]

    async def _take(self, message: Msg) -> None:
        key = message.subject.removeprefix(f"{streams.PREFIX}.out.{self.tenant}.")
        if key.endswith(".progress"):
            return
        future = self._outcome(key)
        assert not future.done(), f"two outcomes of {key}"
        future.set_result(decode(message.data, Completion, content_type_of(message.headers)))
