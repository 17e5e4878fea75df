"""What a deployment's state is after refusals, checkpoints and losses, on a real node."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from phaseloom.common.contract.api import Checkpoint
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import StopWpg
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import (
    Args,
    Completion,
    DeleteCheckpoint,
    DeleteCheckpointResult,
    Forward,
    LoadState,
    LoadStateResult,
    NamedWeights,
    Outcome,
    PublishWeights,
    SaveState,
    SaveStateResult,
)
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec
from phaseloom.common.contract.streams import Bucket
from phaseloom.statemgr.checkpoints.marker import MARKER_FILE
from phaseloom.statemgr.records.layouts import rounded
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.model import as_little_endian
from tests.support import inprocess
from tests.support.node import STEP, TestNode, lesson, policy_spec, running_node, sampler_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCORED = Forward(lesson().batch)


async def train(
    node: TestNode, deployment: DeploymentKey, operations: list[Args], *, incarnation: int = 1
) -> None:
    """Run them from seq 1 on; all complete."""
    for seq, args in enumerate(operations, start=1):
        done = await node.run(deployment, seq, args, seq - 1, incarnation=incarnation)
        assert done.outcome is Outcome.COMPLETED, done


async def sha(node: TestNode, deployment: DeploymentKey, name: str, incarnation: int = 1) -> str:
    """Of its weights, by a checkpoint of that name."""
    done = await node.run(deployment, f"r{name}", SaveState(name), incarnation=incarnation)
    return saved(done).weights_sha256


def kept_in(node: TestNode, deployment: DeploymentKey) -> Path:
    return node.checkpoint_root / deployment.tenant / deployment.job / deployment.deployment


def saved(done: Completion) -> SaveStateResult:
    assert isinstance(done.result, SaveStateResult), done
    return done.result


async def test_step_on_a_part_of_the_batch_is_refused_and_its_gradients_are_dropped(
    node: TestNode,
) -> None:
    plain, _ = await node.start_wpg(policy_spec(), job="plain")
    await train(node, plain, [lesson(1), STEP])
    expected = await sha(node, plain, "expected")

    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [lesson(0)])
    refused = await node.run(policy, 2, STEP, 1, partial=True)
    assert refused.outcome is Outcome.FAILED
    assert refused.error is not None
    assert refused.error.code is Code.FAILED_PRECONDITION
    assert not (await node.finished(await node.put_again(policy, 2))).dirty
    # It took no effect: the next one comes after seq 1 still.
    for seq, args, prev in ((3, lesson(1), 1), (4, STEP, 3)):
        assert (await node.run(policy, seq, args, prev)).outcome is Outcome.COMPLETED
    assert await sha(node, policy, "went-on") == expected

    # Rebuilt from the seeds: the refused step drops the gradients again, its outcome stands.
    await node.kill_rank(policy)
    await node.lost(policy)
    policy, _ = await node.start_wpg(policy_spec(), incarnation=2)
    for seq, args, prev in ((1, lesson(0), 0), (2, STEP, 1), (3, lesson(1), 1), (4, STEP, 3)):
        again = await node.put_again(policy, seq)
        await node.permit(again, args, prev, 2, replay=True, partial=seq == 2)
        finished = await node.finished(again, incarnation=2)
        assert (finished.outcome is Outcome.FAILED) == (seq == 2)
        assert not finished.dirty
    assert await sha(node, policy, "rebuilt", 2) == expected


async def test_partial_step_is_taken_where_it_is_allowed(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [lesson()])
    done = await node.run(policy, 2, replace(STEP, allow_partial=True), 1, partial=True)
    assert done.outcome is Outcome.COMPLETED


async def test_step_with_bad_parameters_is_refused_and_changes_nothing(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [lesson()])
    bad = replace(STEP, adam=replace(STEP.adam, learning_rate=-1.0))
    done = await node.run(policy, 2, bad, 1)
    assert done.error is not None
    assert (done.error.code, done.error.field) == (
        Code.INVALID_ARGUMENT,
        "args.adam.learning_rate",
    )
    assert not (await node.finished(await node.put_again(policy, 2))).dirty
    assert (await node.run(policy, 3, STEP, 1)).outcome is Outcome.COMPLETED


async def test_checkpoint_with_a_blob_is_the_jobs_last(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    args = SaveState("first", b"step 7", {"sampler": "theirs"})
    key = await node.put(policy, 1, args)
    await node.permit(key, args)
    finished = await node.finished(key)
    checkpoints = {"policy": "first", "sampler": "theirs"}
    assert finished.checkpoints == checkpoints
    stored = await node.bus.keys.get(Bucket.CHECKPOINTS, str(policy.job_key))
    assert stored is not None
    assert decode(stored.payload, Checkpoint) == Checkpoint("policy", 1, checkpoints, b"step 7")

    # A leader that finds the outcome stored tells it too: its predecessor's word may be lost.
    await node.permit(key, args)
    await node.log.until(lambda _: len(node.all_finished(key)) == 2)
    assert node.all_finished(key)[1].checkpoints == checkpoints

    # One without changes nothing; one that is too large is refused.
    await sha(node, policy, "second")
    big = SaveState("third", bytes(2**20 + 1))
    done = await node.run(policy, 2, big)
    assert done.error is not None
    assert (done.error.code, done.error.field) == (Code.INVALID_ARGUMENT, "args.controller_blob")
    assert await node.bus.keys.get(Bucket.CHECKPOINTS, str(policy.job_key)) == stored
    assert not (kept_in(node, policy) / "third").exists()


async def test_checkpoint_is_only_found_done_by_the_operation_that_wrote_it(
    node: TestNode,
) -> None:
    """As where a rank dies between the rename and its outcome: that operation runs again."""
    policy, _ = await node.start_wpg(policy_spec())
    key = await node.put(policy, 1, SaveState("name"))
    await node.permit(key, SaveState("name"))
    first = saved(await node.outcome(key))
    await node.forget_outcome(key)
    await node.permit(key, SaveState("name"))
    assert saved(await node.stored_outcome(key)) == first
    other = await node.run(policy, 2, SaveState("name"))
    assert other.error is not None
    assert other.error.code is Code.ALREADY_EXISTS


async def test_transformers_opens_what_a_deployment_has_saved(node: TestNode) -> None:
    """With the weights that a backend alone has after the same operations, whoever wrote them."""
    batch = lesson()
    with inprocess.Job(JobSpec(deployments=[policy_spec()])) as alone:
        alone.deployment("policy").forward_backward(batch.batch, batch.loss)
        await alone.deployment("policy").optim_step(STEP.adam)
        expected = alone.deployment("policy").backend.weights_sha256()

    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [batch, STEP])
    result = saved(await node.run(policy, "rexport", SaveState("export")))
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(node.checkpoint_root / policy.tenant / result.path)
    opened = weights_sha256(as_little_endian(sorted(model.named_parameters())))
    assert opened == result.weights_sha256 == expected


async def test_training_goes_on_while_a_checkpoint_is_written(node: TestNode) -> None:
    """The state manager, which writes it, stands still meanwhile."""
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [lesson(0), STEP])
    expected = await sha(node, policy, "expected")
    key = await node.put(policy, 3, SaveState("cut"))
    await node.permit(key, SaveState("cut"), 2)
    await node.snapshot_taken(key)
    with node.frozen("statemgr"):
        for seq, args, prev in ((4, lesson(1), 2), (5, STEP, 4)):
            assert (await node.run(policy, seq, args, prev)).outcome is Outcome.COMPLETED
    assert saved(await node.outcome(key)).weights_sha256 == expected
    assert await sha(node, policy, "after") != expected


async def test_another_job_takes_the_device_while_a_checkpoint_is_written(
    node: TestNode,
) -> None:
    """The write waits before it gives its files their name: another one's marker is a pipe."""
    saver, _ = await node.start_wpg(policy_spec(), job="saver")
    await train(node, saver, [lesson(0), STEP])
    expected = await sha(node, saver, "expected")
    pipe = kept_in(node, saver) / "slow" / MARKER_FILE
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    key = await node.put(saver, 3, SaveState("cut"))
    await node.permit(key, SaveState("cut"), 2)
    await node.snapshot_taken(key)

    other, _ = await node.start_wpg(policy_spec(), job="other")
    await train(node, other, [lesson(0), STEP, lesson(1), STEP])
    assert node.all_finished(key) == []
    with await asyncio.to_thread(pipe.open, "wb"):  # once the write is where it waits
        assert not (kept_in(node, saver) / "cut").exists()
        shutil.rmtree(pipe.parent)
    assert saved(await node.outcome(key)).weights_sha256 == expected
    trained = await sha(node, other, "trained")

    await node.open(saver, 1, displaces=[other], epoch=2)
    for seq, args, prev in ((4, lesson(1), 2), (5, STEP, 4)):
        assert (await node.run(saver, seq, args, prev, epoch=2)).outcome is Outcome.COMPLETED
    done = await node.run(saver, "rtrained", SaveState("trained"), epoch=2)
    assert saved(done).weights_sha256 == trained != expected
    loaded = await node.run(saver, 6, LoadState("cut"), 5, epoch=2)
    assert loaded.result == LoadStateResult(expected)


