"""A storm of messages on every subject that a tenant may publish to, and a mesh that bears it.

Ten thousand messages, made by hypothesis from sound ones and from nothing: operations and API calls
with values replaced, removed and repeated, garbage, deep nesting, huge numbers, wrong types, wrong
content types, seqs twice and far ahead, subjects that are none. Nothing may end a service, be
answered as an error of ours, or keep a sound job from going on.

Hypothesis draws from the constants of all modules that are imported, too: a run of all tests makes
another storm than one of this file, each time the same.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.msg import Msg

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
    ApiError,
    Heartbeat,
    JobReport,
    JobRequest,
    OperationRequest,
    PhaseRequest,
    ResultRequest,
    SubmitJob,
    UsageRequest,
)
from phaseloom.common.contract.codec import CONTENT_TYPE, JSON, MSGPACK, content_type_of, decode
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import Event, OperationFinished, WpgLost, parts
from phaseloom.common.contract.operations import (
    AdamParams,
    After,
    Args,
    Completion,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    LoadState,
    Loss,
    Operation,
    OptimStep,
    Prompt,
    PublishWeights,
    SamplingParams,
    SaveState,
    SyncWeights,
)
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect
from tests.support.jobs import NOOP, TENANT, Log, running_mesh, tenant

BATCH = 25
JOB = "storm"
INBOX = f"_INBOX_{TENANT}.fuzz"
DATUM = Datum([1, 2], [2, 3], logprobs=[-1.0, -2.0], advantages=[0.5, 0.5])
ARGS: list[Args] = [
    Generate([Prompt([1, 2]), Prompt(b"\x01\0\0\0")], SamplingParams(4, stop_strings=["x"]), 2),
    Forward([DATUM]),
    ForwardBackward([DATUM, DATUM], Loss.CISPO),
    OptimStep(AdamParams(1e-3), allow_partial=True),
    SaveState("s", b"blob", {"sampler": "s"}),
    LoadState("s"),
    PublishWeights(),
    SyncWeights("policy", 3),
]


@dataclass(frozen=True)
class Message:
    subject: str
    payload: bytes
    content_type: str


# --- what is sent --------------------------------------------------------------------------------

huge = st.sampled_from([2**31, 2**63, 2**64, 10**40, -(2**63), 1e308, 5e-324])
plain = st.none() | st.booleans() | st.integers() | huge | st.floats() | st.text(max_size=8)
values = st.recursive(
    plain | st.just("x" * 5000) | st.builds(lambda: [0] * 200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NESTED = {
    JSON: b'{"x": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    MSGPACK: b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0",
}
garbage = st.binary(max_size=64) | st.sampled_from(list(NESTED.values()))
CONTENT_TYPES = [JSON] * 5 + [MSGPACK] * 5 + ["text/plain", "application/x-pickle"]
SLOTS = ["r1", "rabc", "0", "01", "-1", "r", "x", str(10**17), str(10**18), "*", ">", "ü"]
DEPLOYMENTS = ["policy"] * 4 + ["sampler"] * 4 + ["critic", "*", "a.b", "-"]
JOBS = [JOB] * 8 + ["nobody", "*", "a" * 200]
AFTER = [[], [], [After("sampler", 1)], [After("critic", 2)]]
rngs = st.integers(0, 2**64 - 1).map(random.Random)
"""For what is only a choice of a list: a draw of hypothesis costs a hundred times as much."""


@st.composite
def damaged(draw: st.DrawFn, sound: object, rng: random.Random) -> object:
    """A tree as its message's, with a few values replaced, removed, renamed or repeated."""
    tree = msgspec.to_builtins(sound, builtin_types=(bytes,))
    for _ in range(rng.randrange(4)):
        places = list(_places(tree))
        if not places:
            break
        container, name = rng.choice(places)
        match rng.choice(["replace", "replace", "remove", "rename", "repeat"]):
            case "replace":
                container[name] = draw(values)
            case "remove":
                del container[name]
            case "rename" if isinstance(container, dict):
                container["renamed"] = container.pop(name)
            case _ if isinstance(container, list):
                container.append(copy.deepcopy(container[name]))
            case _:
                pass
    return tree


def _places(tree: Any) -> Any:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    for name, value in items:
        yield tree, name
        if isinstance(value, dict | list):
            yield from _places(value)


