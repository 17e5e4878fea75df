"""The live shell and the simulator's engine make the same of one workload, command by command."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.commands import Command, Permit, StartWpg
from phaseloom.common.contract.events import TimerFired
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.scheduler.core.policies.registry import ORDERING as ORDERINGS
from phaseloom.scheduler.core.policies.registry import PLACEMENT as PLACEMENTS
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.controllers import Retries
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob, Submission
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import Costs
from phaseloom.simulator.world import Crash, Fault, NodeFault, WorkersDie, World
from tests.support.live import Live
from tests.unit.simulator.builders import config, job, pools, switching

WORKLOAD = [
    job("a", demands=switching(), iterations=4),
    job("b", 3.0, demands=switching(), phases=(Phase(ROLLOUT, 8.0, 14.0, 0.5), Phase(TRAIN, 4.0))),
    job("c", 3.0, demands=switching(), submission=Submission.CYCLE, sync_s=2.0),
    job("d", 20.0, demands={ROLLOUT: Demand(2)}, steps_ahead=1, is_declared=False, start_s=3.0),
]
REPLAN_S = 0.73
FAULTS: list[Fault] = [
    WorkersDie(DeploymentKey("sim", "a", "policy"), 21.0),
    NodeFault("rollout-0", 30.0, 15.0),
    Crash("b", 50.0),
]


def simulated(
    jobs: Sequence[SimJob], scheduler: SchedulerConfig, faults: Sequence[Fault]
) -> Engine:
    agenda, meter = Agenda(), Meter()
    engine = Engine(agenda, meter, records=True, replan_s=REPLAN_S)
    engine.run(_world(agenda, engine, meter, jobs, faults), scheduler)
    return engine


async def lived(
    jobs: Sequence[SimJob], scheduler: SchedulerConfig, faults: Sequence[Fault]
) -> Live:
    agenda, meter = Agenda(), Meter()
    live = Live(agenda, scheduler, REPLAN_S)
    await live.run(_world(agenda, live, meter, jobs, faults))
    return live


def _world(
    agenda: Agenda,
    shell: Engine | Live,
    meter: Meter,
    jobs: Sequence[SimJob],
    faults: Sequence[Fault],
) -> World:
    return World(
        agenda,
        shell.append if isinstance(shell, Engine) else shell.take,
        meter,
        jobs,
        pools(2),
        costs=Costs(stop_s=0.5, restart_s=4.0, seal_s=1.0),
        retries=Retries(resubmit_s=5.0),
        faults=faults,
    )


def assert_same(live: list[Command], expected: list[Command]) -> None:
    """Of what one step sends to several deployments, the shell may send one's first."""
    assert sorted(live, key=lambda command: command.id) == expected
    assert by_deployment(live) == by_deployment(expected)


def by_deployment(commands: list[Command]) -> dict[str, list[Command]]:
    found: dict[str, list[Command]] = {}
    for command in commands:
        if isinstance(command, Permit):
            about = str(command.operation.deployment_key)
        else:
            about = str(getattr(command, "deployment", command.node))
        found.setdefault(about, []).append(command)
    return found


@pytest.mark.parametrize(
    ("placement", "ordering"),
    [("pack", name) for name in sorted(ORDERINGS)]
    + [(name, "fcfs") for name in sorted(PLACEMENTS)],
)
async def test_live_shell_and_simulator_give_the_same_commands(
    placement: str, ordering: str
) -> None:
    scheduler = config(placement=placement, ordering=ordering, seal_every=2, duty_limit=0.9)
    expected = simulated(WORKLOAD, scheduler, FAULTS)
    live = await lived(WORKLOAD, scheduler, FAULTS)
    assert live.log == expected.log
    assert_same(live.commands, expected.commands)
    assert sum(isinstance(command, Permit) for command in live.commands) > 24


async def test_node_that_stays_away_is_left_alike_live_and_simulated() -> None:
    """What has no seal there goes on elsewhere, or waits for a place; the rest waits for it."""
    scheduler = config(seal_every=2, node_grace_s=3.71, idle_grace_s=0.13)
    wrong = [NodeFault("rollout-0", 30.0, 60.0), NodeFault("train-1", 41.0, 60.0)]
    expected = simulated(WORKLOAD, scheduler, wrong)
    live = await lived(WORKLOAD, scheduler, wrong)
    assert live.log == expected.log
    assert_same(live.commands, expected.commands)
    moves = [c for c in live.commands if isinstance(c, StartWpg) and c.incarnation > 1]
    assert moves


async def test_timers_fire_alike_live_and_simulated() -> None:
    """With an idle grace and a quantum, timers and events fall on the same moments."""
    scheduler = config(
        ordering="hrrs", idle_grace_s=5.0, quantum_s=10.0, speculative_switch_in=True
    )
    jobs = [replace(one, arrival_s=0.0) for one in WORKLOAD]
    expected = simulated(jobs, scheduler, [])
    live = await lived(jobs, scheduler, [])
    assert live.log == expected.log
    assert_same(live.commands, expected.commands)
    assert sum(isinstance(event, TimerFired) for _, event in live.log) > 3
