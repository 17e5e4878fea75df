"""Reading operations side by side on a real node: batches, refusals, cancel, progress."""

from __future__ import annotations

import asyncio

import pytest

from phaseloom.common.contract import streams
from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import Permit, Permits
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import Notice, OperationFinished
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.operations import (
    Args,
    Completion,
    Forward,
    Generate,
    GenerateResult,
    LoadState,
    Outcome,
    Prompt,
    SamplingParams,
    kind_of,
)
from phaseloom.common.contract.specs import Batching, CommandId
from tests.support.node import NODE, STEP, TestNode, lesson, policy_spec, sampler_spec
from tests.support.tinymodel import VOCAB

FOR_EVER = 60_000
"""New tokens: minutes for a tiny model, so whoever asks for them cancels."""


pytestmark = pytest.mark.asyncio(loop_scope="module")


def sample(first_token: int, max_tokens: int = 4) -> Generate:
    prompt = Prompt([first_token, 2, 3], seed=first_token)
    return Generate([prompt], SamplingParams(max_tokens, ignore_eos=True))


def tokens(done: Completion) -> list[list[int]]:
    assert isinstance(done.result, GenerateResult), done
    return [int32s(sequence.tokens) for group in done.result.sequences for sequence in group]


async def sampler(node: TestNode, batching: Batching = Batching.OPERATION) -> DeploymentKey:
    key, _ = await node.start_wpg(sampler_spec(positions=FOR_EVER + 10, batching=batching))
    return key


async def busy(node: TestNode, deployment: DeploymentKey) -> OperationKey:
    """A generation that runs now, and until it is cancelled."""
    args = sample(1, FOR_EVER)
    key = await node.put(deployment, "rlong", args)
    async with node.progress(key) as told:
        await node.permit(key, args)
        told_first = await asyncio.wait_for(told.get(), 60)
    assert told_first.key == key
    assert 0 < told_first.num_done < told_first.num_total == FOR_EVER
    return key


async def test_running_generation_is_cancelled_between_two_tokens(node: TestNode) -> None:
    deployment = await sampler(node)
    key = await busy(node, deployment)
    await node.cancel(key)
    done = await node.outcome(key)
    assert done.outcome is Outcome.CANCELLED
    assert done.error is not None
    assert done.error.code is Code.ABORTED
    finished = await node.finished(key)
    assert (finished.outcome, finished.dirty) == (Outcome.CANCELLED, False)
    # Harmless once it has ended; the ranks go on.
    await node.cancel(key)
    assert len(tokens(await node.run(deployment, 1, sample(5)))[0]) == 4


async def test_waiting_operations_are_cancelled_at_once(node: TestNode) -> None:
    deployment = await sampler(node)
    long = await busy(node, deployment)
    waiting: list[Args] = [sample(2), Forward(lesson().batch)]
    keys = [await node.put(deployment, f"r{i}", args) for i, args in enumerate(waiting)]
    for key, args in zip(keys, waiting, strict=True):
        await node.permit(key, args)
        await node.cancel(key)
    assert [(await node.outcome(key)).outcome for key in keys] == [Outcome.CANCELLED] * 2
    assert not node.all_finished(long)
    await node.cancel(long)
    await node.finished(long)


async def test_cancel_that_overtakes_its_permit_still_counts(node: TestNode) -> None:
    deployment = await sampler(node)
    key = await node.put(deployment, "rsoon", sample(1, FOR_EVER))
    await node.cancel(key)
    await all_acknowledged(node)
    await node.permit(key, sample(1))
    assert (await node.outcome(key)).outcome is Outcome.CANCELLED


async def test_mutating_operation_runs_though_it_was_cancelled_and_people_are_told(
    node: TestNode,
) -> None:
    deployment, _ = await node.start_wpg(policy_spec())
    notices = await node.bus.client.subscribe(f"{streams.PREFIX}.event.worker")
    await node.bus.client.flush()
    key = await node.put(deployment, 1, lesson())
    await node.cancel(key)
    await all_acknowledged(node)  # else it may come when the operation has ended
    await node.permit(key, lesson())
    assert (await node.outcome(key)).outcome is Outcome.COMPLETED
    notice = decode((await notices.next_msg(60)).data, Notice)
    assert (notice.what, notice.subject) == ("cancel ignored", str(key))


async def test_wrong_request_among_those_that_wait_fails_alone(node: TestNode) -> None:
    """All that wait go in one call; what is drawn does not depend on whom it goes with."""
    deployment = await sampler(node, Batching.SHARED)
    alone = [tokens(await node.run(deployment, f"ra{i}", sample(i))) for i in range(4)]
    long = await busy(node, deployment)
    together = {f"rb{i}": sample(i) for i in range(4)} | {"rbad": sample(VOCAB)}
    keys = {slot: await node.put(deployment, slot, args) for slot, args in together.items()}
    for slot, key in keys.items():
        await node.permit(key, together[slot])
    await node.cancel(long)
    outcomes = {slot: await node.outcome(key) for slot, key in keys.items()}
    bad = outcomes.pop("rbad")
    assert bad.outcome is Outcome.FAILED
    assert bad.error is not None
    assert (bad.error.code, bad.error.field) == (Code.INVALID_ARGUMENT, "args.prompts[0].tokens")
    assert [tokens(done) for done in outcomes.values()] == alone
    assert not (await node.finished(keys["rbad"])).dirty


