"""What the contract promises to those who err: a typed outcome for them, and peace for all others.

One mesh for all tests: each has a job of its own and leaves the mesh as it was.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import indent
from typing import Any

import nats
import pytest
import pytest_asyncio
from settings import MODEL

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.api import JobRequest, JobStatus
from phaseloom.common.contract.codec import JSON, MSGPACK, encode
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.events import OperationFinished
from phaseloom.common.contract.operations import (
    AdamParams,
    After,
    Args,
    Generate,
    LoadState,
    Operation,
    OptimStep,
    Outcome,
    Prompt,
    PublishWeights,
    SamplingParams,
    SaveState,
    SyncWeights,
)
from phaseloom.common.process import config
from phaseloom.common.transport.services import call_api
from tests.support.directories import short_directory
from tests.support.jobs import NOOP, TENANT, Log, Wire, running_mesh, tenant
from tests.support.node import exploding, policy_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPOSITORY = Path(__file__).parents[2]
OTHER = "globex"
STEP = OptimStep(AdamParams(1e-3))
GENERATE = Generate([Prompt([1, 2])], SamplingParams(2))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh_and_log() -> AsyncIterator[tuple[Mesh, Log]]:
    config = MeshConfig(tenants=[TENANT, OTHER], seal_every=0)
    with short_directory() as directory:
        async with running_mesh(config, directory) as both:
            yield both


@pytest_asyncio.fixture(loop_scope="module")
async def log(mesh_and_log: tuple[Mesh, Log]) -> Log:
    return mesh_and_log[1]


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(mesh_and_log: tuple[Mesh, Log]) -> Mesh:
    return mesh_and_log[0]


@pytest_asyncio.fixture(loop_scope="module")
async def wire(mesh: Mesh) -> AsyncIterator[Wire]:
    async with Wire.connected(mesh) as wire:
        yield wire


@asynccontextmanager
async def running_job(
    mesh: Mesh, name: str, specs: list[client.DeploymentSpec] = NOOP
) -> AsyncIterator[client.MeshJob]:
    async with tenant(mesh) as connection:
        job = await connection.submit_job(name, specs)
        yield job
        await job.finish()


def operation(job: client.MeshJob, args: Args, id: str = "mine") -> Operation:
    return Operation(id, job.session, args)


# --- messages that are wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "content_type", "field"),
    [
        (b"\x00\xff not a message", MSGPACK, ""),
        (b"{'id': 1}", JSON, ""),
        (b'{"id": "x", "session": "one", "args": {"type": "optim_step"}}', JSON, "session"),
        (b'{"id": "x", "session": 1, "args": {"type": "optim_step"}}', JSON, "args"),
        (b'{"id": "x", "session": 1, "args": {"type": "explode"}}', JSON, "args.type"),
        (b"\x80\x04]\x94.", "application/x-python-pickle", "headers.Content-Type"),
    ],
    ids=["garbage", "text", "wrong-type", "missing", "unknown-kind", "pickle"],
)
async def test_malformed_message_is_a_failed_operation_and_disturbs_nobody(
    mesh: Mesh,
    wire: Wire,
    payload: bytes,
    content_type: str,
    field: str,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id
    async with running_job(mesh, f"bad-{name}") as job, running_job(mesh, f"good-{name}") as good:
        steps = [good.deployment("policy").optim_step(STEP.adam) for _ in range(3)]
        await wire.send(f"{job.name}.policy.1", payload, content_type)
        await wire.send(f"{job.name}.policy.2", operation(job, PublishWeights()))
        refused = await wire.outcome(f"{job.name}.policy.1")
        assert refused.outcome is Outcome.FAILED
        assert refused.error is not None
        assert refused.error.code is Code.INVALID_ARGUMENT
        assert refused.error.field == field
        assert refused.error.remedy
        assert (await wire.outcome(f"{job.name}.policy.2")).outcome is Outcome.COMPLETED
        for step in steps:
            await step
        assert [d.incarnation for d in (await job.status()).deployments] == [1, 1]


async def test_batch_with_arrays_of_different_lengths_fails_alone(mesh: Mesh) -> None:
    async with running_job(mesh, "lengths") as job:
        policy = job.deployment("policy")
        before = policy.optim_step(STEP.adam)
        bad = policy.forward_backward(
            [client.Datum([1, 2], [2, 3], weights=[1.0, 1.0, 1.0])], "cross_entropy"
        )
        after = policy.publish_weights()
        with pytest.raises(CallerError) as refused:
            await bad
        assert refused.value.info.field == "args.batch[0].weights"
        assert refused.value.info.remedy
        await before
        await after


async def test_operation_for_a_deployment_that_is_not_there_fails(mesh: Mesh, wire: Wire) -> None:
    async with running_job(mesh, "unknown") as job:
        await wire.send("unknown.critic.1", operation(job, STEP))
        outcome = await wire.outcome("unknown.critic.1")
        assert outcome.error is not None
        assert outcome.error.code is Code.NOT_FOUND
        assert outcome.error.field == "subject.deployment"


# --- order and repetition ------------------------------------------------------------------------


async def test_second_publish_of_a_seq_is_refused_and_the_first_outcome_stands(
    mesh: Mesh, wire: Wire
) -> None:
    async with running_job(mesh, "twice") as job:
        first = await wire.send("twice.policy.1", operation(job, STEP, "first"))
        assert "error" not in first
        second = await wire.send("twice.policy.1", operation(job, PublishWeights(), "second"))
        assert "per subject exceeded" in second["error"]["description"]
        assert (await wire.outcome("twice.policy.1")).id == "first"
        reply = await wire.ask("twice.policy.1")
        assert reply.stored_id == "first"
        assert reply.completion is not None
        await wire.send("twice.policy.2", operation(job, STEP))
        assert (await wire.outcome("twice.policy.2")).outcome is Outcome.COMPLETED


async def test_copy_of_a_reading_operation_that_is_done_runs_no_second_time(
    mesh: Mesh, wire: Wire, log: Log
) -> None:
    """Its payload goes off the stream when it is done: the server then takes the copy."""
    async with running_job(mesh, "again") as job:
        await wire.send("again.sampler.1", operation(job, GENERATE, "first"))
        assert (await wire.outcome("again.sampler.1")).id == "first"
        async with asyncio.timeout(60):
            while "error" in await wire.send("again.sampler.1", operation(job, GENERATE, "second")):
                pass  # until the first one's payload is deleted
        await wire.send("again.sampler.2", operation(job, GENERATE))
        assert (await wire.outcome("again.sampler.2")).outcome is Outcome.COMPLETED
        assert (await wire.ask("again.sampler.1")).stored_id == "first"
        await log.until_finished("again.sampler.2")
    assert finished(log, "again.sampler") == ["1", "2"]


async def test_operations_after_a_gap_wait_until_it_is_filled(
    mesh: Mesh, wire: Wire, log: Log
) -> None:
    async with running_job(mesh, "gap") as job:
        for seq in (3, 2):
            await wire.send(f"gap.policy.{seq}", operation(job, STEP))
        await wire.send("gap.sampler.1", operation(job, GENERATE))
        assert (await wire.outcome("gap.sampler.1")).outcome is Outcome.COMPLETED
        assert not wire.has_outcome("gap.policy.2")
        await wire.send("gap.policy.1", operation(job, STEP))
        for seq in (1, 2, 3):
            assert (await wire.outcome(f"gap.policy.{seq}")).outcome is Outcome.COMPLETED
        await log.until_finished("gap.policy.3")
    assert finished(log, "gap.policy") == ["1", "2", "3"]


async def test_reading_operation_without_order_runs_beside_a_gap(mesh: Mesh, wire: Wire) -> None:
    async with running_job(mesh, "loose") as job:
        await wire.send("loose.sampler.2", operation(job, GENERATE))
        await wire.send("loose.sampler.rabc", operation(job, GENERATE))
        assert (await wire.outcome("loose.sampler.rabc")).outcome is Outcome.COMPLETED
        assert not wire.has_outcome("loose.sampler.2")
        await wire.send("loose.policy.rabc", operation(job, STEP))
        refused = await wire.outcome("loose.policy.rabc")
        assert refused.error is not None
        assert refused.error.field == "subject.seq"


async def test_operation_after_one_that_failed_fails_too(mesh: Mesh, wire: Wire) -> None:
    async with running_job(mesh, "chain") as job:
        generate = Operation("mine", job.session, GENERATE, [After("policy", 1)])
        await wire.send("chain.sampler.1", generate)
        await wire.send("chain.policy.1", b"{}", JSON)
        outcome = await wire.outcome("chain.sampler.1")
        assert outcome.error is not None
        assert outcome.error.code is Code.FAILED_PRECONDITION
        assert outcome.error.field == "after"


def finished(log: Log, deployment: str) -> list[str]:
    """Slots of a deployment's operations in the order in which they ran."""
    prefix = f"{TENANT}.{deployment}"
    return [
        event.key.slot
        for event in log.events
        if isinstance(event, OperationFinished) and str(event.key.deployment_key) == prefix
    ]