@st.composite
def payloads(draw: st.DrawFn, sound: object, rng: random.Random) -> tuple[bytes, str]:
    content_type = rng.choice(CONTENT_TYPES)
    if rng.random() < 0.1:
        return draw(garbage), content_type
    tree = draw(damaged(sound, rng))
    try:
        codec = msgspec.msgpack if content_type == MSGPACK else msgspec.json
        return codec.encode(tree), content_type
    except (OverflowError, UnicodeEncodeError):  # no message can carry it
        return repr(tree).encode(errors="replace"), content_type


@st.composite
def operations(draw: st.DrawFn, session: int) -> Message:
    rng = draw(rngs)
    slot = str(rng.randint(1, 150)) if rng.random() < 0.8 else rng.choice(SLOTS)
    where = f"{rng.choice(JOBS)}.{rng.choice(DEPLOYMENTS)}.{slot}"
    operation = Operation(
        f"{rng.getrandbits(64):x}",
        rng.choice([session] * 8 + [session - 1, session + 1]),
        rng.choice(ARGS),
        rng.choice(AFTER),
        rng.choice([0.0, 0.0, 0.001, 30.0]),
    )
    payload, content_type = draw(payloads(operation, rng))
    return Message(f"{streams.PREFIX}.op.{TENANT}.{where}", payload, content_type)


ENDLESS = SubmitJob(
    "new", JobSpec(1.5, [DeploymentSpec("policy", "nowhere", "noop", ModelSpec({"a": [1]}))])
)
"""In a pool that no node is of: whatever is left of it waits, and starts no process."""


@st.composite
def calls(draw: st.DrawFn, session: int) -> Message:
    requests: dict[str, object] = {
        "job.submit": ENDLESS,
        "job.status": JobRequest(JOB),
        "job.finish": JobRequest("new"),
        "session.attach": JobRequest("new"),
        "session.heartbeat": Heartbeat(JOB, session),
        "result.get": ResultRequest(JOB, "policy", "1"),
        "tenant.usage": UsageRequest(),
        "job.report": JobReport(JOB, 3, {"reward": 0.5}),
        "phase.declare": PhaseRequest(JOB, session, "rollout", True),
        "operation.cancel": OperationRequest(JOB, "policy", "3"),
        "operation.explain": OperationRequest(JOB, "sampler", "3"),
    }
    rng = draw(rngs)
    call = rng.choice(sorted(requests))
    payload, content_type = draw(payloads(requests[call], rng))
    return Message(streams.api_subject(TENANT, call), payload, content_type)


def storm(session: int) -> st.SearchStrategy[list[Message]]:
    strange = st.builds(
        Message,
        st.sampled_from(["op.demo.a", "op.demo.a.b.c.d.e", "api.demo.no.such.call"]).map(
            lambda rest: f"{streams.PREFIX}.{rest}"
        ),
        garbage,
        st.sampled_from(CONTENT_TYPES),
    )
    one = st.one_of([operations(session)] * 6 + [calls(session)] * 3 + [strange])
    return st.lists(one, min_size=BATCH, max_size=BATCH)


# --- and what comes back -------------------------------------------------------------------------


@dataclass
class Ears:
    """All that the tenant hears."""

    outcomes: dict[str, Completion] = field(default_factory=dict)
    answers: list[Msg] = field(default_factory=list)
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def outcome(self, message: Msg) -> None:
        if message.subject.endswith(".progress"):
            return
        completion = decode(message.data, Completion, content_type_of(message.headers))
        assert message.subject not in self.outcomes, f"two outcomes on {message.subject}"
        self.outcomes[message.subject] = completion

    async def answer(self, message: Msg) -> None:
        self.answers.append(message)
        async with self.heard:
            self.heard.notify_all()

    async def until_answered(self, number: int) -> None:
        async with asyncio.timeout(60), self.heard:
            await self.heard.wait_for(lambda: len(self.answers) >= number)


@pytest.fixture
async def mesh_and_log(short_dir: Path, noop_nodes: None) -> AsyncIterator[tuple[Mesh, Log]]:
    config = MeshConfig(tenants=[TENANT], seal_every=0)
    async with running_mesh(config, short_dir) as both:
        yield both


