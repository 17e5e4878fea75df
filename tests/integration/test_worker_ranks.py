"""A deployment spread over the devices of a node: it learns what it learns on one, and it lives and
dies whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from phaseloom.common.contract import streams
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.events import Notice, PermitReturned
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.operations import (
    AdamParams,
    Args,
    Completion,
    Forward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    LoadState,
    NamedWeights,
    OptimStep,
    OptimStepResult,
    Outcome,
    Prompt,
    PublishWeights,
    PublishWeightsResult,
    SamplingParams,
    SaveState,
    SaveStateResult,
    SyncWeights,
    SyncWeightsResult,
)
from phaseloom.common.contract.specs import DeploymentSpec, Layout
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.fsdp.backend import FsdpBackend
from phaseloom.worker.backends.layout import plan
from phaseloom.worker.backends.model import parameter_shapes
from phaseloom.worker.state.heap import PAGE_BYTES
from phaseloom.worker.state.layouts import packed
from tests.support.node import (
    STEP,
    TestNode,
    exploding,
    lesson,
    policy_spec,
    running_node,
    sampler_spec,
)
from tests.support.processes import gone, until_gone

NUM_DEVICES = 2
TWO = Layout(dp=2)
TRAINING: list[Args] = [lesson(0), lesson(1, rows=3), STEP, lesson(2, rows=1), STEP]


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def train(
    node: TestNode, deployment: DeploymentKey, operations: list[Args], first: int = 1
) -> list[dict[str, float]]:
    metrics = []
    for seq, args in enumerate(operations, start=first):
        done = await node.run(deployment, seq, args, seq - 1)
        assert isinstance(done.result, ForwardBackwardResult | OptimStepResult), done
        metrics.append(done.result.metrics)
    return metrics


async def saved(
    node: TestNode, deployment: DeploymentKey, name: str, incarnation: int = 1
) -> tuple[str, dict[str, np.ndarray]]:
    """SHA-256 of the weights, and every tensor of a checkpoint."""
    done = await node.run(deployment, f"r{name}", SaveState(name), incarnation=incarnation)
    assert isinstance(done.result, SaveStateResult), done
    files = (node.checkpoint_root / deployment.tenant / done.result.path).glob("*.safetensors")
    tensors = {name: array for file in files for name, array in load_file(file).items()}
    return done.result.weights_sha256, tensors


def logprobs(done: Completion) -> list[list[float]]:
    assert isinstance(done.result, ForwardResult), done
    return [float32s(values) for values in done.result.logprobs]


async def test_two_ranks_learn_what_one_learns(node: TestNode) -> None:
    one, _ = await node.start_wpg(policy_spec(), job="one")
    expected = await train(node, one, TRAINING)
    forward = Forward(lesson(5, rows=5).batch)
    expected_logprobs = logprobs(await node.run(one, "rf", forward))
    _, tensors_of_one = await saved(node, one, "end")

    two, started = await node.start_wpg(policy_spec(layout=TWO), job="two", devices=[0, 1])
    assert started.devices == [0, 1]
    assert len(node.rank_pids(two)) == 2
    metrics = await train(node, two, TRAINING)
    assert [m.keys() for m in metrics] == [m.keys() for m in expected]
    for mine, theirs in zip(metrics, expected, strict=True):
        assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-4)
    got_logprobs = logprobs(await node.run(two, "rf", forward))
    for got, wanted in zip(got_logprobs, expected_logprobs, strict=True):
        assert got == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    _, tensors_of_two = await saved(node, two, "end")
    assert tensors_of_two.keys() == tensors_of_one.keys()
    for name, array in tensors_of_two.items():
        # A step moves a weight by 1e-2: AdamW makes much of rounding where a gradient is near 0.
        np.testing.assert_allclose(array, tensors_of_one[name], rtol=1e-3, atol=2e-4, err_msg=name)


async def test_version_in_two_parts_comes_to_one_rank_and_to_two(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1])
    await train(node, policy, [lesson(), STEP])
    published = await node.run(policy, 3, PublishWeights(), 2)
    assert isinstance(published.result, PublishWeightsResult), published
    sha, _ = await saved(node, policy, "cut")
    # Cutting it again, as a rebuild does, gives the same.
    for spec, devices in ((sampler_spec(), [1]), (sampler_spec_of_two(), [0, 1])):
        sampler, _ = await node.start_wpg(spec, devices=devices)
        synced = await node.run(sampler, 1, SyncWeights("policy", 3))
        assert synced.result == SyncWeightsResult(3, published.result.digest)
        assert (await saved(node, sampler, "got"))[0] == sha


async def test_parts_bring_the_bits_that_a_whole_version_brings(node: TestNode) -> None:
    """What the sampler draws from them, and how likely it finds that."""
    prompts = Generate([Prompt([1, 2, 3], seed=4)], SamplingParams(8, ignore_eos=True), 2)
    drawn_from: list[object] = []
    for job, layout in (("whole", Layout()), ("parts", TWO)):
        policy, _ = await node.start_wpg(
            policy_spec(layout=layout), job=job, devices=[*range(layout.num_ranks)]
        )
        published = await node.run(policy, 1, PublishWeights())
        assert isinstance(published.result, PublishWeightsResult), published
        spec = sampler_spec()
        sampler, _ = await node.start_wpg(
            replace(spec, model=replace(spec.model, init_seed=8)), job=job
        )
        before = (await node.run(sampler, "r1", prompts)).result
        await node.run(sampler, 1, SyncWeights("policy", 1))
        after = (await node.run(sampler, "r2", prompts)).result
        assert after != before
        drawn_from.append(after)
    assert drawn_from[0] == drawn_from[1]


async def test_sync_that_cannot_be_had_changes_no_rank_and_comes_later(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1])
    sampler, _ = await node.start_wpg(sampler_spec_of_two(), devices=[0, 1])
    pids = node.rank_pids(sampler)
    sync = SyncWeights("policy", 1)
    key = await node.put(sampler, 1, sync)
    await node.permit(key, sync, sources=["127.0.0.1:1"])
    await node.log.until(lambda e: isinstance(e, PermitReturned) and e.key == key)
    published = await node.run(policy, 1, PublishWeights())
    assert isinstance(published.result, PublishWeightsResult), published
    await node.permit(key, sync)
    assert (await node.outcome(key)).result == SyncWeightsResult(1, published.result.digest)
    assert node.rank_pids(sampler) == pids
    await node.log.caught_up()
    assert node.lives_lost(sampler) == []


async def test_publish_that_finds_no_room_for_a_part_is_refused_and_the_ranks_go_on() -> None:
    """Host memory has room for the smaller part alone. Whichever asks first, and wherever the other
    one is by then: the larger one never fits."""
    spec = policy_spec(layout=TWO, hidden_size=33, intermediate_size=1024)
    groups = [RankGroup(rank, 2) for rank in range(2)]
    heaps = [pages(FsdpBackend.plan(spec, group).heap_bytes) for group in groups]
    parts = [pages(part_bytes(spec, group)) for group in groups]
    assert parts[0] > parts[1]
    memory_bytes = (sum(heaps) + parts[1]) * PAGE_BYTES
    async with running_node(2, memory_bytes, nvme_bytes=0) as node, node.fresh():
        policy, _ = await node.start_wpg(spec, devices=[0, 1])
        pids = node.rank_pids(policy)
        refused = await node.run(policy, 1, PublishWeights())
        assert refused.error is not None
        assert refused.error.code is Code.RESOURCE_EXHAUSTED
        assert (await node.run(policy, 2, lesson())).outcome is Outcome.COMPLETED
        assert (await node.run(policy, 3, STEP, 2)).outcome is Outcome.COMPLETED
        assert node.rank_pids(policy) == pids


def part_bytes(spec: DeploymentSpec, group: RankGroup) -> int:
    """Of a weights version, what this rank writes."""
    weights = plan(parameter_shapes(spec.model), trainable=False, ranks=group).weights
    places, _ = packed(list(weights.slots.values()))
    return max(place.offset + place.num_bytes for place in places)


def pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES)


async def test_sync_that_changed_nothing_is_told(node: TestNode) -> None:
    """A policy that no longer learns looks like one that does, from the sampler's side."""
    policy, _ = await node.start_wpg(policy_spec(), devices=[0])
    sampler, _ = await node.start_wpg(sampler_spec(), devices=[1])
    notices = await node.bus.client.subscribe(streams.event_subject("worker"))
    await node.bus.client.flush()
    for seq in (1, 2):
        await node.run(policy, seq, PublishWeights(), seq - 1)
        await node.run(sampler, seq, SyncWeights("policy", seq), seq - 1)
    notice = decode((await notices.next_msg(60)).data, Notice)
    assert notice == Notice(
        "worker",
        "sync changed nothing",
        "version 2 has the same weights as version 1",
        f"{sampler}.2",
    )


