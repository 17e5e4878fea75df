"""Weights versions of a fine-tuning run in bfloat16, sent to another node as deltas and whole.

The backend `fsdp` trains a registered model, in this process, on solved problems of reasoning-gym:
AdamW on float32 masters, the gradient's norm clipped. The first steps are not measured: masters
that were just made of bfloat16 weights lie in the middle between two others, so fewer weights than
later change. Then every step is published on a real state manager, and two others fetch it: one has
the version before and gets deltas, the other has dropped it and gets all. Both fetch by a link of a
given speed, and once more without a limit, each side first in every other step.

At the end of a run the state that a seal would write is compared with that of one step before.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from loadtest.records import Machine, describe
from loadtest.state_bench import NODE, SECRET, SOCKET, daemon
from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    ForwardBackward,
    Loss,
    OptimStep,
)
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.common.transport.tickets import signed
from phaseloom.demo.controllers import find_example
from phaseloom.statemgr.transfer import delta
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.backends import pretrained
from phaseloom.worker.backends.fsdp.backend import FsdpBackend
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap, align

POLICY, SAMPLER = (DeploymentKey("bench", "delta", name) for name in ("policy", "sampler"))
_TASK = "gsm_symbolic"
_CHUNK_BYTES = 256 * 1024
_BLOCK_BYTES = 4096
_SAMPLED_BYTES = 1024 * 1024
_SAMPLED_EVERY = 16
"""Of every 16 MiB of the state, one is looked at for what a seal would write."""


class Settings(msgspec.Struct, frozen=True):
    learning_rates: list[float]
    steps: int = 8
    """The measured steps of each run."""
    settle_steps: int = 24
    """The steps before them."""
    rows: int = 8
    """The solved problems of a step."""
    link_mbit: int = 1000
    """The speed of the link, in megabits a second."""


class Sent(msgspec.Struct, frozen=True):
    """One version, fetched whole and as deltas."""

    loss: float
    """The mean loss of a row before the step."""
    changed: float
    """The share of the weights that the step has changed."""
    changed_blocks: float
    """The share of the blocks of 4 KiB in which it has changed any."""
    whole_bytes: int
    """The bytes that the source sent, headers and encryption included."""
    delta_bytes: int
    whole_s: float
    """The seconds until the version was there and verified, by the link."""
    delta_s: float
    fast_whole_s: float
    """The same without a limit."""
    fast_delta_s: float

    @property
    def share(self) -> float:
        return self.delta_bytes / self.whole_bytes

    @property
    def time_ratio(self) -> float:
        return self.delta_s / self.whole_s

    @property
    def fast_time_ratio(self) -> float:
        return self.fast_delta_s / self.fast_whole_s


class Run(msgspec.Struct, frozen=True):
    learning_rate: float
    versions: list[Sent]
    seal_changed_blocks: float
    """The share of the blocks of 4 KiB of the whole training state in which a step changes any."""
    seal_share: float
    """The size of a delta of that state, over the size of the state."""


class DeltaReport(msgspec.Struct, frozen=True):
    machine: Machine
    settings: Settings
    model: str
    version_bytes: int
    state_bytes: int
    """The size of the state that a seal writes."""
    runs: list[Run]


async def measure(model: Path, settings: Settings, directory: Path) -> DeltaReport:
    """Measure a run for every learning rate. Args: model: a model's directory."""
    tokens = _problems(model)
    runs: list[Run] = []
    for learning_rate in settings.learning_rates:
        with _trained(model, learning_rate, settings.rows, tokens) as training:
            place = directory / f"{learning_rate:g}"
            runs.append(await _measure(training, settings, place))
        version_bytes, state_bytes = training.version_bytes, training.heap.num_bytes
    machine = describe("torch", "transformers")
    return DeltaReport(machine, settings, model.name, version_bytes, state_bytes, runs)


# --- Training ------------------------------------------------------------------------------------