async def test_mutating_operation_waits_for_those_that_read(node: TestNode) -> None:
    deployment = await sampler(node)
    long = await busy(node, deployment)
    load = LoadState("nowhere")
    key = await node.put(deployment, 1, load)
    await node.permit(key, load)
    await node.cancel(long)
    assert (await node.outcome(key)).outcome is Outcome.FAILED
    order = [e.key for e in node.log.events if isinstance(e, OperationFinished)]
    assert order.index(long) < order.index(key)


async def test_finished_operation_tells_how_many_tokens_it_worked_on(node: TestNode) -> None:
    deployment, _ = await node.start_wpg(sampler_spec())
    two = Generate([Prompt([1, 2, 3]), Prompt([4])], SamplingParams(5, ignore_eos=True), 3)
    counts = {}
    for slot, args in (("rg", two), ("rf", Forward(lesson(rows=2).batch))):
        key = await node.put(deployment, slot, args)
        await node.permit(key, args)
        counts[slot] = (await node.finished(key)).num_tokens
    assert counts == {"rg": 3 + 1 + 2 * 3 * 5, "rf": 2 * 5}
    policy, _ = await node.start_wpg(policy_spec())
    for seq, step, num_tokens in ((1, lesson(), 4 * 5), (2, STEP, 0)):
        key = await node.put(policy, seq, step)
        await node.permit(key, step, seq - 1)
        assert (await node.finished(key)).num_tokens == num_tokens


async def permit_all(
    node: TestNode, keys: list[OperationKey], args: Args, first_index: int = 0
) -> None:
    """Permits in one message; each has its own id, the same where it is sent again.

    Args: first_index: of the ids; other than any other test's, for the node lives on.
    """
    permits = [
        Permit(
            id=CommandId(10**9, first_index + i),
            node=NODE,
            revision=node.revision,
            operation=key,
            operation_id=f"id-{key}",
            kind=kind_of(args),
            incarnation=1,
            epoch=1,
            prev=0,
        )
        for i, key in enumerate(keys)
    ]
    await node.command(Permits, permits=permits, traceparents=[])


async def all_acknowledged(node: TestNode) -> None:
    async with asyncio.timeout(60):
        while (await node.bus.js.stream_info(streams.PERMITS)).state.messages:
            await asyncio.sleep(0.02)


async def test_permits_that_come_in_one_message_are_each_done_once(node: TestNode) -> None:
    """Part of them is done already, one has no payload, and all are sent again."""
    deployment = await sampler(node)
    args = sample(3)
    keys = [await node.put(deployment, f"rb{i}", args) for i in range(6)]
    stored = Completion(f"id-{keys[0]}", Outcome.CANCELLED)
    await node.bus.publish(streams.done_subject(keys[0]), stored)
    await node.bus.stored.delete(streams.ops_stream(keys[1].tenant), streams.op_subject(keys[1]))
    await permit_all(node, keys, args)
    outcomes = [(await node.outcome(key)).outcome for key in keys]
    assert outcomes == [Outcome.CANCELLED, Outcome.FAILED, *[Outcome.COMPLETED] * 4]
    for key in keys:
        await node.finished(key)
    # Together in another way, as a scheduler that starts over may send them.
    await permit_all(node, keys[:2], args)
    await permit_all(node, keys[2:], args, first_index=2)
    await all_acknowledged(node)
    await node.log.caught_up()
    assert [len(node.all_finished(key)) for key in keys] == [1] * 6


async def test_permits_in_one_message_end_each_in_its_time(node: TestNode) -> None:
    """A long one does not keep the word of the others from the scheduler."""
    deployment = await sampler(node)
    short = [await node.put(deployment, f"rs{i}", sample(i + 1)) for i in range(2)]
    long = await node.put(deployment, "rl", sample(9, FOR_EVER))
    await permit_all(node, [*short, long], sample(1), first_index=100)
    for key in short:
        assert (await node.outcome(key)).outcome is Outcome.COMPLETED
        await node.finished(key)
    assert not node.all_finished(long)
    await node.cancel(long)
    assert (await node.outcome(long)).outcome is Outcome.CANCELLED
    await all_acknowledged(node)


async def test_permits_that_make_no_sense_are_buried_and_the_next_are_taken(
    node: TestNode,
) -> None:
    deployment = await sampler(node)
    key = await node.put(deployment, "rp", sample(3))
    await node.command(Permits, permits=[], traceparents=[])
    subject = streams.permit_subject(NODE)
    nonsense = {"type": "permits", "node": str(NODE), "revision": node.revision}
    nonsense |= {"id": {"sequence": 1, "index": 0}, "permits": [], "traceparents": ["one of none"]}
    await node.bus.publish(subject, nonsense)
    await node.permit(key, sample(3))
    assert (await node.outcome(key)).outcome is Outcome.COMPLETED
    await all_acknowledged(node)
    buried = await node.bus.stored.get(streams.DEAD, streams.dead_subject("worker"))
    assert buried is not None
    assert "traceparents" in buried.headers["Phaseloom-Error"]