def sampler_spec_of_two() -> DeploymentSpec:
    spec = sampler_spec(layout=TWO)
    return DeploymentSpec(
        "both", spec.pool, spec.backend, spec.model, layout=TWO, batching=spec.batching
    )


def drawn(done: Completion) -> list[list[int]]:
    assert isinstance(done.result, GenerateResult), done
    return [int32s(s.tokens) for group in done.result.sequences for s in group]


async def test_masters_are_the_same_bits_after_others_were_lent(node: TestNode) -> None:
    """Two ranks in bfloat16 gather the masters: the others' take the place of these, too."""
    scored, ends = Forward(lesson().batch), []
    for reads in (True, False):
        spec = policy_spec(layout=TWO, dtype="bfloat16")
        policy, _ = await node.start_wpg(spec, job=f"reads-{reads}", devices=[0, 1])
        await train(node, policy, TRAINING)
        await node.run(policy, "kept", SaveState("kept"))
        kept = (await node.run(policy, "before", scored)).result
        await train(node, policy, [lesson(3), STEP], first=6)
        if reads:
            named = replace(scored, weights=NamedWeights("policy", checkpoint="kept"))
            now = (await node.run(policy, "now", scored)).result
            assert (await node.run(policy, "named", named)).result == kept != now
            assert (await node.run(policy, "again", scored)).result == now
        await train(node, policy, [lesson(4), STEP], first=8)
        done = await node.run(policy, "end", SaveState("end"))
        assert isinstance(done.result, SaveStateResult), done
        files = node.checkpoint_root / policy.tenant / done.result.path
        ends.append([file.read_bytes() for file in sorted(files.glob("*.safetensors"))])
    assert ends[0] == ends[1]