# --- who may -------------------------------------------------------------------------------------


async def test_operation_of_a_session_that_is_over_is_aborted(mesh: Mesh, wire: Wire) -> None:
    async with running_job(mesh, "sessions") as old, tenant(mesh) as connection:
        new = await connection.attach("sessions")
        await wire.send("sessions.policy.1", operation(old, STEP))
        outcome = await wire.outcome("sessions.policy.1")
        assert outcome.error is not None
        assert outcome.error.code is Code.ABORTED
        assert outcome.error.field == "session"
        await wire.send("sessions.policy.2", operation(new, STEP))
        assert (await wire.outcome("sessions.policy.2")).outcome is Outcome.COMPLETED


async def test_tenant_reaches_nothing_of_another(mesh: Mesh, wire: Wire, log: Log) -> None:
    credentials = mesh.credentials
    violations: asyncio.Queue[str] = asyncio.Queue()

    async def on_error(error: Exception) -> None:
        violations.put_nowait(str(error).lower())

    async with running_job(mesh, "secret") as job:
        intruder = await nats.connect(
            credentials.url,
            user=OTHER,
            password=credentials.tenants[OTHER],
            inbox_prefix=f"_INBOX_{OTHER}".encode(),
            error_cb=on_error,
        )
        try:
            for subject in (f"pl.v1.out.{TENANT}.>", "pl.v1.permit.>", "pl.v1.sched.>"):
                await intruder.subscribe(subject)
                assert "permissions violation for subscription" in await soon(violations)
            heard = await intruder.subscribe(f"pl.v1.out.{OTHER}.>")
            forged = encode(operation(job, STEP, "forged"))
            for subject in (
                f"pl.v1.op.{TENANT}.secret.policy.1",
                f"pl.v1.done.{TENANT}.secret.policy.1",
                f"pl.v1.api.{TENANT}.job.finish",
                "pl.v1.sched.queued",
                "pl.v1.permit.train-0",
                "$JS.API.STREAM.PURGE.SCHED",
            ):
                await intruder.publish(subject, forged)
                assert "permissions violation for publish" in await soon(violations)
            await wire.send("secret.policy.1", operation(job, STEP, "own"))
            assert (await wire.outcome("secret.policy.1")).id == "own"
            await intruder.flush()
            assert heard.pending_msgs == 0
            with pytest.raises(CallerError) as unknown:
                await call_api(intruder, OTHER, "job.status", JobRequest("secret"), JobStatus)
            assert unknown.value.info.code is Code.NOT_FOUND
        finally:
            await intruder.close()
        await log.until_finished("secret.policy.1")
    assert finished(log, "secret.policy") == ["1"]


