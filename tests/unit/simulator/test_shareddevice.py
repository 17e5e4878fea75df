"""Operations side by side on an emulated device, and the promises of placement by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loadtest.papers.scenarios.weave_company import table_of as device_table
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import KindSlowdown, SlowdownTable
from phaseloom.common.process.slowdowns import SUB_STAGES
from phaseloom.simulator.agenda import NEVER_S, Agenda
from phaseloom.simulator.engine import simulate
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.metrics import Result
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.shareddevice import SharedDevice, Work, claim_of
from tests.unit.simulator.builders import config

GB = 10**9
TOLERANCE = 1.05


def table_of(alone: float, beside: float, spread: float = 1.0) -> SlowdownTable:
    """All is slower by `alone` on a half of the device, by `beside` more beside anything, and by
    `spread` at worst."""
    shares = {0.5: alone, 1.0: 1.0}
    kinds = {
        kind: KindSlowdown(shares, spread={0.5: (alone, alone * spread)}) for kind in SUB_STAGES
    }
    factors = {kind: dict.fromkeys(SUB_STAGES, beside) for kind in SUB_STAGES}
    return SlowdownTable("test", kinds, (0.5,), factors)


def run_out(agenda: Agenda) -> None:
    while agenda.next_s < NEVER_S:
        agenda.run_next()


def test_an_operation_is_slower_for_as_long_as_there_is_another() -> None:
    """Both are half as fast again slower: A has done 50 of 100 when B's 50 are done, at 75 s."""
    agenda = Agenda()
    company = SharedDevice(agenda, 2, table_of(1.25, 1.2))
    ended: dict[str, float] = {}

    def note(name: str) -> None:
        ended[name] = agenda.now_s

    def begin(name: str, work_s: float) -> None:
        key = OperationKey("t", name, "sampler", "1")
        company.set_units(name, 1)
        claim = claim_of(name, name, "generate")
        company.run(key, Work(claim, work_s, partial(note, name), lambda: True))

    begin("a", 100.0)
    begin("b", 50.0)
    agenda.at(75.0, company.set_units, "a", 2)
    run_out(agenda)
    assert ended == pytest.approx({"a": 125.0, "b": 75.0})


def test_what_is_dead_keeps_nobody_company() -> None:
    agenda = Agenda()
    company = SharedDevice(agenda, 2, table_of(1.25, 1.2))
    ended: list[float] = []
    alive = {"a": True, "b": True}
    for name in ("a", "b"):
        company.set_units(name, 1)
        work = Work(
            claim_of(name, name, "generate"),
            60.0,
            lambda: ended.append(agenda.now_s),
            partial(alive.__getitem__, name),
        )
        company.run(OperationKey("t", name, "sampler", "1"), work)

    def kill() -> None:
        alive["b"] = False
        company.set_units("a", 2)

    agenda.at(30.0, kill)
    run_out(agenda)
    assert ended == pytest.approx([30.0 + 60.0 - 20.0])


# --- promises ------------------------------------------------------------------------------------


def ran(
    jobs: Sequence[SimJob], promised: SlowdownTable | None, really: SlowdownTable, seed: int = 0
) -> Result:
    """A run of `coexec_repack` on devices of two units, as many as there could be use for."""
    nodes = [
        PoolSpec(ROLLOUT, len(jobs), 14.8, 2000 * GB, units=2, device_bytes=700 * GB),
        PoolSpec(TRAIN, len(jobs), 42.24, 2000 * GB, units=2, device_bytes=700 * GB),
    ]
    chosen = config(
        placement="coexec_repack",
        multiplexing="greedy" if promised else "off",
        slowdowns=promised,
        switch_s=5.0,
    )
    return simulate(jobs, nodes, chosen, seed=seed, slowdowns=really)


def job(name: str, rollout_s: float, train_s: float, slo: float, **changes: object) -> SimJob:
    demand = Demand(host_bytes=300 * GB, load_s=2.5, offload_s=2.5)
    fields: dict[str, object] = {"arrival_s": 0.0, "iterations": 60, "move_s": 308.0}
    fields |= {"phases": (Phase(ROLLOUT, rollout_s), Phase(TRAIN, train_s))}
    fields |= {"demands": {ROLLOUT: demand, TRAIN: demand}}
    return SimJob(name, slo=slo, **{**fields, **changes})  # type: ignore[arg-type]


def test_jobs_that_roll_out_most_of_the_time_cost_less_side_by_side() -> None:
    jobs = [job(f"j{i}", 300.0, 75.0, 1.5) for i in range(4)]
    table = table_of(1.05, 1.05, spread=1.05)
    in_turns, counted = ran(jobs, None, table), ran(jobs, table, table.at_worst())
    assert counted.cost < 0.85 * in_turns.cost
    assert counted.slo_attainment == in_turns.slo_attainment == 1.0


_jobs = st.lists(
    st.tuples(
        st.integers(50, 600),
        st.integers(25, 600),
        st.floats(1.0, 2.0),
        st.integers(0, 20_000),
        st.sampled_from([20, 60, 120]),
        st.sampled_from([100, 300, 450]),
    ),
    min_size=2,
    max_size=7,
)


@given(_jobs, st.floats(1.0, 1.5), st.floats(1.0, 1.2), st.floats(1.0, 1.3), st.booleans())
@settings(max_examples=30, deadline=None)
def test_no_job_is_slower_than_its_slo_whatever_the_table_within_its_spread(
    drawn: list[tuple[int, int, float, int, int, int]],
    alone: float,
    beside: float,
    spread: float,
    at_worst: bool,
) -> None:
    """The promise is of the mean iteration over a life, and holds at the greatest slowdowns. The
    orbits that a group can come into are too many to try all, hence the tolerance."""
    jobs = [
        job(
            f"j{i}",
            float(rollout_s),
            float(train_s),
            slo,
            arrival_s=float(arrival_s),
            iterations=iterations,
            demands={
                ROLLOUT: Demand(host_bytes=size * GB, load_s=2.5, offload_s=2.5),
                TRAIN: Demand(host_bytes=size * GB, load_s=2.5, offload_s=2.5),
            },
        )
        for i, (rollout_s, train_s, slo, arrival_s, iterations, size) in enumerate(drawn)
    ]
    table = table_of(alone, beside, spread)
    result = ran(jobs, table, table.at_worst() if at_worst else table)
    paces = {each.name: (each.mean_iteration_s / each.solo_s, each.slo) for each in result.jobs}
    late = {name for name, (pace, slo) in paces.items() if pace > TOLERANCE * slo}
    assert not late, paces


def test_devices_of_the_study_are_what_they_are_said_to_be() -> None:
    """On the last kind a rollout decodes few rows from its first step to its last."""
    few, gpu = device_table("GPU, few rows"), device_table("GPU")
    assert few.factor("prefill", "decode_large") == gpu.factor("decode_small", "decode_small")
    assert few.alone("prefill", 0.25) == gpu.alone("decode_small", 0.25)
    assert few.factor("train", "decode_large") == gpu.factor("train", "decode_small")
    assert few.alone("train", 0.5) == gpu.alone("train", 0.5)
    assert replace(few, kinds={}, beside={}) == replace(gpu, kinds={}, beside={})
