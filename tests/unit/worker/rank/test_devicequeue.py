"""What goes in one call of the backend, and what does not; what a cancel reaches."""

from __future__ import annotations

import asyncio

import pytest

from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    ForwardResult,
    GenerateResult,
    Result,
)
from phaseloom.common.contract.specs import Batching
from phaseloom.common.transport.framing import MAX_FRAME_BYTES
from phaseloom.worker.rank.calls import Clocks
from phaseloom.worker.rank.devicequeue import MAX_SHARED_BYTES
from phaseloom.worker.rank.executor import OperationRefused
from tests.support.device import call, device, sample

FORWARD = Forward([Datum([1, 2], [2, 3])])


async def waiting(*tasks: asyncio.Task[Result | None]) -> None:
    """Let what was given reach the queue; none is done."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_all_that_wait_go_in_one_call_where_batches_are_shared() -> None:
    async with device(Batching.SHARED) as d:
        async with d.held_up():
            first = d.give("rf", FORWARD)
            await waiting(first)
            rest = [d.give(f"r{i}", sample(i)) for i in range(1, 5)]
            forward = d.give("rg", FORWARD)
            await waiting(*rest, forward)
        for task in rest:
            assert isinstance(await task, GenerateResult)
        assert isinstance(await first, ForwardResult)
        assert isinstance(await forward, ForwardResult)
        assert d.backend.calls == [[1, 2, 3, 4]]


async def test_those_that_come_join_the_call_that_runs_and_end_with_their_own_last_token() -> None:
    async with device(Batching.SHARED) as d:
        async with d.held_up():
            long = d.give("r1", sample(1, max_tokens=50))
            await waiting(long)
            short = [d.give(f"r{i}", sample(i)) for i in range(2, 6)]
            refused = d.give("r6", sample(6, max_tokens=0))
            cancelled = d.give("r7", sample(7))
            await waiting(*short, refused, cancelled)
            d.cancel("r7")
        ended: list[asyncio.Task[Result | None]] = []
        for task in (long, *short):
            task.add_done_callback(ended.append)
        await asyncio.wait([long, *short, refused])
        assert ended[-1] is long
        assert isinstance(refused.exception(), OperationRefused)
        assert await cancelled is None
        assert d.backend.calls == [[1, 2, 3, 4, 5]]


async def test_time_counts_in_proportion_to_the_sequences_that_run() -> None:
    """The parts of those that run at once add up to the time for which any of them ran."""
    times = iter([0.0, 1.0, 5.0, 8.0, 20.0, 21.0])
    clocks = Clocks(lambda: next(times))
    small, large, alone = (
        call("r1", sample(1)),
        call("r2", sample(2, num_samples=3)),
        call("rf", FORWARD),
    )
    clocks.start(small)
    clocks.start(large)
    clocks.stop(small)
    clocks.stop(large)
    clocks.stop(large)
    assert (small.duration_s, large.duration_s) == (5.0, 7.0)
    assert small.share * small.duration_s == 1.0 + 4.0 / 4
    assert large.share * large.duration_s == 3 * 4.0 / 4 + 3.0
    clocks.start(alone)
    clocks.stop(alone)
    assert (alone.duration_s, alone.share) == (1.0, 1.0)


async def test_those_that_run_at_once_have_a_part_of_their_time_each() -> None:
    async with device(Batching.SHARED) as d:
        calls = [call(f"r{i}", sample(i, max_tokens=50)) for i in range(1, 4)]
        async with d.held_up():
            tasks = [asyncio.create_task(d.queue.run(each)) for each in calls]
            await waiting(*tasks)
        await asyncio.gather(*tasks)
        assert all(0.0 < each.share < 1.0 for each in calls)
        later = call("r4", sample(4))
        await d.queue.run(later)
        assert later.share == 1.0


async def test_steps_are_told_with_the_tokens_of_all_that_share_them() -> None:
    async with device(Batching.SHARED) as d:
        calls = [call("r1", sample(1, max_tokens=40)), call("r2", sample(2, max_tokens=12))]
        async with d.held_up():
            tasks = [asyncio.create_task(d.queue.run(each)) for each in calls]
            await waiting(*tasks)
        await asyncio.gather(*tasks)
        long, short = (each.steps for each in calls)
        assert sum(run.steps for run in long) == 40
        assert sum(run.steps for run in short) == 12
        # The first step prefills both prompts; then two rows decode until the short one has ended.
        assert sum(run.tokens for run in long) - long[0].tokens == 2 * 11 + 28
        assert sum(run.duration_s for run in long) <= calls[0].duration_s
        assert sum(run.duration_s for run in short) <= calls[1].duration_s


async def test_nothing_joins_past_an_operation_that_waits() -> None:
    """So that an endless stream of one kind cannot keep another kind from the devices."""
    async with device(Batching.SHARED) as d:
        async with d.held_up():
            first = d.give("r1", sample(1))
            await waiting(first)
            forward = d.give("rf", FORWARD)
            await waiting(forward)
            late = d.give("r2", sample(2))
            await waiting(late)
        for task in (first, forward, late):
            await task
        assert d.backend.calls == [[1], [2]]


async def test_stopped_operation_completes_with_what_it_has() -> None:
    async with device(Batching.SHARED) as d:
        d.backend.on_taken = lambda: d.cancel("r1", keeps_partial=True)
        result = await d.give("r1", sample(1, max_tokens=50))
        assert isinstance(result, GenerateResult)
        ((sequence,),) = result.sequences
        assert sequence.stop_reason == "partial"


async def test_each_is_a_call_of_its_own_where_they_are_not() -> None:
    async with device(Batching.OPERATION) as d:
        async with d.held_up():
            tasks = [d.give(f"r{i}", sample(i)) for i in range(1, 4)]
            await waiting(*tasks)
        for task in tasks:
            assert isinstance(await task, GenerateResult)
        assert d.backend.calls == [[1], [2], [3]]


async def test_no_more_go_together_than_fit_one_message_to_the_other_ranks() -> None:
    async with device(Batching.SHARED) as d:
        async with d.held_up():
            tasks = [d.give("rf", FORWARD)]
            await waiting(*tasks)
            half = MAX_SHARED_BYTES // 2
            tasks += [d.give(f"r{i}", sample(i), num_bytes=half) for i in range(2, 5)]
            await waiting(*tasks)
        for task in tasks:
            await task
        assert d.backend.calls == [[2, 3], [4]]


async def test_cancelled_while_waiting_ends_at_once_and_goes_in_no_call() -> None:
    async with device(Batching.SHARED) as d:
        async with d.held_up():
            first = d.give("r1", sample(1))
            await waiting(first)
            second, third = d.give("r2", sample(2)), d.give("r3", sample(3))
            await waiting(second, third)
            d.cancel("r2")
            assert await second is None
            assert not first.done()
        assert isinstance(await third, GenerateResult)
        assert d.backend.calls == [[1, 3]]


async def test_refused_one_goes_in_no_call_and_spoils_none() -> None:
    async with device(Batching.SHARED) as d:
        async with d.held_up():
            first = d.give("r1", sample(1))
            await waiting(first)
            bad, good = d.give("r2", sample(2, max_tokens=0)), d.give("r3", sample(3))
            await waiting(bad, good)
        (error,) = await asyncio.gather(bad, return_exceptions=True)
        assert isinstance(error, OperationRefused)
        assert error.error.field == "args.sampling.max_tokens"
        assert isinstance(await good, GenerateResult)
        assert d.backend.calls == [[1, 3]]


async def test_all_are_refused_without_a_call() -> None:
    async with device(Batching.SHARED) as d:
        (error,) = await asyncio.gather(d.give("r1", sample(99)), return_exceptions=True)
        assert isinstance(error, OperationRefused)
        assert d.backend.calls == []


def test_payloads_of_one_call_fit_a_frame() -> None:
    assert MAX_SHARED_BYTES + len(encode(sample(1))) < MAX_FRAME_BYTES


async def test_forwards_in_a_row_end_one_by_one_and_one_is_cancelled_among_them() -> None:
    async with device(Batching.OPERATION) as d:
        args = Forward([Datum([1, 2], [2, 3])])
        async with d.held_up():
            tasks = [d.give(f"r{i}", args) for i in range(4)]
            wrong = d.give("rw", Forward([Datum([10**6], [1])]))
            last = d.give("rx", args)
            await waiting(*tasks, wrong, last)
            d.cancel("r2")
            assert await tasks.pop(2) is None
        for task in (*tasks, last):
            assert isinstance(await task, ForwardResult)
        with pytest.raises(OperationRefused):
            await wrong