async def soon(queue: asyncio.Queue[str]) -> str:
    return await asyncio.wait_for(queue.get(), 60)


# --- what the documentation shows ----------------------------------------------------------------


async def test_calls_in_the_documentation_are_answered_as_it_says(mesh: Mesh, wire: Wire) -> None:
    """Each in JSON, in order; until it is answered so, as what it is about may be under way."""
    text = (REPOSITORY / "docs" / "protocol.md").read_text()
    (block,) = re.findall(r"```text\n(.*?)```", text.replace("<tenant>", TENANT), re.DOTALL)
    lines = block.splitlines()
    assert len(lines) > 30
    for request, answer in zip(lines[::2], lines[1::2], strict=True):
        subject, _, body = request.partition(" ")
        expected = json.loads(answer.removeprefix("→ "))
        got: object = None
        try:
            async with asyncio.timeout(60):
                while not _shows(got, expected):
                    await asyncio.sleep(0.02)
                    got = await wire.request(subject, json.dumps(json.loads(body)).encode())
        except TimeoutError:
            pytest.fail(f"{request}\nwas answered {got}")
    cancelled = await wire.outcome("plain.sampler.3")
    assert cancelled.outcome is Outcome.CANCELLED
    assert (await wire.outcome("plain.sampler.1")).outcome is Outcome.COMPLETED


