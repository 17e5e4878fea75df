"""Processes that die in the middle of an operation, and operations that fail in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import Command, OpenActivation, Permit, StartWpg, StopWpg
from phaseloom.common.contract.errors import Code, ErrorInfo, PhaseloomError, ResourceError
from phaseloom.common.contract.events import Event, WpgLost, WpgStarted
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.operations import (
    AdamParams,
    Args,
    Completion,
    Loss,
    Outcome,
    SaveState,
    SaveStateResult,
)
from phaseloom.common.contract.specs import Layout
from phaseloom.common.transport.bus import Bus
from tests.support.jobs import NOOP, kill_rank, rank_pid, running_mesh, tenant
from tests.support.node import (
    NODE,
    STEP,
    TestNode,
    exploding,
    lesson,
    model_spec,
    policy_spec,
    running_node,
)
from tests.support.processes import until_gone, without_torch
from tests.support.tinymodel import VOCAB
from tests.support.warm import cold

TRAINING: list[Args] = [lesson(0), STEP, lesson(1), STEP]


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def train(
    node: TestNode, deployment: DeploymentKey, seqs: range, incarnation: int = 1
) -> None:
    for seq in seqs:
        done = await node.run(deployment, seq, TRAINING[seq - 1], seq - 1, incarnation=incarnation)
        assert done.outcome is Outcome.COMPLETED, done


async def replay(node: TestNode, deployment: DeploymentKey, seqs: range, incarnation: int) -> None:
    for seq in seqs:
        key = await node.put_again(deployment, seq)
        await node.permit(key, TRAINING[seq - 1], seq - 1, incarnation, replay=True)
        finished = await node.finished(key, incarnation)
        assert (finished.outcome, finished.replay, finished.dirty) == (
            Outcome.COMPLETED,
            True,
            False,
        )


async def sha(node: TestNode, deployment: DeploymentKey, incarnation: int = 1) -> str:
    done = await node.run(deployment, "rsha", SaveState("sha"), incarnation=incarnation)
    assert isinstance(done.result, SaveStateResult), done
    return done.result.weights_sha256


async def undisturbed(node: TestNode) -> str:
    calm, _ = await node.start_wpg(policy_spec(), job="calm")
    await train(node, calm, range(1, 5))
    return await sha(node, calm)


async def test_rank_killed_in_an_operation_leaves_it_to_the_next_life(node: TestNode) -> None:
    expected = await undisturbed(node)
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, range(1, 3))
    (pid,) = node.rank_pids(policy)
    os.kill(pid, signal.SIGSTOP)
    key = await node.put(policy, 3, TRAINING[2])
    await node.permit(key, TRAINING[2], 2)
    os.kill(pid, signal.SIGKILL)
    assert (await node.lost(policy)).error.code is Code.UNAVAILABLE
    assert not node.all_finished(key)

    await node.start_wpg(policy_spec(), incarnation=2)
    await replay(node, policy, range(1, 3), 2)
    await node.permit(key, TRAINING[2], 2, 2)
    assert (await node.outcome(key)).outcome is Outcome.COMPLETED
    await train(node, policy, range(4, 5), 2)
    assert await sha(node, policy, 2) == expected


async def test_agent_killed_in_an_operation_takes_its_ranks_and_starts_over(
    node: TestNode,
) -> None:
    expected = await undisturbed(node)
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, range(1, 3))
    (pid,) = node.rank_pids(policy)
    os.kill(pid, signal.SIGSTOP)
    key = await node.put(policy, 3, TRAINING[2])
    await node.permit(key, TRAINING[2], 2)
    old_revision = node.revision
    await node.kill("worker")
    os.kill(pid, signal.SIGCONT)
    await until_gone([pid], 60)
    await node.start("worker")
    assert node.revision > old_revision
    # The permit is delivered again, and dropped: it is of the old life.
    await node.start_wpg(policy_spec(), incarnation=2)
    await replay(node, policy, range(1, 3), 2)
    # The rank may have done it just before it saw that its agent was gone.
    await node.permit(key, TRAINING[2], 2, 2, replay=True)
    await node.finished(key, incarnation=2)
    await train(node, policy, range(4, 5), 2)
    assert await sha(node, policy, 2) == expected


async def test_life_that_is_to_end_before_it_has_begun_waits_for_no_other_node(
    node: TestNode,
) -> None:
    """Its other part, where the ranks would meet, could not start: it never will be up."""
    key, spec = DeploymentKey("acme", "stillborn", "policy"), policy_spec(layout=Layout(dp=2))
    with node.frozen("statemgr"):
        await node.command(
            StartWpg,
            deployment=key,
            incarnation=1,
            spec=replace(spec, num_nodes=2),
            devices=[0],
            seal_seq=0,
            nodes=[NodeId("nowhere"), NODE],
            rank_offset=1,
        )
        await node.command(StopWpg, deployment=key, incarnation=1, forget=False)
    async with asyncio.timeout(60):  # half of what a start may take
        lost = await node.lost(key)
    assert lost.error.message == "stopped by the scheduler"
    assert not any(isinstance(e, WpgStarted) and e.deployment == key for e in node.log.events)
    # The next life is not taken for it.
    await node.start_wpg(policy_spec(), job="next")


async def test_operation_that_fails_half_way_is_left_out_when_its_life_is_rebuilt(
    node: TestNode,
) -> None:
    expected = await undisturbed(node)
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, range(1, 4))
    key = await node.put(policy, 9, exploding())
    await node.permit(key, exploding(), 3)
    finished = await node.finished(key)
    assert (finished.outcome, finished.dirty) == (Outcome.FAILED, True)

    (pid,) = node.rank_pids(policy)
    await node.start_wpg(policy_spec(), incarnation=2)
    assert (await node.lost(policy)).error.code is Code.ABORTED
    await until_gone([pid], 60)
    await replay(node, policy, range(1, 4), 2)
    await train(node, policy, range(4, 5), 2)
    assert await sha(node, policy, 2) == expected


async def test_outcome_that_is_stored_already_stands_and_nothing_runs(node: TestNode) -> None:
    """As where the scheduler has failed an operation that killed too many lives."""
    policy, _ = await node.start_wpg(policy_spec())
    before = await sha(node, policy)
    key = await node.put(policy, 1, lesson())
    given_up = ErrorInfo(Code.ABORTED, "it was given up")
    await node.bus.publish(
        streams.done_subject(key), Completion(f"id-{key}", Outcome.FAILED, error=given_up)
    )
    await node.permit(key, lesson())
    finished = await node.finished(key)
    assert (finished.outcome, finished.error, finished.duration_s) == (
        Outcome.FAILED,
        given_up,
        0.0,
    )
    assert (await node.run(policy, 2, STEP)).outcome is Outcome.COMPLETED
    await node.kill_rank(policy)
    await node.lost(policy)
    await node.start_wpg(policy_spec(), incarnation=2)
    # Without gradients a step changes no weights.
    key = await node.put_again(policy, 2)
    await node.permit(key, STEP, 0, 2, replay=True)
    await node.finished(key, 2)
    done = await node.run(policy, "rafter", SaveState("after"), incarnation=2)
    assert isinstance(done.result, SaveStateResult)
    assert done.result.weights_sha256 == before


async def test_bus_that_restarts_in_an_operation_costs_no_life() -> None:
    """The leader looks its payload up while there is no server, and goes on when there is."""
    async with running_node(lease_ttl_s=60) as node:
        policy, _ = await node.start_wpg(policy_spec())
        (pid,) = node.rank_pids(policy)
        os.kill(pid, signal.SIGSTOP)
        key = await node.put(policy, 1, lesson())
        await node.permit(key, lesson())
        await node.server.kill()
        os.kill(pid, signal.SIGCONT)
        await node.server.start()
        assert (await node.outcome(key)).outcome is Outcome.COMPLETED
        await node.log.caught_up()
        assert node.lives_lost(policy) == []
        assert node.rank_pids(policy) == [pid]


async def test_state_manager_that_restarts_costs_no_life(node: TestNode) -> None:
    """The agent keeps its memory; what is resident stays so, what is not comes back."""
    expected = await undisturbed(node)
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, range(1, 3))
    pids = node.rank_pids(policy)
    await node.kill("statemgr")
    key = await node.put(policy, 3, TRAINING[2])
    await node.permit(key, TRAINING[2], 2)
    assert (await node.outcome(key)).outcome is Outcome.COMPLETED
    # A command that needs it waits until it is back.
    calm = DeploymentKey(policy.tenant, policy.job.replace("job", "calm"), "policy")
    await node.command(OpenActivation, deployment=calm, incarnation=1, epoch=50, displaces=[policy])
    await node.start("statemgr")
    opened = await node.opened(calm, 50)
    assert opened.displaced == [policy]
    assert opened.bytes_out > 0
    await node.open(policy, 1, epoch=51)
    key = await node.put(policy, 4, TRAINING[3])
    await node.permit(key, TRAINING[3], 3, epoch=51)
    assert (await node.outcome(key)).outcome is Outcome.COMPLETED
    key = await node.put(policy, "rsha", SaveState("sha"))
    await node.permit(key, SaveState("sha"), epoch=51)
    result = (await node.outcome(key)).result
    assert isinstance(result, SaveStateResult)
    assert result.weights_sha256 == expected
    assert node.rank_pids(policy) == pids
    await node.log.caught_up()
    assert node.lives_lost(policy) == []


def slow() -> list[client.Datum]:
    """Seconds of work, so that a kill that follows its permit meets it."""
    tokens = [i % VOCAB for i in range(60)]
    datum = client.Datum(tokens[:-1], tokens[1:], weights=[1.0] * 59)
    return [datum] * 8000


async def test_operation_that_kills_every_life_is_given_up_and_the_job_goes_on(
    short_dir: Path,
) -> None:
    specs = [client.DeploymentSpec("policy", "train", "fsdp", model_spec(), trainable=True)]
    killed: list[int] = []
    config = MeshConfig(seal_every=0, max_losses=1)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        bus = await Bus.open(mesh.credentials.bus, "killer")

        async def kill(message: Msg) -> None:
            command: Command = decode(message.data, Command)
            if isinstance(command, Permit) and command.operation.seq == 3:
                killed.append(rank_pid(mesh, "deadly.policy"))
                os.kill(killed[-1], signal.SIGKILL)

        await bus.client.subscribe(f"{streams.PREFIX}.permit.*", cb=kill)
        await bus.client.flush()
        job = await connection.submit_job("deadly", specs)
        policy = job.deployment("policy")
        adam = AdamParams(1e-2)
        first = lesson()
        await policy.forward_backward(first.batch, first.loss)
        await policy.optim_step(adam)
        with pytest.raises(ResourceError):
            await policy.forward_backward(slow(), Loss.CROSS_ENTROPY)
        assert len(killed) == 2
        await policy.optim_step(adam, allow_partial=True)
        await log.caught_up()
        assert [life.incarnation for life in log.starts("deadly.policy")] == [1, 2, 3]
        await bus.close()


def is_of_life(kind: type[WpgStarted | WpgLost], incarnation: int, event: Event) -> bool:
    return isinstance(event, kind) and event.incarnation == incarnation


async def test_rank_that_dies_again_and_again_while_idle_fails_its_job_and_the_user_is_told(
    short_dir: Path,
) -> None:
    """No operation is to blame: it was started again without end."""
    specs = [client.DeploymentSpec("policy", "train", "noop", client.ModelSpec({}), trainable=True)]
    config = MeshConfig(seal_every=0, max_losses=1)
    async with running_mesh(config, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("frail", specs)
        for incarnation in (1, 2):
            await log.until(partial(is_of_life, WpgStarted, incarnation))
            kill_rank(mesh, "frail.policy")
            await log.until(partial(is_of_life, WpgLost, incarnation))
        with pytest.raises(PhaseloomError, match=r"has ended|died 2 times"):
            await job.deployment("policy").optim_step(AdamParams(1e-2))
        status = await job.status()
        assert status.state == "failed"
        assert status.error is not None
        assert "policy died 2 times without completing an operation" in status.error.message
        assert "worker's log" in status.error.remedy
        await log.caught_up()
        assert len(log.starts("frail.policy")) == 2


async def test_ranks_do_not_inherit_what_their_agent_proves_itself_by() -> None:
    with cold(), without_torch():
        async with running_node() as node:
            policy, _ = await node.start_wpg(NOOP[0])
            (rank,) = node.rank_pids(policy)
            status = await asyncio.to_thread(Path(f"/proc/{rank}/status").read_text)
            (server,) = [line.split()[1] for line in status.splitlines() if line[:5] == "PPid:"]
            for pid in (str(rank), server):
                inherited = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
                assert b"PHASELOOM_WORKER_NODE=" in inherited
                assert b"SECRET" not in inherited
