"""Small workloads for the simulator's tests."""

from __future__ import annotations

from phaseloom.common.contract.specs import SchedulerConfig
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.validate import validate
from phaseloom.simulator.agenda import Agenda
from phaseloom.simulator.engine import Engine
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.metering import Meter
from phaseloom.simulator.nodes import PoolSpec


def config(**changes: object) -> SchedulerConfig:
    """The policies alone decide: no quantum, no grace, no guesses."""
    fields: dict[str, object] = {
        "placement": "pack",
        "ordering": "fcfs",
        "idle_grace_s": 0.0,
        "quantum_s": 0.0,
        "seal_every": 0,
        "max_losses": 50,
        "max_reading": 64,
        "phase_hold_s": 0.0,
        "speculative_switch_in": False,
        # Not at the moment of anything else.
        "node_grace_s": 31.71,
    }
    return SchedulerConfig(**{**fields, **changes})  # type: ignore[arg-type]


def job(name: str = "a", arrival_s: float = 0.0, iterations: int = 3, **changes: object) -> SimJob:
    """10 s of rollout, then 5 s of training."""
    fields: dict[str, object] = {"phases": (Phase(ROLLOUT, 10.0), Phase(TRAIN, 5.0))}
    return SimJob(name, arrival_s, iterations, **{**fields, **changes})  # type: ignore[arg-type]


def switching(load_s: float = 1.0, offload_s: float = 0.5) -> dict[str, Demand]:
    return {pool: Demand(load_s=load_s, offload_s=offload_s) for pool in (ROLLOUT, TRAIN)}


def pools(num_nodes: int = 1) -> list[PoolSpec]:
    return [PoolSpec(ROLLOUT, num_nodes, 2.0), PoolSpec(TRAIN, num_nodes, 4.0)]


MAX_EVENTS = 20_000
"""Of a small workload: more is a loop that does not come to rest."""


def checked_engine() -> tuple[Engine, Agenda, Meter]:
    """One that checks the core's invariants after each step, and keeps its log."""
    agenda, meter = Agenda(), Meter(records_spans=True)
    return Engine(agenda, meter, records=True, after_step=_check), agenda, meter


def _check(core: Core) -> None:
    validate(core.state)
    assert core.state.sequence < MAX_EVENTS, "the workload does not come to rest"