async def test_controller_in_the_readme_runs_as_it_is_written(mesh: Mesh) -> None:
    """What it leaves open, to be the reader's own, is given: a config, a batch, a loss, prompts."""
    text = (REPOSITORY / "README.md").read_text()
    shown = re.findall(r"```python\n(from phaseloom.client.*?)```", text, re.DOTALL)[0]
    imports, _, body = shown.partition("\n\n")
    program = f"{imports}\nasync def main():\n{indent(body, '    ')}\n    return groups\n"
    given: dict[str, Any] = {
        "config": MODEL,
        "batch": [client.Datum([1, 2], [2, 3], weights=[1.0, 1.0])],
        "loss": "cross_entropy",
        "prompts": [Prompt([1, 2])],
        "sampling": SamplingParams(2),
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in _variables(mesh).items():
            environment.setenv(name, value)
        exec(program, given)
        groups = await given["main"]()
    assert len(groups.sequences[0]) == 16


async def test_first_example_raises_its_reward(mesh: Mesh) -> None:
    program = REPOSITORY / "examples" / "hello.py"
    environment = config.inherited() | _variables(mesh)
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, stdout=PIPE, stderr=PIPE, env=environment
    )
    said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    rewards = [float(line.rpartition(" ")[2]) for line in said.decode().splitlines()]
    assert len(rewards) == 15
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9
    assert errors == b""


async def test_evaluation_next_to_training_samples_the_versions_it_names(mesh: Mesh) -> None:
    """The untrained version is bad and the last one good, in whatever order they are sampled."""
    program = REPOSITORY / "examples" / "evaluate.py"
    environment = config.inherited() | _variables(mesh)
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, stdout=PIPE, stderr=PIPE, env=environment
    )
    said, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert errors == b""
    lines = re.findall(r"step (\d+), version (\d+): reward ([\d.]+)", said.decode())
    found = {int(step): (int(version), float(score)) for step, version, score in lines}
    assert {step: version for step, (version, _) in found.items()} == {0: 1, 5: 16, 10: 31, 15: 46}
    assert found[0][1] < 0.3
    assert found[15][1] > 0.9
    async with tenant(mesh) as connection:
        assert (await connection.status("evaluation")).state == "done"


async def test_interrupted_example_leaves_a_job_that_attach_resumes(mesh: Mesh) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        REPOSITORY / "examples" / "hello.py",
        stdout=PIPE,
        stderr=PIPE,
        env=config.inherited() | _variables(mesh),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGINT)  # as Ctrl-C does
    _, errors = await process.communicate()
    assert process.returncode != 0
    assert f"phaseloom cancel {TENANT}.hello" in errors.decode()
    async with tenant(mesh) as connection:
        job = await connection.attach("hello")
        await job.deployment("policy").optim_step(STEP.adam)
        await job.finish(cancelled=True)
        assert (await job.status()).state == "cancelled"