async def test_rank_killed_while_a_checkpoint_is_written_loses_none(node: TestNode) -> None:
    """Rebuilt, it comes to the operation again in its place: the same state is found or made."""
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [lesson(0), STEP])
    expected = await sha(node, policy, "expected")
    args = SaveState("cut")
    key = await node.put(policy, 3, args)
    await node.permit(key, args, 2)
    await node.snapshot_taken(key)
    with node.frozen("statemgr"):
        assert (await node.run(policy, 4, lesson(1), 2)).outcome is Outcome.COMPLETED
        await node.kill_rank(policy)
    await node.lost(policy)
    policy, _ = await node.start_wpg(policy_spec(), incarnation=2)
    for seq, again, prev in ((1, lesson(0), 0), (2, STEP, 1), (3, args, 2), (4, lesson(1), 2)):
        operation = await node.put_again(policy, seq)
        await node.permit(operation, again, prev, 2, replay=True)
        assert (await node.finished(operation, 2)).outcome is Outcome.COMPLETED
    assert saved(await node.stored_outcome(key)).weights_sha256 == expected
    loaded = await node.run(policy, 5, LoadState("cut"), 4, incarnation=2)
    assert isinstance(loaded.result, LoadStateResult)
    assert loaded.result.weights_sha256 == expected