@dataclass
class _Training:
    backend: FsdpBackend
    heap: Heap
    adam: AdamParams
    rows: int
    tokens: Iterator[list[int]]

    @property
    def version_bytes(self) -> int:
        last = self.backend.version_slots[-1]
        return align(last.offset + last.num_bytes)

    @property
    def weights(self) -> memoryview:
        return self.heap.buffer[: self.version_bytes]

    def step(self) -> float:
        """Take a step. Returns: the mean loss of a row."""
        batch = []
        for _ in range(self.rows):
            row = next(self.tokens)
            weight = 1 / (self.rows * (len(row) - 1))
            batch.append(Datum(row[:-1], row[1:], weights=[weight] * (len(row) - 1)))
        result = self.backend.forward_backward(ForwardBackward(batch, Loss.CROSS_ENTROPY))
        self.backend.optim_step(OptimStep(self.adam))
        return result.metrics["loss:sum"]


@contextmanager
def _trained(
    model: Path, learning_rate: float, rows: int, tokens: Iterator[list[int]]
) -> Iterator[_Training]:
    """The model with bfloat16 weights, as a rank of `fsdp` that is alone has it."""
    found = read_model("model", model)
    values = found.config | {"dtype": "bfloat16"}
    spec = ModelSpec(values, registered="model", pinned=found.directory)
    deployment = DeploymentSpec("policy", "train", "fsdp", spec, trainable=True)
    heap = Heap(FsdpBackend.plan(deployment).heap_bytes)
    backend = FsdpBackend(deployment, heap)
    try:
        pretrained.fill(heap, backend.slots, spec)
        backend.weights_changed()
        adam = AdamParams(learning_rate, grad_clip_norm=1.0)
        yield _Training(backend, heap, adam, rows, tokens)
    finally:
        backend.close()


def _problems(model: Path) -> Iterator[list[int]]:
    """The tokens of one solved problem after another."""
    import transformers

    sys.path.insert(0, str(find_example().parent))
    from tasks import import_reasoning_gym

    import_reasoning_gym()
    import reasoning_gym

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    items: Any = reasoning_gym.create_dataset(_TASK, seed=0, size=10_000_000)
    for number in count():
        item = items[number]
        text = f"Question: {item['question']}\nAnswer: {item['answer']}\n"
        yield list(tokenizer.encode(text))


# --- Sending -------------------------------------------------------------------------------------


@dataclass
class _Link:
    """A TCP link to a state manager that counts what flows back, and limits its speed."""

    endpoint: str
    rate: float
    """Bytes a second; infinite: no limit."""
    passed_bytes: int = 0
    free_at_s: float = 0.0
    """The time at which the link has sent all that it was given."""

    async def back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            self.passed_bytes += len(chunk)
            self.free_at_s = max(self.free_at_s, time.monotonic()) + len(chunk) / self.rate
            await asyncio.sleep(self.free_at_s - time.monotonic())
            writer.write(chunk)
            await writer.drain()


@asynccontextmanager
async def _link(source: str, rate: float) -> AsyncIterator[_Link]:
    link = _Link("", rate)
    host, port = source.rsplit(":", 1)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asks = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(link.back(answers, writer))
                while chunk := await reader.read(_CHUNK_BYTES):
                    asks.write(chunk)
                    await asks.drain()
                asks.write_eof()
        except* OSError:
            pass  # one end has closed the stream
        finally:
            asks.close()
            writer.close()

    async with asyncio.TaskGroup() as connections:
        tasks = []

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(connections.create_task(connection(reader, writer)))

        async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
            link.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield link
        for task in tasks:
            task.cancel()


@dataclass
class _Reader:
    """A rank of the sampler, on a node of its own."""

    agent: AgentStateClient
    client: RankStateClient
    seconds: dict[float, float] = field(default_factory=dict)
    """How long the last fetch by a link of each rate took."""
    sent_bytes: int = 0
    """What the last fetch took of the link."""

    async def fetch(self, key: VersionKey, link: _Link) -> str:
        before, started_s = link.passed_bytes, time.perf_counter()
        shown = signed(Ticket(key, SAMPLER, 1, [NODE]), SECRET)
        opened = await self.client.versions.open(key, [link.endpoint], shown)
        self.seconds[link.rate] = time.perf_counter() - started_s
        self.sent_bytes = link.passed_bytes - before
        return opened.described.digest


