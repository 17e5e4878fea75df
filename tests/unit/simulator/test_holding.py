"""The default ordering on two devices, over random jobs: what it must never do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phaseloom.scheduler.core.core import Core
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.comparison.clusters import live_config
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.world import World
from tests.support.contention import LOAD_S, OFFLOAD_S, Call, Contention, Loop, config_of

seconds = st.sampled_from([0.5, 1.0, 2.5, 4.0, 9.0])


@st.composite
def jobs_of_two_pools(draw: st.DrawFn) -> list[SimJob]:
    half_s = draw(st.sampled_from([0.0, 0.5, 1.5, 4.0]))
    demand = Demand(load_s=half_s, offload_s=half_s)
    return [
        SimJob(
            name=f"j{index}",
            arrival_s=draw(seconds),
            iterations=6,
            phases=(
                Phase(ROLLOUT, draw(seconds), kind="generate"),
                Phase(TRAIN, draw(seconds), kind="forward_backward"),
                Phase(TRAIN, 0.5, kind="optim_step"),
            ),
            demands={ROLLOUT: demand, TRAIN: demand},
            submission=draw(st.sampled_from(Submission)),
        )
        for index in range(draw(st.integers(2, 4)))
    ]


def check_no_crossed_holds(core: Core) -> None:
    """No two jobs each hold an idle device that the other one needs."""
    state = core.state
    idle = [
        slot
        for node in state.nodes.values()
        for device in node.devices
        for slot in device.slots
        if not slot.running and slot.ready and state.now_s > slot.idle_since_s + 0.1
    ]
    waits = {(slot.holder, job) for slot in idle for job in slot.ready.values()}
    crossed = [pair for pair in waits if pair[0] != pair[1] and pair[::-1] in waits]
    assert not crossed, f"{crossed} at {state.now_s}"


@settings(max_examples=40, deadline=None)
@given(jobs=jobs_of_two_pools())
def test_two_jobs_never_hold_the_device_that_the_other_needs(jobs: list[SimJob]) -> None:
    agenda, meter = Agenda(), Meter()
    engine = Engine(agenda, meter, after_step=check_no_crossed_holds)
    pools = [PoolSpec(ROLLOUT, 1, 1.0, 10**12), PoolSpec(TRAIN, 1, 1.0, 10**12)]
    world = World(agenda, engine.append, meter, jobs, pools)
    engine.run(world, live_config(duty_limit=1.0))
    assert {job.outcome for job in meter.jobs.values()} == {"done"}


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([1.0, 10.0, 60.0]),
            st.sampled_from([0.0, 5.0, 15.0, 200.0]),
            st.booleans(),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_no_operation_waits_longer_than_three_cycles_of_every_job(
    shapes: list[tuple[float, float, bool]],
) -> None:
    """Cycles that include both switches."""
    loops = [
        Loop(
            f"j{i}",
            [Call("forward", work_s, 2.0), Call("optim_step", work_s, think_s)],
            12,
            serial,
        )
        for i, (work_s, think_s, serial) in enumerate(shapes)
    ]
    world = Contention(config_of("hold", quantum_s=2.0, idle_grace_s=0.03), loops).run()
    switches_s = 2 * (OFFLOAD_S + LOAD_S)
    assert max(world.waits_s) <= 3 * sum(loop.period_s + switches_s for loop in loops)