@pytest.mark.parametrize("batches", [60, pytest.param(400, marks=pytest.mark.slow)])
async def test_storm_of_messages_ends_no_service_and_sticks_no_job(
    mesh_and_log: tuple[Mesh, Log], batches: int
) -> None:
    mesh, log = mesh_and_log
    pids = sorted(mesh.pids())
    ears, sent = Ears(), Counter[str]()
    loop = asyncio.get_running_loop()
    async with tenant(mesh) as controller:
        job = await controller.submit_job(JOB, NOOP)
        sound = await controller.submit_job("sound", NOOP)
        wire = await _connected(mesh, ears)

        @settings(
            max_examples=batches,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(storm(job.session))
        def blow(messages: list[Message]) -> None:
            sent["messages"] += len(messages)
            sent["calls"] += sum(".api." in m.subject and "such" not in m.subject for m in messages)
            asyncio.run_coroutine_threadsafe(_send(wire, messages), loop).result(60)

        steps = [sound.deployment("policy").optim_step(AdamParams(1e-3)) for _ in range(50)]
        await asyncio.to_thread(blow)
        assert sent["messages"] >= batches * BATCH
        await ears.until_answered(sent["calls"])
        await _until_routed(mesh)
        for step in [*steps, sound.deployment("policy").optim_step(AdamParams(1e-3))]:
            await step
        rollout = sound.deployment("sampler").generate([Prompt([1])], SamplingParams(2))
        assert len((await rollout).sequences) == 1

        # The storm's own job goes on too, in another session and behind what it left.
        again = await controller.attach(JOB)
        await again.deployment("policy").publish_weights(timeout_s=0)
        ended = [repr(event) for event in log.events if _ends_a_life(event)]
        assert [d.incarnation for d in (await again.status()).deployments] == [1, 1], ended
        await wire.close()
    assert not [a for a in map(_error, ears.answers) if a is Code.INTERNAL]
    assert not _ours(ears.outcomes)
    assert sum(c.error is None for c in ears.outcomes.values()) > 20
    assert sorted(mesh.pids()) == pids
    assert not _complaints(mesh.run_dir / "logs")


def _ends_a_life(event: Event) -> bool:
    return any(
        isinstance(e, WpgLost) or (isinstance(e, OperationFinished) and e.dirty)
        for e in parts(event)
    )


async def _connected(mesh: Mesh, ears: Ears) -> Client:
    credentials = mesh.credentials
    wire = await connect(
        credentials.url,
        "storm",
        TENANT,
        credentials.tenants[TENANT],
        inbox_prefix=f"_INBOX_{TENANT}",
    )
    await wire.subscribe(f"{streams.PREFIX}.out.{TENANT}.>", cb=ears.outcome)
    await wire.subscribe(INBOX, cb=ears.answer)
    await wire.flush()
    return wire


async def _send(wire: Client, messages: list[Message]) -> None:
    for message in messages:
        is_call = ".api." in message.subject
        await wire.publish(
            message.subject,
            message.payload,
            reply=INBOX if is_call else "",
            headers={CONTENT_TYPE: message.content_type},
        )
    await wire.flush(60)


async def _until_routed(mesh: Mesh) -> None:
    """Nothing of the tenant's stream waits for a router any more."""
    bus = await Bus.open(mesh.credentials.bus, "fuzz")
    async with asyncio.timeout(60):
        while True:
            info = await bus.js.consumer_info(streams.ops_stream(TENANT), "router")
            if info.num_pending == 0 and info.num_ack_pending == 0:
                break
            await asyncio.sleep(0.05)
    await bus.close()


def _error(answer: Msg) -> Code | None:
    if "Nats-Service-Error-Code" not in (answer.headers or {}):
        return None
    error: ApiError = decode(answer.data, ApiError, content_type_of(answer.headers))
    return error.error.code


def _ours(outcomes: dict[str, Completion]) -> list[Completion]:
    """Outcomes that no message may bring about."""
    ours = (Code.INTERNAL, Code.DATA_LOSS, Code.UNAVAILABLE)
    return [c for c in outcomes.values() if c.error is not None and c.error.code in ours]


def _complaints(logs: Path) -> list[str]:
    """Lines of the services' logs that tell of an error of ours."""
    lines = [line for file in logs.glob("*.log") for line in file.read_text().splitlines()]
    signs = ('"level": "ERROR"', '"level": "CRITICAL"', "Traceback", "never retrieved")
    return [line[:2000] for line in lines if any(sign in line for sign in signs)]