async def test_state_manager_killed_while_a_checkpoint_is_written_loses_none() -> None:
    async with running_node() as node:
        policy, _ = await node.start_wpg(policy_spec())
        await train(node, policy, [lesson(0), STEP])
        expected = await sha(node, policy, "expected")
        key = await node.put(policy, 3, SaveState("cut"))
        await node.permit(key, SaveState("cut"), 2)
        await node.snapshot_taken(key)
        await node.kill("statemgr")
        assert (await node.run(policy, 4, lesson(1), 2)).outcome is Outcome.COMPLETED
        await node.start("statemgr")
        assert saved(await node.outcome(key)).weights_sha256 == expected
        assert await sha(node, policy, "cut-again") == expected


async def test_old_checkpoints_go_but_for_what_the_job_may_fall_back_to(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    await sha(node, policy, "mine")
    await node.run(policy, 1, SaveState("fallback", b"blob", keep=1))
    for seq in range(2, 5):
        await node.run(policy, seq, SaveState(f"auto{seq}", keep=1))
    # Only now it is known that the last one has removed what is not needed.
    await sha(node, policy, "last")
    assert {p.name for p in kept_in(node, policy).iterdir()} == {
        "mine",
        "fallback",
        "auto4",
        "last",
    }
    await node.run(policy, 5, SaveState("second", b"blob", keep=1))
    await node.run(policy, 6, SaveState("third", b"blob", keep=1))
    await sha(node, policy, "end")
    # Whoever attached before the third was there may load the second yet.
    assert {p.name for p in kept_in(node, policy).iterdir()} == {
        "mine",
        "last",
        "end",
        "second",
        "third",
    }


async def test_deleted_checkpoint_is_one_that_the_job_does_not_need(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    for seq, name in enumerate(("mine", "oldest", "second", "third")):
        await node.run(policy, seq, SaveState(name, b"" if name == "mine" else b"blob"))
    for seq, name in enumerate(("mine", "oldest", "gone"), 4):
        done = await node.run(policy, seq, DeleteCheckpoint(name))
        assert isinstance(done.result, DeleteCheckpointResult)
        assert bool(done.result.num_bytes) == (name != "gone")
    for seq, name in enumerate(("second", "third"), 7):
        done = await node.run(policy, seq, DeleteCheckpoint(name))
        assert done.error is not None
        assert (done.error.code, done.error.field) == (Code.FAILED_PRECONDITION, "args.name")
    assert {p.name for p in kept_in(node, policy).iterdir()} == {"second", "third"}

    # What was loaded is kept for a rebuild, but not under its name.
    await sha(node, policy, "loaded")
    assert (await node.run(policy, 10, LoadState("loaded"))).outcome is Outcome.COMPLETED
    done = await node.run(policy, 11, DeleteCheckpoint("loaded"))
    assert done.outcome is Outcome.COMPLETED
    done = await node.run(policy, 12, LoadState("loaded"), 10)
    assert done.error is not None
    assert done.error.code is Code.NOT_FOUND


async def test_ranks_start_from_a_checkpoint_of_their_job(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    await train(node, policy, [lesson(0), STEP, lesson(1)])
    at_3 = await sha(node, policy, "third")
    assert (await node.run(policy, 4, STEP, 3)).outcome is Outcome.COMPLETED
    at_4 = await sha(node, policy, "fourth")
    assert at_3 != at_4

    policy, started = await node.start_wpg(
        policy_spec(), incarnation=2, checkpoint="third", applied=10
    )
    assert started.applied == 10
    assert await sha(node, policy, "restored", 2) == at_3
    # Gradients and the optimizer's state came along: the same step follows.
    assert (await node.run(policy, 11, STEP, 10, incarnation=2)).outcome is Outcome.COMPLETED
    assert await sha(node, policy, "stepped", 2) == at_4
    # What an offload says of the state is what a seal goes by.
    await node.seal(policy, 11, 2)


async def test_ranks_do_not_start_from_a_checkpoint_that_is_not_there(node: TestNode) -> None:
    with pytest.raises(CallerError, match="NOT_FOUND"):
        await node.start_wpg(policy_spec(), checkpoint="nowhere")


async def test_loading_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    node: TestNode,
) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    before = await sha(node, policy, "mine")
    other, _ = await node.start_wpg(policy_spec("other", hidden_size=16))
    await sha(node, other, "theirs")
    (kept_in(node, other) / "theirs").rename(kept_in(node, policy) / "theirs")
    done = await node.run(policy, 1, LoadState("theirs"))
    assert done.error is not None
    assert done.error.code is Code.FAILED_PRECONDITION
    assert await sha(node, policy, "still-mine") == before


async def test_noop_backend_loads_what_it_has_saved(node: TestNode) -> None:
    spec = DeploymentSpec("noop", policy_spec().pool, "noop", ModelSpec({"num_floats": 3}))
    policy, _ = await node.start_wpg(spec)
    expected = await sha(node, policy, "name")
    loaded = await node.run(policy, 1, LoadState("name"))
    assert loaded.result == LoadStateResult(expected), loaded.error


async def test_checkpoint_that_cannot_be_written_fails_alone(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec())
    place = kept_in(node, policy)
    place.parent.mkdir(parents=True)
    place.write_text("in the way")
    done = await node.run(policy, 1, SaveState("name", b"blob"))
    assert done.error is not None
    assert done.error.code is Code.UNAVAILABLE
    assert (await node.run(policy, 2, lesson())).outcome is Outcome.COMPLETED


async def test_version_that_host_memory_has_no_room_for_fails_alone() -> None:
    """It only reads the weights: nothing has to be rebuilt."""
    budget = backend_factory("fsdp").plan(policy_spec()).heap_bytes + 2 * 4096
    async with running_node(host_memory_bytes=budget) as node:
        policy, _ = await node.start_wpg(policy_spec())
        await train(node, policy, [lesson()])
        key = await node.put(policy, 2, PublishWeights())
        await node.permit(key, PublishWeights(), 1)
        finished = await node.finished(key)
        assert finished.error is not None
        assert (finished.error.code, finished.dirty) == (Code.RESOURCE_EXHAUSTED, False)
        assert (await node.run(policy, 3, STEP, 1)).outcome is Outcome.COMPLETED


async def test_operation_that_names_weights_is_refused_where_host_memory_has_no_room() -> None:
    """What it takes for a while was beside the budget: the rank's own weights, and a checkpoint's.
    Three samplers leave room for one of the two."""
    state_bytes, weights_bytes = (
        rounded(backend_factory(spec.backend).plan(spec).heap_bytes)
        for spec in (policy_spec(), sampler_spec())
    )
    budget = state_bytes + 4 * weights_bytes
    assert budget >= 2 * state_bytes, "a checkpoint needs a copy of the state"
    async with running_node(host_memory_bytes=budget, nvme_bytes=0) as node:
        policy, _ = await node.start_wpg(policy_spec())
        await train(node, policy, [lesson(), STEP])
        kept = await node.run(policy, "before", SCORED)
        await sha(node, policy, "kept")
        learned = await node.run(policy, 3, lesson(1), 2)
        assert learned.outcome is Outcome.COMPLETED
        assert (await node.run(policy, 4, STEP, 3)).outcome is Outcome.COMPLETED
        now = await node.run(policy, "now", SCORED)
        assert now.result != kept.result
        named = replace(SCORED, weights=NamedWeights("policy", checkpoint="kept"))
        assert (await node.run(policy, "roomy", named)).result == kept.result
        samplers = []
        for seed in range(3):
            model = replace(sampler_spec().model, init_seed=seed)
            spec = replace(sampler_spec(), name=f"sampler-{seed}", model=model)
            samplers.append((await node.start_wpg(spec))[0])

        key = await node.put(policy, "full", named)
        await node.permit(key, named)
        finished = await node.finished(key)
        assert finished.error is not None
        assert (finished.error.code, finished.dirty) == (Code.RESOURCE_EXHAUSTED, False)
        assert finished.error.message.startswith("the weights of checkpoint kept for ")
        assert {"needed_bytes", "used_bytes", "budget_bytes"} <= finished.error.details.keys()
        assert finished.error.remedy
        assert (await node.run(policy, "after", SCORED)).result == now.result

        await node.command(StopWpg, deployment=samplers[0], incarnation=1, forget=True)
        await node.lost(samplers[0])
        assert (await node.run(policy, "again", named)).result == kept.result
        assert (await node.run(policy, "last", SCORED)).result == now.result
        assert node.lives_lost(policy) == []