def _variables(mesh: Mesh) -> dict[str, str]:
    """The variables that `phaseloom up` prints."""
    password = mesh.credentials.tenants[TENANT]
    values = {"URL": mesh.url, "TENANT": TENANT, "PASSWORD": password}
    return {f"PHASELOOM_{name}": value for name, value in values.items()}


def _shows(got: object, expected: object) -> bool:
    """Whether an answer has all that is shown of it; `…` stands for anything."""
    if isinstance(expected, dict):
        return isinstance(got, dict) and all(
            name in got and _shows(got[name], value) for name, value in expected.items()
        )
    return expected in ("…", got)


# --- what cannot run -----------------------------------------------------------------------------


async def test_job_on_a_pool_that_never_was_is_refused_with_the_existing_ones(
    mesh: Mesh,
) -> None:
    spec = client.DeploymentSpec("judge", "trian", "noop", client.ModelSpec({}))
    async with tenant(mesh) as connection:
        for may_wait in (True, False):
            with pytest.raises(CallerError, match="no pool 'trian'") as refused:
                await connection.submit_job("mistyped", [*NOOP, spec], may_wait=may_wait)
            error = refused.value.info
            assert error.field == f"spec.deployments[{len(NOOP)}].pool"
            assert "rollout, train" in error.remedy
        with pytest.raises(CallerError, match="does not exist"):
            await connection.status("mistyped")
        with pytest.raises(CallerError) as wrong:
            await connection.submit_job("mistyped", NOOP, may_wait="pools")  # type: ignore[arg-type]
        assert wrong.value.info.field == "may_wait"


