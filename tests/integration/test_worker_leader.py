"""The leader's own refusals, on a real bus and a real sampler."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest
from opentelemetry.context import Context

from phaseloom.common.contract import streams
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.events import OperationFinished, OperationsFinished
from phaseloom.common.contract.ids import DeploymentKey, OperationKey, VersionKey
from phaseloom.common.contract.operations import (
    Args,
    Completion,
    LoadState,
    Operation,
    Outcome,
    SyncWeights,
)
from phaseloom.common.contract.specs import Batching
from phaseloom.common.transport.bus import Bus
from phaseloom.worker.rank.leader import Leader
from phaseloom.worker.rank.outcomes import Outcomes
from phaseloom.worker.rank.wire import RunPermits
from phaseloom.worker.state.client import RankStateClient
from tests.support.device import KEY, Device, device, permit, sample
from tests.support.jobs import Log
from tests.support.statedaemon import daemon, start

POLICY = DeploymentKey(KEY.tenant, KEY.job, "policy")


def leader(device: Device, bus: Bus, state: RankStateClient | None = None) -> Leader:
    state = state or _unconnected(device)  # most here moves no weights
    return Leader(device.executor.settings, bus, state, device.executor, device.ranks, device.queue)


def _unconnected(device: Device) -> RankStateClient:
    return RankStateClient(
        "nowhere",
        "token",
        applied=lambda: 0,
        on_loaded=lambda: None,
        executor=device.ranks.device_thread,
        reconnect_s=0.0,
    )


def given(*permits: Permit) -> RunPermits:
    return RunPermits(list(permits), [])


async def put(bus: Bus, slot: str, args: Args) -> OperationKey:
    key = OperationKey(KEY.tenant, KEY.job, KEY.deployment, slot)
    await bus.publish(streams.op_subject(key), Operation(slot, 1, args))
    return key


async def test_mutating_operation_is_refused_while_others_read(bus: Bus) -> None:
    async with device(Batching.OPERATION) as d:
        running = leader(d, bus)
        reading, load = await put(bus, "r1", sample(1)), LoadState("name")
        mutating = await put(bus, "1", load)
        async with d.held_up():
            read = asyncio.create_task(running.run(given(permit(reading, sample(1)))))
            async with asyncio.timeout(60):
                while not d.queue.running:
                    await asyncio.sleep(0.01)
            with pytest.raises(ResourceError) as refused:
                await running.run(given(permit(mutating, load)))
            assert refused.value.info.code is Code.FAILED_PRECONDITION
        await read
        assert await bus.stored.get(streams.DONE, streams.done_subject(mutating)) is None
        assert await bus.stored.get(streams.DONE, streams.done_subject(reading)) is not None


async def test_ends_that_come_together_share_an_entry_of_the_log(bus: Bus) -> None:
    done = Completion("id", Outcome.COMPLETED)
    async with device(Batching.OPERATION) as d:
        outcomes = Outcomes(d.executor.settings, bus)
        permits = [permit(await put(bus, f"r{i}", sample(1)), sample(1)) for i in range(3)]
        keys = [one.operation for one in permits]
        outcomes.unended.update(keys)
        await asyncio.gather(*(outcomes.log_end(one, done, Context()) for one in permits))
    assert await bus.log.end() == 1
    async with aclosing(bus.log.read_entries()) as entries:
        entry = await anext(entries)
    assert isinstance(entry.event, OperationsFinished)
    assert [one.key for one in entry.event.operations] == keys


async def test_operation_without_a_payload_fails_and_a_permit_out_of_order_does_not_run(
    bus: Bus,
) -> None:
    log = Log()
    following = asyncio.create_task(log.follow(bus))
    async with device(Batching.OPERATION) as d:
        running = leader(d, bus)
        missing = OperationKey(KEY.tenant, KEY.job, KEY.deployment, "7")
        await running.run(given(permit(missing, LoadState("name"))))
        event = await log.until(lambda e: isinstance(e, OperationFinished) and e.key == missing)
        assert isinstance(event, OperationFinished)
        assert event.error is not None
        assert (event.outcome, event.error.code) == (Outcome.FAILED, Code.DATA_LOSS)
        d.executor.applied = 3
        late = await put(bus, "8", LoadState("n"))
        with pytest.raises(ResourceError, match="got seq 3"):
            await running.run(given(permit(late, LoadState("n"))))
    following.cancel()
    await asyncio.wait([following])


async def test_sync_whose_weights_are_in_but_cannot_be_booked_makes_the_life_dirty(
    bus: Bus, short_dir: Path
) -> None:
    """The state manager dies for good between the copy and its note: the heap has changed."""
    log = Log()
    following = asyncio.create_task(log.follow(bus))
    async with device(Batching.OPERATION) as d, daemon(short_dir, reconnect_s=0.1) as state:
        heap, slots = d.heap, d.backend.slots
        policy = await start(state, POLICY, heap.num_bytes, slots=slots, content=7, device=0)
        await state.agent.switch_in(POLICY, 1, 1, [])
        await policy.client.versions.create(VersionKey(POLICY, 1), d.executor.weight_slots)
        await state.agent.switch_out(POLICY, 1, 1)
        await state.agent.register_wpg(["mine"], KEY, 1, [0], 0)
        client = await RankStateClient.connect(
            state.socket,
            "mine",
            applied=lambda: 0,
            on_loaded=d.backend.weights_changed,
            reconnect_s=0.1,
        )
        state.ranks.append(client)
        await client.register_heap(heap, slots, frozen=True)
        await client.commit_initial(0)
        await state.agent.switch_in(KEY, 1, 2, [])
        d.backend.on_changed = lambda: os.kill(state.pid, signal.SIGKILL)
        sync = SyncWeights("policy", 1)
        key = await put(bus, "1", sync)
        await leader(d, bus, client).run(given(permit(key, sync)))
        event = await log.until(lambda e: isinstance(e, OperationFinished) and e.key == key)
        assert isinstance(event, OperationFinished)
        assert (event.outcome, event.dirty) == (Outcome.FAILED, True)
        await state.process.wait()  # that it is dead is known later than that it is away
    following.cancel()
    await asyncio.wait([following])
