"""A controller's side of the mesh: real server, real router, and a far side that answers."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phaseloom import client as phaseloom
from phaseloom.client import (
    AdamParams,
    After,
    CallerError,
    Code,
    Datum,
    DeploymentSpec,
    Loss,
    Mesh,
    MeshJob,
    ModelSpec,
    PhaseloomError,
    Prompt,
    ResourceError,
    SamplingParams,
    connect,
    operations,
)
from phaseloom.client.operations import OperationPart, Outbox
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import CancelRequest, Checkpoint
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, decode, encode
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import (
    Generate,
    Operation,
    OptimStep,
    OptimStepResult,
    PublishWeights,
    SaveState,
)
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import connect as connect_to_nats
from phaseloom.common.transport.leases import session_lease_key
from phaseloom.common.transport.natsserver import EmbeddedServer
from phaseloom.router.core.limits import Limits
from phaseloom.router.shell import Router
from tests.support.leader import Leader

TENANT = "acme"
ADAM = AdamParams(learning_rate=0.125)
NOOP = ModelSpec({})
SPECS = [
    DeploymentSpec("policy", "train", "noop", NOOP, trainable=True),
    DeploymentSpec("sampler", "rollout", "noop", NOOP),
]


@pytest.fixture
async def leader(bus: Bus) -> AsyncIterator[Leader]:
    async with Router(bus).running([TENANT]), Leader(bus).running() as leader:
        yield leader


@pytest.fixture
def soon_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody acknowledges or answers is asked for again after half a second."""
    for name in ("_ACK_TIMEOUT_S", "_CHECK_EVERY_S", "_STALE_S"):
        monkeypatch.setattr(operations, name, 0.5)


def connected(
    server: EmbeddedServer, *, answer_timeout_s: float = 60.0
) -> AbstractAsyncContextManager[Mesh]:
    credentials = server.credentials
    return connect(
        credentials.url, TENANT, credentials.tenants[TENANT], answer_timeout_s=answer_timeout_s
    )


def datum(num_tokens: int) -> Datum:
    return Datum([1] * num_tokens, [2] * num_tokens, weights=[1.0] * num_tokens)


@pytest.mark.usefixtures("leader")
async def test_every_operation_gives_its_result_as_lists(nats_server: EmbeddedServer) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        gradients = policy.forward_backward([datum(3), datum(4)], Loss.CROSS_ENTROPY)
        stepped = policy.optim_step(ADAM)
        published = policy.publish_weights()
        synced = sampler.sync_weights(published)
        rollout = sampler.generate([Prompt([5, 6]), Prompt([7])], SamplingParams(4), 2)
        scored = sampler.forward([datum(2), datum(3)])
        saved = policy.save_state("first")
        loaded = policy.load_state("first")
        deleted = policy.delete_checkpoint("first")
        assert [gradients.seq, stepped.seq, published.seq, saved.seq] == [1, 2, 3, 4]
        assert published.key == "acme.sums.policy.3"
        assert (await gradients).metrics == {"loss:sum": 1.0, "num_tokens:sum": 7.0}
        assert (await stepped).metrics == {"grad_norm:mean": 0.125}
        assert (await published).version == 3
        assert (await synced).version == 3
        sequences = (await rollout).sequences
        assert [[s.tokens for s in samples] for samples in sequences] == [
            [[5, 6, 0], [5, 6, 1]],
            [[7, 0], [7, 1]],
        ]
        assert sequences[1][0].logprobs == [-0.25, -0.25]
        assert (await scored).logprobs == [[-0.5] * 2, [-0.5] * 3]
        assert (await saved).path == "sums/policy/first"
        await loaded
        assert (await deleted).num_bytes == 5
        await job.finish()
        assert (await job.status()).state == "done"