async def test_program_whose_job_waits_for_a_pool_is_told_why(
    mesh: Mesh, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool's nodes may be yet to come."""
    monkeypatch.setattr(client.mesh, "_FIRST_NOTICE_AFTER_S", 0.0)
    spec = client.DeploymentSpec("policy", "trian", "noop", client.ModelSpec({}), trainable=True)
    async with tenant(mesh) as connection:
        waiting = asyncio.create_task(connection.submit_job("mistyped", [spec], may_wait="pool"))
        async with asyncio.timeout(60):
            while "'trian'" not in caplog.text:
                await asyncio.sleep(0.02)
        await wire.request(f"pl.v1.api.{TENANT}.job.finish", b'{"job": "mistyped"}')
        with pytest.raises(PhaseloomError):
            await waiting
    assert "known pools: rollout, train" in caplog.text


async def test_job_that_does_not_fit_is_rejected_with_the_numbers(mesh: Mesh) -> None:
    large = client.ModelSpec({**MODEL, "hidden_size": 256, "intermediate_size": 768})
    specs = [client.DeploymentSpec("policy", "train", "fsdp", large, trainable=True)]
    async with tenant(mesh) as connection:
        with pytest.raises(ResourceError) as refused:
            await connection.submit_job("large", specs)
        error = refused.value.info
        assert error.code is Code.RESOURCE_EXHAUSTED
        assert int(error.details["needed_bytes"]) > int(error.details["budget_bytes"]) == 16 * 2**20
        assert (await connection.status("large")).state == "rejected"
    async with running_job(mesh, "small") as job:
        await job.deployment("policy").optim_step(STEP.adam)


async def test_backend_refuses_what_its_model_cannot_do_and_goes_on(mesh: Mesh) -> None:
    model = client.ModelSpec({**MODEL, "num_hidden_layers": 1})
    specs = [
        client.DeploymentSpec("policy", "train", "fsdp", model, trainable=True),
        client.DeploymentSpec("sampler", "rollout", "sampler", model),
    ]
    async with running_job(mesh, "backends", specs) as job:
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        strange = sampler.generate([client.Prompt([10_000])], client.SamplingParams(2))
        step = sampler.optim_step(STEP.adam)
        fine = sampler.generate([client.Prompt([1])], client.SamplingParams(2))
        with pytest.raises(CallerError) as token:
            await strange
        assert token.value.info.field.startswith("args.prompts[0]")
        with pytest.raises(CallerError) as kind:
            await step
        assert kind.value.info.field == "args.type"
        assert len((await fine).sequences) == 1
        bad = policy.forward_backward([client.Datum([1], [10_000], weights=[1.0])], "cross_entropy")
        with pytest.raises(CallerError) as target:
            await bad
        assert target.value.info.field.startswith("args.batch[0]")
        good = policy.forward_backward([client.Datum([1], [2], weights=[1.0])], "cross_entropy")
        assert (await good).metrics["num_tokens:sum"] == 1.0
        assert [d.incarnation for d in (await job.status()).deployments] == [1, 1]


async def test_checkpoint_that_is_torn_is_never_loaded(mesh: Mesh, wire: Wire) -> None:
    async with running_job(mesh, "torn") as job:
        await wire.send("torn.policy.1", operation(job, STEP))
        await wire.send("torn.policy.2", operation(job, SaveState("first")))
        assert (await wire.outcome("torn.policy.2")).outcome is Outcome.COMPLETED
        await wire.send("torn.policy.3", operation(job, SaveState("first"), "another"))
        exists = await wire.outcome("torn.policy.3")
        assert exists.error is not None
        assert exists.error.code is Code.ALREADY_EXISTS
        saved = mesh.run_dir / "checkpoints" / TENANT / "torn" / "policy" / "first"
        for file in saved.iterdir():
            file.write_bytes(b"torn")
        await wire.send("torn.policy.4", operation(job, LoadState("first")))
        await wire.send("torn.policy.5", operation(job, STEP))
        torn = await wire.outcome("torn.policy.4")
        assert torn.error is not None
        assert torn.error.code is Code.DATA_LOSS
        assert (await wire.outcome("torn.policy.5")).outcome is Outcome.COMPLETED
        # It was refused before anything was touched: nothing had to be rebuilt.
        assert [d.incarnation for d in (await job.status()).deployments] == [1, 1]


async def test_mutation_that_fails_half_way_is_left_out_of_the_rebuilt_state(
    mesh: Mesh, wire: Wire
) -> None:
    async with running_job(mesh, "half", [policy_spec()]) as job:
        await wire.send("half.policy.1", operation(job, STEP))
        await wire.send("half.policy.2", operation(job, exploding()))
        await wire.send("half.policy.3", operation(job, OptimStep(STEP.adam, allow_partial=True)))
        assert (await wire.outcome("half.policy.2")).outcome is Outcome.FAILED
        assert (await wire.outcome("half.policy.3")).outcome is Outcome.COMPLETED
        assert [d.incarnation for d in (await job.status()).deployments] == [2]


async def test_version_that_was_never_published_cannot_be_synced(mesh: Mesh, wire: Wire) -> None:
    async with running_job(mesh, "nothing") as job:
        await wire.send("nothing.policy.1", operation(job, STEP))
        assert (await wire.outcome("nothing.policy.1")).outcome is Outcome.COMPLETED
        await wire.send("nothing.sampler.1", operation(job, SyncWeights("policy", 1)))
        await wire.send("nothing.sampler.2", operation(job, GENERATE))
        # By the policy itself: its own node is the only one to ask.
        await wire.send("nothing.policy.2", operation(job, SyncWeights("policy", 1)))
        await wire.send("nothing.policy.3", operation(job, STEP))
        for name in ("sampler.1", "policy.2"):
            outcome = await wire.outcome(f"nothing.{name}")
            assert outcome.error is not None
            assert outcome.error.code is Code.NOT_FOUND
        for name in ("sampler.2", "policy.3"):
            assert (await wire.outcome(f"nothing.{name}")).outcome is Outcome.COMPLETED
