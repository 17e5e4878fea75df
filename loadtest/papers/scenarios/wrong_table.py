"""The cost of a wrong table of slowdowns, as it is and where the scheduler corrects it.

Two jobs always have work on one device of two units, under `greedy`. The scheduler decides by the
table of two cores, and operations are slower by another one, the truth. The ways: in turns; by the
table as it is; by the table, corrected by what is seen; by the truth from the beginning. Durations
are lognormal, so that a single operation says little. What a job's iterations consist of is that of
`4B GSM8K` (`jigsaw`), with training in four batches.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from loadtest.papers.scenarios.jigsaw import HOMOGENEOUS
from loadtest.papers.scenarios.report import at_least, mean_of, only
from loadtest.papers.scenarios.scenario import Options, Scenario
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.common.process.slowdowns import read
from phaseloom.simulator.comparison.clusters import config, record_of, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Record, Report, Target
from phaseloom.simulator.jobs import TRAIN, Phase, SimJob
from phaseloom.simulator.nodes import PoolSpec
from phaseloom.simulator.tables import TWO_CORES_TABLE

ITERATIONS = 100
ITERATION_S = 60.0
BATCHES = 4
"""The training batches of an iteration."""
SIGMA = 0.15
"""The sigma of the logarithms of durations; on the mesh, durations of a kind differ by 9 % at the
median."""
_SEEDS = (0, 1, 2)
IN_TURNS, AS_IT_IS, CORRECTED, KNOWN = "in turns", "as it is", "corrected", "known"
WAYS = (IN_TURNS, AS_IT_IS, CORRECTED, KNOWN)
RIGHT = "the table is right"
HALF_SLOWER = "all is half slower beside others"
TRAINING_LOSES = "training beside training loses 30 %"
ALL_LOSES = "all loses 20 % side by side"
TRUTHS = (RIGHT, HALF_SLOWER, TRAINING_LOSES, ALL_LOSES)


def truth_of(name: str) -> SlowdownTable:
    """How much slower operations really are."""
    table = read(TWO_CORES_TABLE)

    def really(kind: str, other: str) -> float:
        """The factor for a kind beside another. Where both are slowed down by s in all, they get
        2 / s done in the time in which one alone gets 1 done."""
        if name == TRAINING_LOSES and kind == other == "train":
            return 2 / 0.7 / table.alone(kind, 0.5)
        if name == ALL_LOSES:
            return 2 / 0.8 / table.alone(kind, 0.5)
        return table.factor(kind, other) * (1.5 if name == HALF_SLOWER else 1.0)

    beside = {kind: {other: really(kind, other) for other in table.kinds} for kind in table.kinds}
    return replace(table, beside=beside)


def _job(name: str, arrival_s: float) -> SimJob:
    work = HOMOGENEOUS["4B GSM8K"]
    rollout = Phase(TRAIN, work.rollout * ITERATION_S, sigma=SIGMA, kind="generate", think_s=0.5)
    reference = Phase(TRAIN, work.reference * ITERATION_S, sigma=SIGMA, kind="forward")
    batch_s = work.train * ITERATION_S / BATCHES
    train = Phase(TRAIN, batch_s, sigma=SIGMA, kind="forward_backward", think_s=0.05)
    step = Phase(TRAIN, batch_s / 10, kind="optim_step", think_s=0.5)
    return SimJob(name, arrival_s, ITERATIONS, (rollout, reference, *[train] * BATCHES, step))


def _case(truth: str, way: str, seed: int) -> Record:
    settings = replace(
        config("pack", "fcfs"),
        multiplexing="off" if way == IN_TURNS else "greedy",
        slowdowns=truth_of(truth if way == KNOWN else RIGHT),
        corrects_slowdowns=way == CORRECTED,
    )
    jobs = [_job("a", 0.0), _job("b", ITERATION_S / 3)]
    nodes = [PoolSpec(TRAIN, 1, units=2)]
    result, cpu_s = run(jobs, nodes, settings, seed, slowdowns=truth_of(truth))
    record = record_of(result, cpu_s, policy=way, seed=seed, workload=truth)
    return only(record, "jobs", "makespan_s")


def _run(options: Options) -> Report:
    ways = dict.fromkeys((IN_TURNS, *options.policies_of(WAYS)))
    records: list[Record] = options.run_each(_case, TRUTHS, ways, _SEEDS)
    turns_s = {(r.workload, r.seed): r.makespan_s for r in records if r.policy == IN_TURNS}
    records = [
        replace(r, more={"over_in_turns": (turns_s[r.workload, r.seed] or 0.0) / r.makespan_s})
        for r in records
        if r.makespan_s
    ]
    return Report(
        scenario="wrong-table",
        about="Two jobs on one device by a table of slowdowns that may be wrong",
        parameters={"iterations": ITERATIONS, "sigma": SIGMA, "table": truth_of(RIGHT).source},
        records=records,
        targets=_targets(records),
    )


def _targets(records: list[Record]) -> list[Target]:
    def gets_done(truth: str, way: str) -> float:
        found = [r for r in records if (r.workload, r.policy) == (truth, way)]
        return mean_of(found, "over_in_turns")

    if not {CORRECTED, AS_IT_IS, KNOWN} <= {r.policy for r in records}:
        return []
    targets = []
    for truth in TRUTHS:
        wrong, corrected, known = (gets_done(truth, way) for way in (AS_IT_IS, CORRECTED, KNOWN))
        if truth == RIGHT:
            targets.append(at_least(f"{truth}: corrected over as it is", corrected / wrong, 0.98))
        else:
            won_back = (corrected - wrong) / (known - wrong)
            targets.append(at_least(f"{truth}: won back by correcting", won_back, 0.5))
    return targets


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 1, width=9.0, height=3.5) as (axes,):
        bars(axes, report.records, "over_in_turns", "throughput over that in turns", aim=1.0)


SCENARIO = Scenario(
    about="what a wrong table of slowdowns costs, and correcting it by what is seen",
    run=_run,
    draw=_draw,
    policies=WAYS,
)