async def test_two_samplers_draw_what_one_draws_and_both_stop_when_cancelled(
    node: TestNode,
) -> None:
    prompts = [Prompt([i + 1, 2, 3], seed=i) for i in range(5)]
    args = Generate(prompts, SamplingParams(8, ignore_eos=True), 2)
    one, _ = await node.start_wpg(sampler_spec(positions=60_010))
    expected = drawn(await node.run(one, "r1", args))
    two, _ = await node.start_wpg(
        sampler_spec(positions=60_010, layout=TWO), job="two", devices=[0, 1]
    )
    assert drawn(await node.run(two, "r1", args)) == expected

    endless = Generate(prompts, SamplingParams(60_000, ignore_eos=True))
    key = await node.put(two, "r2", endless)
    async with node.progress(key) as told:
        await node.permit(key, endless)
        await asyncio.wait_for(told.get(), 60)
    await node.cancel(key)
    assert (await node.outcome(key)).outcome is Outcome.CANCELLED
    # Both are free again.
    assert drawn(await node.run(two, "r3", args)) == expected


def meeting_places(node: TestNode) -> list[Path]:
    return list(node.directory.glob("ranks-*"))


async def test_refusals_reach_no_other_rank_and_the_ranks_go_on(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1])
    bad = lesson()
    bad.batch[0].targets[0] = 1000  # type: ignore[index]
    refused = await node.run(policy, 1, bad)
    assert refused.error is not None
    assert refused.error.code is Code.INVALID_ARGUMENT
    missing = await node.run(policy, 2, LoadState("nowhere"))
    assert missing.error is not None
    assert missing.error.code is Code.NOT_FOUND
    partial = await node.run(policy, 3, STEP, partial=True)
    assert partial.error is not None
    assert partial.error.code is Code.FAILED_PRECONDITION
    step = await node.run(policy, 6, OptimStep(AdamParams(-1.0)))
    assert step.error is not None
    assert (step.error.code, step.error.field) == (
        Code.INVALID_ARGUMENT,
        "args.adam.learning_rate",
    )
    await node.run(policy, 4, lesson())
    done = await node.run(policy, 5, STEP, 4)
    assert done.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("rank", [0, 1])
