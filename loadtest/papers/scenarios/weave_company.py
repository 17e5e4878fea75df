"""Placement that counts on sharing in space, run: what it saves, and who keeps its SLO.

Jobs of WEAVE Table 6 under `coexec_repack` on devices that may be shared in space, with states of
several jobs on a device as far as it holds them. Three ways: all phases take turns; rollouts are
side by side and placement does not know; they are, and it counts on it. How much slower phases
really are beside others, a table says, once the usual numbers of it and once the greatest that were
measured, while placement always promises by the greatest.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec.structs import replace

from loadtest.papers.scenarios.report import at_least, at_most, only
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.workloads.weave import PROFILES, generate
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.common.process.slowdowns import read
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.clusters import (
    SWITCHING,
    ample,
    config,
    planned_switch_s,
    record_of,
    run,
)
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import ROLLOUT, TRAIN
from phaseloom.simulator.tables import PAPER_TABLE, TWO_CORES_TABLE

NUM_JOBS = 50
DEVICE_BYTES = {ROLLOUT: 768 * 10**9, TRAIN: 640 * 10**9}
"""The memory of the eight GPUs of a node: H20 with 96 GB, H800 with 80 GB."""
_SEEDS = (0, 1)
_IN_TURNS, _BESIDE, _COUNTED = "in turns", "side by side", "counted on"
_AT_WORST = "counted on, at worst"
WAYS = (_IN_TURNS, _BESIDE, _COUNTED, _AT_WORST)
TWO_CORES, GPU, FEW_ROWS = "two cores", "GPU", "GPU, few rows"
_ON_GPUS = ("Mixed", "RH")
"""The workloads that are run by a GPU's tables, too."""
_UNITS = {TWO_CORES: 2, GPU: 4, FEW_ROWS: 4}


@cache
def table_of(device: str) -> SlowdownTable:
    """The slowdowns of a kind of device.

    On the last kind all of a rollout is taken to be decoding of few rows.
    """
    if device == TWO_CORES:
        return read(TWO_CORES_TABLE)
    table = read(PAPER_TABLE)
    if device == GPU:
        return table
    few = "decode_small"
    as_few = dict.fromkeys(("decode_small", "decode_large", "prefill", "reference"), few)
    return replace(
        table,
        kinds={kind: table.kinds[as_few.get(kind, kind)] for kind in table.kinds},
        beside={
            kind: {
                other: table.factor(as_few.get(kind, kind), as_few.get(other, other))
                for other in table.kinds
            }
            for kind in table.kinds
        },
    )


def _case(profile: str, device: str, way: str, seed: int) -> Record:
    jobs = generate(profile, seed, num_jobs=NUM_JOBS, switching=SWITCHING)
    table = table_of(device)
    settings = replace(
        config("coexec_repack", "fcfs", switch_s=planned_switch_s(jobs)),
        multiplexing="off" if way == _IN_TURNS else "greedy",
        slowdowns=table if way in (_COUNTED, _AT_WORST) else None,
    )
    nodes = [
        replace(pool, units=_UNITS[device], device_bytes=DEVICE_BYTES[pool.pool])
        for pool in ample(jobs)
    ]
    really = table.at_worst() if way == _AT_WORST else table
    result, cpu_s = run(jobs, nodes, settings, seed, slowdowns=really)
    workload = profile if device == TWO_CORES else f"{profile}, {device}"
    record = record_of(result, cpu_s, policy=way, seed=seed, workload=workload)
    return only(record, "jobs", "dollars", "slo_attainment", "makespan_s", "moves")


def _run(options: Options) -> Report:
    ways = dict.fromkeys((_IN_TURNS, *options.policies_of(WAYS)))
    runs = [(TWO_CORES, way, profile) for profile in PROFILES for way in ways]
    # In turns it does not matter what devices could do, nor is anything else tried on a GPU.
    runs += [(device, _COUNTED, profile) for device in (GPU, FEW_ROWS) for profile in _ON_GPUS]
    cases = [
        Case(f"{profile}, {device}, {way}, seed {seed}", _case, (profile, device, way, seed))
        for device, way, profile in runs
        if way in ways
        for seed in options.seeds or _SEEDS
    ]
    records: list[Record] = options.run_cases(cases)
    base = {(r.workload, r.seed): r for r in records if r.policy == _IN_TURNS}
    records = [
        replace(record, more={"over_in_turns": _dollars(record) / _dollars(_base(record, base))})
        for record in records
    ]
    return Report(
        scenario="weave-company",
        about=f"{NUM_JOBS} jobs whose rollouts may be side by side on a device",
        parameters={"devices": {device: table_of(device).source for device in _UNITS}},
        records=records,
        targets=_targets(records, base),
    )


def _base(record: Record, base: dict[tuple[str, int], Record]) -> Record:
    """The run of the same jobs in turns."""
    return base[record.workload.split(",")[0], record.seed]


def _dollars(record: Record) -> float:
    assert record.dollars is not None
    return record.dollars


def _targets(records: list[Record], base: dict[tuple[str, int], Record]) -> list[Target]:
    targets = []
    counted = [r for r in records if r.policy in (_COUNTED, _AT_WORST)]
    for workload, way in dict.fromkeys((r.workload, r.policy) for r in counted):
        found = [r for r in counted if (r.workload, r.policy) == (workload, way)]
        most = max(r.more["over_in_turns"] for r in found)
        targets.append(at_most(f"{workload}, {way}: cost over in turns", most, 1.0))
        least = min(r.slo_attainment or 0.0 for r in found)
        aim = min(_base(r, base).slo_attainment or 0.0 for r in found)
        targets.append(at_least(f"{workload}, {way}: SLO attainment", least, aim))
    return targets


def _draw(report: Report, path: Path) -> None:
    records = [r for r in report.records if r.workload in PROFILES]
    with canvas(path, 2) as (costs, slos):
        bars(costs, records, "over_in_turns", "cost over that in turns", aim=1.0)
        bars(slos, records, "slo_attainment", "share of jobs within SLO")


SCENARIO = Scenario(
    about="what placement saves by counting on rollouts side by side",
    run=_run,
    draw=_draw,
    policies=WAYS,
)