async def _measure(training: _Training, settings: Settings, directory: Path) -> Run:
    """Train and send. Args: directory: for the state managers."""
    async with AsyncExitStack() as stack:

        async def node(name: str, key: DeploymentKey) -> tuple[AgentStateClient, RankStateClient]:
            place = directory / name
            await asyncio.to_thread(place.mkdir, parents=True)
            size = 4 * training.version_bytes
            running = daemon(place, size, authority=directory)
            agent = await stack.enter_async_context(running)
            client = await _join(agent, place, key)
            stack.push_async_callback(client.close)
            return agent, client

        source, policy = await node("source", POLICY)
        whole, deltas = [_Reader(*await node(name, SAMPLER)) for name in ("whole", "deltas")]
        endpoint = (await source.status()).endpoint
        rates = (settings.link_mbit * 1e6 / 8, float("inf"))
        links = [await stack.enter_async_context(_link(endpoint, rate)) for rate in rates]
        for _ in range(settings.settle_steps):
            await asyncio.to_thread(training.step)
        key = VersionKey(POLICY, 1)
        await _publish(policy, key, training)
        for each in (whole, deltas):
            await each.fetch(key, links[1])
        versions = []
        for number in range(settings.steps):
            before, base, key = bytes(training.weights), key, VersionKey(POLICY, key.seq + 1)
            state = _sample(training.heap) if number == settings.steps - 1 else b""
            loss = await asyncio.to_thread(training.step)
            digest = await _publish(policy, key, training)
            sent = [0, 0]
            for link in links:
                sides = [(0, whole), (1, deltas)]
                for side, each in sides if number % 2 else reversed(sides):
                    await each.agent.drop_versions([key] if side else [base, key])
                    assert await each.fetch(key, link) == digest, "another version came"
                    sent[side] = max(sent[side], each.sent_bytes)
            for agent in (source, deltas.agent):
                await agent.drop_versions([base])
            times = [each.seconds[rate] for rate in rates for each in (whole, deltas)]
            changed = _changed(before, training.weights)
            versions.append(Sent(loss, *changed, *sent, *times))
        blocks, share = await asyncio.to_thread(_seal_shares, state, _sample(training.heap))
        return Run(training.adam.learning_rate, versions, blocks, share)


async def _join(agent: AgentStateClient, directory: Path, key: DeploymentKey) -> RankStateClient:
    """A rank with a small heap of its own: versions are not made from it."""
    await agent.register_wpg([str(key)], key, 1, [0], 0)
    client = await RankStateClient.connect(
        directory / SOCKET, str(key), applied=lambda: 0, on_loaded=lambda: None
    )
    await client.register_heap(Heap(_BLOCK_BYTES), [])
    await client.commit_initial()
    return client


async def _publish(policy: RankStateClient, key: VersionKey, training: _Training) -> str:
    memory = await policy.versions.reserve(key, list(training.backend.version_slots))
    assert isinstance(memory, memoryview)
    memory[:] = training.weights
    digest = await asyncio.to_thread(digest_of, memory)
    await policy.versions.commit(key, memory, digest)
    return digest


def _changed(before: bytes, now: memoryview) -> tuple[float, float]:
    """The share of elements of two bytes, and of blocks, that differ."""
    differ = np.frombuffer(before, np.uint16) != np.frombuffer(now, np.uint16)
    starts = np.arange(0, differ.size, _BLOCK_BYTES // 2)
    return float(differ.mean()), float(np.logical_or.reduceat(differ, starts).mean())


def _sample(heap: Heap) -> bytes:
    """Every so many bytes of the state, end to end."""
    starts = range(0, heap.num_bytes, _SAMPLED_EVERY * _SAMPLED_BYTES)
    return b"".join(heap.buffer[start : start + _SAMPLED_BYTES] for start in starts)


def _seal_shares(before: bytes, now: bytes) -> tuple[float, float]:
    """What a step changes of the state: the share of its blocks, and the size of a delta."""
    _, blocks = _changed(before, memoryview(now))
    made = delta.encode(memoryview(before), memoryview(now), 2 * len(now))
    assert made is not None
    return blocks, len(made) / len(now)


def middle(run: Run, name: str) -> float:
    """The median of a field of all versions of a run."""
    return float(median(getattr(each, name) for each in run.versions))