async def test_killed_rank_takes_the_others_with_it_and_the_operation_is_not_failed(
    node: TestNode, rank: int
) -> None:
    """One waits for the other in a collective when it dies; the next life starts from the seal."""
    undisturbed, _ = await node.start_wpg(policy_spec(layout=TWO), job="calm", devices=[0, 1])
    await train(node, undisturbed, TRAINING)
    expected, _ = await saved(node, undisturbed, "end")

    policy, _ = await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1])
    await train(node, policy, TRAINING[:3])
    await node.seal(policy, 3)
    pids = node.rank_pids(policy)
    # The other is held up, so that the operation cannot end before the kill.
    os.kill(pids[1 - rank], signal.SIGSTOP)
    key = await node.put(policy, 4, TRAINING[3])
    await node.permit(key, TRAINING[3], 3)
    os.kill(pids[rank], signal.SIGKILL)
    lost = await node.lost(policy)
    assert lost.error.code is Code.UNAVAILABLE
    assert all(gone(pid) for pid in pids)
    assert not node.all_finished(key)
    assert len(meeting_places(node)) == 1, "the other job's, which goes on"

    policy, started = await node.start_wpg(
        policy_spec(layout=TWO), devices=[0, 1], incarnation=2, seal_seq=3
    )
    assert started.applied == 3
    for seq in (4, 5):
        again = await node.put_again(policy, 4) if seq == 4 else None
        again = again or await node.put(policy, 5, STEP)
        await node.permit(again, TRAINING[seq - 1], seq - 1, 2)
        assert (await node.outcome(again)).outcome is Outcome.COMPLETED
    assert (await saved(node, policy, "end", 2))[0] == expected


async def test_operation_that_fails_on_the_ranks_ends_and_so_does_their_life(
    node: TestNode,
) -> None:
    policy, _ = await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1])
    key = await node.put(policy, 1, exploding())
    await node.permit(key, exploding())
    finished = await node.finished(key)
    assert (finished.outcome, finished.dirty) == (Outcome.FAILED, True)
    assert finished.error is not None
    assert finished.error.field == "args.batch"
    await node.lost(policy)
    await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1], incarnation=2)
    done = await node.run(policy, 2, lesson(), incarnation=2)
    assert done.outcome is Outcome.COMPLETED


async def test_layout_that_no_backend_runs_is_refused_at_the_start(node: TestNode) -> None:
    with pytest.raises(CallerError) as refused:
        await node.start_wpg(policy_spec(layout=Layout(tp=2)), devices=[0, 1])
    assert refused.value.info.code is Code.FAILED_PRECONDITION
    assert "tp" in refused.value.info.field


async def test_agents_death_leaves_no_rank_and_no_meeting_place_behind(node: TestNode) -> None:
    policy, _ = await node.start_wpg(policy_spec(layout=TWO), devices=[0, 1])
    pids = node.rank_pids(policy)
    await node.kill("worker")
    await until_gone(pids, 60)
    await node.start("worker")
    assert meeting_places(node) == []