@pytest.mark.usefixtures("leader")
async def test_staleness_counts_the_versions_published_since(nats_server: EmbeddedServer) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        assert (sampler.version, policy.staleness(sampler.version)) == (0, 0)
        first = policy.publish_weights()
        assert policy.staleness(sampler.version) == 1
        sampler.sync_weights(first)
        assert (sampler.version, policy.staleness(sampler.version)) == (first.seq, 0)
        policy.optim_step(ADAM)
        policy.publish_weights()
        await policy.publish_weights()
        assert policy.staleness(sampler.version) == 2


@pytest.mark.usefixtures("leader")
async def test_reports_reach_trackers_even_if_one_fails(
    nats_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[tuple[int, dict[str, float]]] = []

    def fails(step: int, values: Mapping[str, float]) -> None:
        raise OSError("the disk is full")

    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        job.report({"reward": 0.1}, step=1)
        job.report_to(fails)
        job.report_to(lambda step, values: records.append((step, dict(values))))
        job.report({"reward": 1}, step=3)
        with pytest.raises(CallerError):
            job.report({"reward": float("nan")}, step=4)
        job.report({"kl_k3:sum": 0.5})
    assert records == [(3, {"reward": 1.0}), (4, {"kl_k3:sum": 0.5})]
    assert "a tracker failed at step 3 of sums" in caplog.text
    assert "the disk is full" in caplog.text


async def test_operations_are_named_by_the_after_of_others(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        published = policy.publish_weights()
        synced = sampler.sync_weights(published, after=[After("policy", 7)])
        stepped = policy.optim_step(ADAM, after=[synced])
        await asyncio.gather(synced, stepped)
    after = {str(entry.key): entry.after for entry in leader.arrived}
    assert after["acme.sums.policy.1"] == []
    assert after["acme.sums.sampler.1"] == [After("policy", 1), After("policy", 7)]
    assert after["acme.sums.policy.2"] == [After("sampler", 1)]


async def test_large_batch_is_split_by_samples_and_its_results_merged(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    """20 samples of 1.2 MB are three messages, of which later operations wait for each."""
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy = job.deployment("policy")
        gradients = policy.forward_backward([datum(100_000)] * 20, "cross_entropy")
        stepped = policy.optim_step(ADAM)
        waiting = job.deployment("sampler").forward([datum(1)], after=[gradients])
        assert len(gradients.refs) > 2
        assert stepped.seq == len(gradients.refs) + 1
        assert (await gradients).metrics["num_tokens:sum"] == 2_000_000.0
        await asyncio.gather(stepped, waiting)
    entry = next(e for e in leader.arrived if e.key.deployment == "sampler")
    assert entry.after == gradients.refs


@pytest.mark.usefixtures("leader")
async def test_generation_is_split_when_its_result_would_not_fit(
    nats_server: EmbeddedServer,
) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        prompts = [Prompt([i]) for i in range(6)]
        rollout = job.deployment("sampler").generate(prompts, SamplingParams(100_000), 3)
        assert len(rollout.refs) == 3
        sequences = (await rollout).sequences
    assert [samples[0].tokens for samples in sequences] == [[i, 0] for i in range(6)]


@pytest.mark.usefixtures("leader")
async def test_refused_operation_raises_the_routers_error(nats_server: EmbeddedServer) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy = job.deployment("policy")
        bad = policy.forward_backward([Datum([1, 2], [2, 3])], Loss.PPO)
        good = policy.optim_step(ADAM)
        with pytest.raises(CallerError) as refused:
            await bad
        assert refused.value.info.field == "args.batch[0].logprobs"
        await good


@pytest.mark.usefixtures("leader")
async def test_failure_that_nobody_awaits_is_logged(
    nats_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A program whose every gradient is refused would otherwise look as if it trained."""
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        policy.forward_backward([Datum([1, 2], [2, 3])], Loss.PPO)
        awaited = policy.forward_backward([Datum([1, 2], [2, 3])], Loss.PPO)
        with pytest.raises(CallerError):
            await awaited
        await policy.optim_step(ADAM)
    gc.collect()
    (said,) = [r.getMessage() for r in caplog.records if "nobody awaited" in r.getMessage()]
    assert said.startswith("acme.sums.policy.1 (forward_backward) failed")
    assert "args.batch[0].logprobs" in said


@pytest.mark.usefixtures("leader")
async def test_wrong_arguments_raise_at_the_call_and_take_no_seq(
    nats_server: EmbeddedServer,
) -> None:
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        with pytest.raises(CallerError) as too_large:
            policy.forward([datum(1), datum(1_000_000)])
        assert too_large.value.info.field == "batch[1]"
        with pytest.raises(CallerError):
            policy.forward([Datum([2**40], [1])])
        with pytest.raises(CallerError, match="unknown loss 'grpo'") as unknown:
            policy.forward_backward([datum(1)], "grpo")
        assert "cross_entropy" in (unknown.value.info.remedy or "")
        assert policy.optim_step(ADAM).seq == 1


@pytest.mark.usefixtures("soon_asked")
async def test_operations_survive_a_restart_of_the_server(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    """Acks and completions are lost with the connection; nothing is lost or doubled with them."""
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        first = [policy.optim_step(ADAM) for _ in range(100)]
        await first[20]
        await nats_server.kill()
        second = [policy.optim_step(ADAM) for _ in range(20)]
        await nats_server.start()
        async with asyncio.timeout(60):
            for handle in [*first, *second]:
                await handle
    assert sorted({e.key.seq or 0 for e in leader.arrived}) == list(range(1, 121))


@pytest.mark.usefixtures("leader")
async def test_missed_completion_is_asked_for(nats_server: EmbeddedServer, bus: Bus) -> None:
    async with deaf_outbox(nats_server, bus) as (outbox, parts), asyncio.timeout(60):
        while not all(part.outcome.done() for part in parts):
            outbox.reconnected()
            await asyncio.wait([part.outcome for part in parts], timeout=0.1)
    assert all(isinstance(part.outcome.result(), OptimStepResult) for part in parts)


@pytest.mark.usefixtures("leader")
async def test_a_session_that_ends_learns_how_its_operations_ended(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """They have ended, and nobody has told it yet."""
    async with deaf_outbox(nats_server, bus) as (outbox, parts), asyncio.timeout(60):
        while not all(part.stored.is_set() for part in parts):
            await asyncio.wait([part.outcome for part in parts], timeout=0.1)
        await outbox.settle()
        outbox.end(ResourceError("over"))
    assert all(isinstance(part.outcome.result(), OptimStepResult) for part in parts)


async def test_operation_that_ended_before_it_could_be_cancelled_gives_its_result(
    nats_server: EmbeddedServer, leader: Leader, bus: Bus
) -> None:
    """The scheduler knows that it has ended before the controller has heard how."""
    async with deaf_outbox(nats_server, bus) as (outbox, parts), asyncio.timeout(60):
        while leader.num_completed < len(parts):
            await asyncio.sleep(0.01)
        key = parts[0].key
        request = CancelRequest(key.job, key.deployment, key.slot)
        assert await outbox.call_when_stored("operation.cancel", parts[0], request) is None
        assert isinstance(parts[0].outcome.result(), OptimStepResult)


@asynccontextmanager
async def deaf_outbox(
    nats_server: EmbeddedServer, bus: Bus
) -> AsyncIterator[tuple[Outbox, list[OperationPart]]]:
    """With three operations. Nobody subscribed for it: it hears of nothing by itself."""
    credentials = nats_server.credentials
    client = await connect_to_nats(
        credentials.url,
        "deaf",
        TENANT,
        credentials.tenants[TENANT],
        inbox_prefix=f"_INBOX_{TENANT}",
    )
    await bus.keys.put(streams.Bucket.SESSIONS, "acme.sums", b"1")
    parts = []
    async with asyncio.TaskGroup() as group:
        outbox = Outbox(
            client, JobKey(TENANT, "sums"), lambda work: _ignore(group.create_task(work)), 10.0
        )
        for seq in (1, 2, 3):
            key = OperationKey(TENANT, "sums", "policy", str(seq))
            operation = Operation(f"id{seq}", 1, OptimStep(ADAM))
            parts.append(OperationPart(key, operation.id, "optim_step", encode(operation)))
            outbox.submit(parts[-1])
        watch = group.create_task(outbox.watch())
        yield outbox, parts
        outbox.end(ResourceError("done"))
        await watch
    await client.close()


def _ignore(_: object) -> None:
    """`create_task` as the outbox wants it."""


async def test_seq_that_another_session_took_is_aborted(
    nats_server: EmbeddedServer, leader: Leader, bus: Bus
) -> None:
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        taken = OperationKey(TENANT, "sums", "policy", "1")
        await bus.publish(streams.op_subject(taken), Operation("theirs", 9, PublishWeights()))
        mine = policy.optim_step(ADAM)
        with pytest.raises(ResourceError) as aborted:
            await mine
        assert aborted.value.info.code is Code.ABORTED
        with pytest.raises(ResourceError):
            policy.optim_step(ADAM)


async def test_session_ends_when_another_attaches(nats_server: EmbeddedServer, bus: Bus) -> None:
    router = Router(bus, session_ttl_s=3600.0)  # no heartbeat tells of it before
    async with router.running([TENANT]), Leader(bus).running(), connected(nats_server) as mesh:
        old = await mesh.submit_job("sums", SPECS)
        await old.deployment("policy").optim_step(ADAM)
        new = await mesh.attach("sums")
        assert new.session == old.session + 1
        late = old.deployment("policy").optim_step(ADAM)
        with pytest.raises(ResourceError) as aborted:
            await late
        assert aborted.value.info.code is Code.ABORTED
        again = await mesh.attach("sums")
        stepped = again.deployment("policy").optim_step(ADAM)
        assert stepped.seq == 3
        await stepped


async def test_session_ends_by_itself_when_another_attaches(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """Its heartbeat is refused: what is open ends, although nothing more was submitted."""
    router = Router(bus, session_ttl_s=1.0)
    async with router.running([TENANT]), Leader(bus).running() as leader:
        leader.hold()
        async with connected(nats_server) as first, connected(nats_server) as second:
            old = await first.submit_job("sums", SPECS)
            open_one = old.deployment("policy").optim_step(ADAM)
            await second.attach("sums")
            async with asyncio.timeout(60):
                with pytest.raises(ResourceError) as over:
                    await open_one
            assert over.value.info.code is Code.ABORTED
            assert over.value.info.field == "session"
            with pytest.raises(ResourceError):
                old.deployment("policy").optim_step(ADAM)
        leader.go.set()


@pytest.mark.usefixtures("leader")
async def test_controller_that_is_attached_is_known_to_live(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    lease = session_lease_key(JobKey(TENANT, "sums"))
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        async with asyncio.timeout(60), aclosing(bus.keys.watch(Bucket.LEASES, lease)) as changes:
            change = await anext(changes)
        assert change.stored is not None
        assert int(change.stored.payload) == job.session


@pytest.mark.usefixtures("leader")
async def test_attach_gives_the_jobs_last_checkpoint(nats_server: EmbeddedServer, bus: Bus) -> None:
    checkpoint = Checkpoint("policy", 4, {"policy": "s4", "sampler": "s4"}, b"step 4")
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        assert job.checkpoint is None
        await bus.keys.put(Bucket.CHECKPOINTS, "acme.sums", encode(checkpoint))
        assert (await mesh.attach("sums")).checkpoint == checkpoint


async def test_options_of_the_calls_reach_the_operation(
    nats_server: EmbeddedServer, leader: Leader, bus: Bus
) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        sampling = SamplingParams(4, stop_strings=["."], ignore_eos=True)
        handles = [
            policy.optim_step(ADAM, allow_partial=True, timeout_s=60.0),
            policy.save_state("s2", controller_blob=b"me", checkpoints={"sampler": "s1"}),
            sampler.generate([Prompt([1])], sampling, prompt_logprobs=True),
        ]
        for handle in handles:
            await handle
    stored = [await _stored(bus, key) for key in ("policy.1", "policy.2", "sampler.1")]
    assert [operation.timeout_s for operation in stored] == [60.0, 0.0, 0.0]
    assert stored[0].args == OptimStep(ADAM, allow_partial=True)
    assert stored[1].args == SaveState("s2", b"me", {"sampler": "s1"})
    assert isinstance(stored[2].args, Generate)
    assert stored[2].args.prompt_logprobs
    assert stored[2].args.sampling == sampling
    assert {entry.timeout_s for entry in leader.arrived} == {60.0, 0.0}


async def _stored(bus: Bus, name: str) -> Operation:
    stored = await bus.stored.get(f"OPS_{TENANT}", f"{streams.PREFIX}.op.{TENANT}.sums.{name}")
    assert stored is not None
    operation: Operation = decode(stored.payload, Operation)
    return operation


async def test_operation_is_cancelled_and_explained(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        policy = job.deployment("policy")
        leader.hold()
        unwanted = policy.optim_step(ADAM)
        explanation = await job.explain(unwanted)
        assert (str(explanation.key), explanation.waits_for) == (unwanted.key, ["the test"])
        await unwanted.cancel()
        assert leader.cancelled == {unwanted.key}
        leader.go.set()
        with pytest.raises(ResourceError) as cancelled:
            await unwanted
        assert cancelled.value.info.code is Code.ABORTED
        await policy.optim_step(ADAM)
        await unwanted.cancel()  # it has ended: there is nothing to do
        assert (await job.explain(unwanted)).state == "failed"


async def test_operation_that_exceeds_a_bound_tells_when_to_try_again(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    router = Router(bus, {TENANT: Limits(max_operations=1)})
    async with router.running([TENANT]), Leader(bus).running(), connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        handles = [policy.optim_step(ADAM), policy.optim_step(ADAM)]
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        (refused,) = [o for o in outcomes if isinstance(o, PhaseloomError)]
        assert refused.info.code is Code.RESOURCE_EXHAUSTED
        assert refused.retry_after_s == 1.0


# --- phases and hooks ----------------------------------------------------------------------------


async def test_phases_are_declared_once_however_they_overlap(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)

        @phaseloom.phase("rollout")
        async def rollout(number: int) -> int:
            return number

        @job.phase("train")
        async def train() -> None:
            async with job.phase("train"):
                await job.deployment("policy").optim_step(ADAM)

        async with job.phase("rollout"):
            assert list(await asyncio.gather(rollout(1), rollout(2))) == [1, 2]
        await train()
        sync = phaseloom.phase("sync")
        await sync.begin()
        await sync.end()
        with pytest.raises(CallerError):
            await sync.end()
    assert [(p.pool, p.is_open) for p in leader.phases] == [
        ("rollout", True),
        ("rollout", False),
        ("train", True),
        ("train", False),
        ("sync", True),
        ("sync", False),
    ]
    assert {(p.job, p.session) for p in leader.phases} == {("sums", 1)}


async def test_phase_is_of_the_job_that_the_function_is_given(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    @phaseloom.phase("rollout")
    async def rollout(job: MeshJob, *, fails: bool) -> None:
        if fails:
            raise KeyError("mine")

    async with connected(nats_server) as mesh:
        first = await mesh.submit_job("first", SPECS)
        await mesh.submit_job("second", SPECS)
        await rollout(first, fails=False)
        await rollout(job=first, fails=False)
        with pytest.raises(KeyError, match="mine"):
            await rollout(first, fails=True)
    assert [p.job for p in leader.phases] == ["first"] * 6
    assert [p.is_open for p in leader.phases] == [True, False] * 3


async def test_phase_without_a_job_is_refused() -> None:
    with pytest.raises(CallerError) as refused:
        async with phaseloom.phase("rollout"):
            pass
    assert refused.value.info.remedy


async def test_runtime_hooks_are_told_of_progress_outcomes_and_phases(
    nats_server: EmbeddedServer, leader: Leader, bus: Bus
) -> None:
    told: list[phaseloom.RuntimeEvent] = []
    of_second: list[phaseloom.RuntimeEvent] = []
    progressed = asyncio.Event()

    @phaseloom.runtime_hook
    def broken(event: phaseloom.RuntimeEvent) -> None:
        raise KeyError("the controller's own")

    @phaseloom.runtime_hook
    def watch(event: phaseloom.RuntimeEvent) -> None:
        told.append(event)
        if isinstance(event, phaseloom.Progress):
            progressed.set()

    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        second = await mesh.submit_job("second", SPECS)
        second.runtime_hook(of_second.append)
        leader.hold()
        handle = job.deployment("policy").optim_step(ADAM)
        await job.explain(handle)
        key = OperationKey(TENANT, "sums", "policy", "1")
        for payload in (b"garbage", encode(phaseloom.Progress(key, 5, 9))):
            await bus.client.publish(
                streams.progress_subject(key), payload, headers={CONTENT_TYPE: MSGPACK}
            )
        async with asyncio.timeout(60):
            await progressed.wait()
        leader.go.set()
        await handle
        bad = job.deployment("policy").forward([])
        with pytest.raises(CallerError):
            await bad
        async with job.phase("train"):
            pass
        await second.deployment("policy").optim_step(ADAM)
    job_key = JobKey(TENANT, "sums")
    mine = [e for e in told if "second" not in repr(e)]
    assert mine[:2] == [
        phaseloom.Progress(key, 5, 9),
        phaseloom.OperationEnded(key, "optim_step", None),
    ]
    assert isinstance(mine[2], phaseloom.OperationEnded)
    assert isinstance(mine[2].error, CallerError)
    assert mine[3:] == [
        phaseloom.PhaseBegan(job_key, "train"),
        phaseloom.PhaseEnded(job_key, "train"),
    ]
    assert [e.key.job for e in of_second if isinstance(e, phaseloom.OperationEnded)] == ["second"]


@pytest.mark.usefixtures("soon_asked")
async def test_open_operations_fail_when_nobody_answers(
    nats_server: EmbeddedServer, bus: Bus
) -> None:
    """Stored, but every router is gone: told after the timeout, not never."""
    async with connected(nats_server, answer_timeout_s=1.0) as mesh:
        async with Router(bus).running([TENANT]), Leader(bus).running():
            policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
            await policy.optim_step(ADAM)
        lost = policy.optim_step(ADAM)
        async with asyncio.timeout(60):
            with pytest.raises(ResourceError) as error:
                await lost
        assert error.value.info.code is Code.UNAVAILABLE


async def test_operations_fail_when_the_server_is_gone(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server, answer_timeout_s=1.0) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        leader.hold()
        stored = policy.optim_step(ADAM)
        await nats_server.kill()
        unsent = policy.optim_step(ADAM)
        async with asyncio.timeout(60):
            for handle in (stored, unsent):
                with pytest.raises(ResourceError):
                    await handle
    await nats_server.start()
    async with asyncio.timeout(60):
        while not leader.bus.client.is_connected:
            await asyncio.sleep(0.01)
    leader.go.set()


async def test_leaving_the_block_ends_what_is_open(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    leader.hold()
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        handle = policy.optim_step(ADAM)
    with pytest.raises(ResourceError) as aborted:
        await handle
    assert aborted.value.info.code is Code.ABORTED
    assert not [task for task in asyncio.all_tasks() if "phaseloom/client" in repr(task)]
    leader.go.set()


@pytest.mark.usefixtures("leader")
async def test_controllers_own_error_comes_out_as_it_is(nats_server: EmbeddedServer) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with connected(nats_server):
            raise KeyError("mine")


async def test_giving_up_waiting_cancels_nothing(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        leader.hold()
        handle = policy.optim_step(ADAM)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await handle
        leader.go.set()
        assert (await handle).metrics
        assert (await handle).metrics  # and a second time


@pytest.mark.usefixtures("leader")
async def test_job_that_exists_is_not_submitted_again(nats_server: EmbeddedServer) -> None:
    async with connected(nats_server) as mesh:
        job: MeshJob = await mesh.submit_job("sums", SPECS)
        assert job.session == 1
        with pytest.raises(PhaseloomError) as refused:
            await mesh.submit_job("sums", SPECS)
        assert refused.value.info.code is Code.ALREADY_EXISTS
        with pytest.raises(CallerError):
            job.deployment("critic")


async def test_connect_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "TENANT", "PASSWORD"):
        monkeypatch.delenv(f"PHASELOOM_{name}", raising=False)
    with pytest.raises(CallerError) as missing:
        async with connect():
            pass
    assert (missing.value.info.remedy or "").startswith("pass url= or set PHASELOOM_URL")


@pytest.mark.parametrize("is_latest", [True, False])
async def test_connect_finds_the_mesh_of_its_directory(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_latest: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "TENANT", "PASSWORD"):
        monkeypatch.delenv(f"PHASELOOM_{name}", raising=False)
    run_dir = tmp_path / "runs" / "20260101-000000"
    run_dir.mkdir(parents=True)
    (run_dir / "mesh.json").touch()
    known = nats_server.credentials
    several = msgspec.structs.replace(known, tenants=known.tenants | {"zeta": "word"})
    (run_dir / "credentials.json").write_bytes(msgspec.json.encode(several))
    if is_latest:
        (tmp_path / "runs/latest").symlink_to(run_dir.name)
    tenants = ", ".join(sorted(several.tenants))
    with pytest.raises(CallerError, match=f"{len(several.tenants)} tenants") as refused:
        async with connect():
            pass
    assert refused.value.info.field == "PHASELOOM_TENANT"
    assert tenants in (refused.value.info.remedy or "")
    monkeypatch.setenv("PHASELOOM_TENANT", TENANT)
    async with connect():
        pass
    with pytest.raises(CallerError, match="no tenant 'nobody'"):
        async with connect(tenant="nobody"):
            pass
    only = {TENANT: known.tenants[TENANT]}
    alone = msgspec.structs.replace(known, tenants=only)
    (run_dir / "credentials.json").write_bytes(msgspec.json.encode(alone))
    monkeypatch.delenv("PHASELOOM_TENANT")
    async with connect():
        pass
    with pytest.raises(CallerError, match="PHASELOOM_PASSWORD is missing"):
        async with connect(url=known.url, tenant=TENANT):
            pass


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("URL", "http://127.0.0.1:4222", "unsupported scheme http"),
        ("URL", "nats://127.0.0.1:port", "Port"),
        ("URL", "nats://", "it has no host"),
        ("URL", "nats:/127.0.0.1:4222", "it has a path|Port"),
        ("URL", "", "PHASELOOM_URL is missing or empty"),
        ("TENANT", "", "PHASELOOM_TENANT is missing or empty"),
        ("TENANT", "a.b", "'a.b' is not a valid name"),
    ],
)
async def test_connect_names_the_variable_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    sound = {"URL": "nats://127.0.0.1:1", "TENANT": TENANT, "PASSWORD": "word"}
    for name, text in (sound | {variable: value}).items():
        monkeypatch.setenv(f"PHASELOOM_{name}", text)
    with pytest.raises(CallerError, match=why) as refused:
        async with connect():
            pass
    assert refused.value.info.field == f"PHASELOOM_{variable}"


@pytest.mark.usefixtures("leader")
async def test_wrong_types_are_refused_where_they_are_passed(nats_server: EmbeddedServer) -> None:
    """Nothing of them gets a `seq`: the next operation is the first."""
    async with connected(nats_server) as mesh:
        policy = (await mesh.submit_job("sums", SPECS)).deployment("policy")
        wrong: Any = {"learning_rate": 0.125}
        with pytest.raises(CallerError, match="expected AdamParams, got dict"):
            policy.optim_step(wrong)
        with pytest.raises(CallerError) as refused:
            policy.optim_step(ADAM, after=[wrong])
        assert refused.value.info.field == "after[0]"
        with pytest.raises(CallerError) as refused:
            await mesh.submit_job("more", [wrong])
        assert refused.value.info.field == "deployments[0]"
        assert policy.optim_step(ADAM).seq == 1


@pytest.mark.usefixtures("leader")
async def test_operation_of_another_job_or_kind_is_refused(nats_server: EmbeddedServer) -> None:
    """By its name and number it was taken for one of this job, which might never come."""
    async with connected(nats_server) as mesh:
        mine = await mesh.submit_job("sums", SPECS)
        others = (await mesh.submit_job("others", SPECS)).deployment("policy")
        policy, sampler = mine.deployment("policy"), mine.deployment("sampler")
        published, stepped = others.publish_weights(), others.optim_step(ADAM)
        own: Any = policy.optim_step(ADAM)
        for field, call in (
            ("after[1]", lambda: policy.optim_step(ADAM, after=[own, stepped])),
            ("published", lambda: sampler.sync_weights(published)),
            ("published", lambda: sampler.sync_weights(own)),
            ("weights", lambda: sampler.generate([Prompt([1])], SamplingParams(4), weights=own)),
        ):
            with pytest.raises(CallerError) as refused:
                call()
            assert refused.value.info.field == field
            assert refused.value.info.remedy
        assert policy.next_seq == 2
        assert sampler.next_seq == 1


# --- how a program leaves its job -----------------------------------------------------------------


@pytest.mark.parametrize("way", ["block", "finally"])
async def test_error_of_the_program_is_shown_although_the_mesh_has_stopped(
    way: str, nats_server: EmbeddedServer, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(nats_server, answer_timeout_s=3.0) as mesh:
        async with Router(bus).running([TENANT]), Leader(bus).running():
            job = await mesh.submit_job("sums", SPECS)
        with pytest.raises(ZeroDivisionError):
            await _fail(job, way)
    texts = [record.getMessage() for record in caplog.records]
    assert any("the mesh has not answered" in text for text in texts)
    assert any("job sums was not ended" in text for text in texts)


async def _fail(job: MeshJob, way: str) -> None:
    if way == "block":
        async with job:
            raise ZeroDivisionError
    try:
        raise ZeroDivisionError
    finally:
        await job.finish(failed=True)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
async def test_silent_server_is_reported_within_seconds_and_so_is_its_return(
    stop: signal.Signals, nats_server: EmbeddedServer, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async with Router(bus).running([TENANT]), Leader(bus).running(), connected(nats_server) as mesh:
        await mesh.submit_job("sums", SPECS)
        if stop is signal.SIGKILL:
            await nats_server.kill()
        else:
            os.kill(nats_server.pid, stop)
        async with asyncio.timeout(5):
            while "the mesh has not answered" not in caplog.text:
                await asyncio.sleep(0.02)
        if stop is signal.SIGKILL:
            await nats_server.start()
        else:
            os.kill(nats_server.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while "the mesh answers again" not in caplog.text:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        (None, "done"),
        (SystemExit(0), "done"),
        (SystemExit(1), "failed"),
        (ZeroDivisionError(), "failed"),
        (KeyboardInterrupt(), "active"),
        (asyncio.CancelledError(), "active"),
    ],
)
async def test_way_out_of_the_block_decides_the_end_of_the_job(
    cause: BaseException | None, state: str, nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server) as mesh:
        job = await mesh.submit_job("sums", SPECS)
        with suppress(BaseException):
            async with job:
                if cause is not None:
                    raise cause
        assert leader.jobs["sums"].state == state


async def test_block_of_a_superseded_session_leaves_the_job_to_the_newer_one(
    nats_server: EmbeddedServer, leader: Leader
) -> None:
    async with connected(nats_server) as mesh:
        old = await mesh.submit_job("sums", SPECS)
        await mesh.attach("sums")
        with pytest.raises(ResourceError):
            async with old:
                await old.deployment("policy").optim_step(ADAM)
        assert leader.jobs["sums"].state == "active"
