"""GPU-hours of a training step: split, shared by two jobs, colocated (PlexRL §6.2, Fig. 7b).

`split`: a job has its own rollout and training GPUs (Table 1), and rollout runs one step ahead.
`hrrs` and `live`: two such jobs share the training GPUs, under the paper's order and under a mesh's
default settings. `colocated`: one job runs both phases in turn on the training GPUs.

Times of operations are those of Table 2. The paper publishes neither switch times except 19 s at
30B nor how long a colocated rollout takes. Here a switch takes as long as in `plexrl-fig8`, and a
rollout on more replicas is shorter by as much as decoding the same samples over them is (`spatial.
pipelines`): the longest response takes its time, whatever the number of replicas. At 235B the
optimizer state stays in host memory, so phases of a colocated job switch for free.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import NamedTuple

from msgspec.structs import replace

from loadtest.papers.scenarios.jigsaw import HOMOGENEOUS, ROWS
from loadtest.papers.scenarios.report import at_least, mean_of
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.spatial import pipelines
from loadtest.papers.workloads import plexrl
from phaseloom.common.contract.specs import SchedulerConfig, SchedulerSettings
from phaseloom.simulator.comparison.clusters import config, run
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Published, Record, Report
from phaseloom.simulator.draws import Draws
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob
from phaseloom.simulator.nodes import PoolSpec

STEPS = 100
JITTER = 0.05
"""The sigma of a rollout."""


class Gpus(NamedTuple):
    """The parallel settings of Table 1, in GPUs."""

    train: int
    rollout: int
    replica: int
    """GPUs of a replica that rolls out."""


GPUS = {"7B": Gpus(8, 2, 2), "30B": Gpus(64, 8, 2), "235B": Gpus(96, 32, 8)}
_PAPER_SAVED = {"7B": 0.3136, "30B": 0.3010, "235B": 0.3758}
_WAYS = ("split", "hrrs", "live", "colocated")


def table_2_job(name: str, model: plexrl.Model, *, steps: int = STEPS, ahead: int = 1) -> SimJob:
    """A job whose rollout fills its cycle and whose training is three operations."""
    rollout_s = model.cycle_s if ahead else model.cycle_s - model.train_s
    works = (
        ("forward", model.compute_log_prob_s),
        ("optim_step", model.update_actor_s),
        ("publish_weights", model.sync_weight_s),
    )
    return SimJob(
        name=name,
        arrival_s=0.0,
        iterations=steps,
        phases=(
            Phase(ROLLOUT, rollout_s, 1.3 * rollout_s, JITTER),
            *(Phase(TRAIN, seconds, kind=kind) for kind, seconds in works),
        ),
        demands={
            ROLLOUT: Demand(host_bytes=1),
            TRAIN: Demand(load_s=model.load_s, offload_s=model.load_s),
        },
        steps_ahead=ahead,
        model=model.name,
    )


def shared_train_node(jobs: Sequence[SimJob]) -> list[PoolSpec]:
    """One train node for all jobs, and a rollout node with memory for one job for each of them.

    A node stands for all of a deployment's GPUs.
    """
    return [PoolSpec(ROLLOUT, len(jobs), host_bytes=1), PoolSpec(TRAIN, 1)]


def ordering_config(ordering: str) -> SchedulerConfig:
    """The settings of an ordering policy; `live`: those of a mesh that names none."""
    if ordering == "live":
        settings = SchedulerConfig.of(SchedulerSettings())
        return replace(settings, placement="pack", duty_limit=1.0, seal_every=0)
    return config("pack", ordering, duty_limit=1.0)


def _colocated_s(model: plexrl.Model, seed: int) -> float:
    """The time of a step on the training GPUs alone."""
    job = table_2_job("a", model)
    draws = Draws(job, seed)
    rollout_s = mean(draws.of(step)[0] for step in range(STEPS))
    gpus = GPUS[model.name]
    times = []
    for num_replicas in (gpus.rollout // gpus.replica, gpus.train // gpus.replica):
        rng = Random(seed)
        steps = (
            pipelines.iteration(rng, HOMOGENEOUS["4B AIME"], ROWS, num_replicas) for _ in range(4)
        )
        times.append(mean(step.rollout_s for step in steps))
    switch_s = 0.0 if model.name == "235B" else 2 * model.load_s
    return rollout_s * times[1] / times[0] + model.train_s + switch_s


def _case(name: str, way: str, seed: int) -> Record:
    model = next(model for model in plexrl.MODELS if model.name == name)
    gpus = GPUS[name]
    num_jobs = 2 if way in ("hrrs", "live") else 1
    switches = None
    if way == "colocated":
        makespan_s = STEPS * _colocated_s(model, seed)
        held = gpus.train
    else:
        jobs = [table_2_job(f"j{index}", model) for index in range(num_jobs)]
        result, _ = run(
            jobs, shared_train_node(jobs), ordering_config("hrrs" if way == "split" else way), seed
        )
        makespan_s, switches = result.makespan_s, result.switches
        held = gpus.train + num_jobs * gpus.rollout
    hours = held * makespan_s / 3600 / (num_jobs * STEPS)
    return Record(
        policy=way,
        seed=seed,
        workload=name,
        jobs=num_jobs,
        makespan_s=makespan_s,
        switches=switches,
        more={"gpu_hours_a_step": hours},
    )


def _run(options: Options) -> Report:
    ways = dict.fromkeys(("split", *options.policies_of(_WAYS)))
    records: list[Record] = options.run_each(_case, GPUS, ways, (0, 1, 2))
    split = {(r.workload, r.seed): r.more["gpu_hours_a_step"] for r in records[:]
             if r.policy == "split"}  # fmt: skip
    records = [
        replace(
            r, more={**r.more, "of_split": r.more["gpu_hours_a_step"] / split[r.workload, r.seed]}
        )
        for r in records
    ]
    found = {
        (name, way): mean_of(chosen, "of_split")
        for name in GPUS
        for way in ways
        if (chosen := [r for r in records if (r.workload, r.policy) == (name, way)])
    }
    return Report(
        scenario="plexrl-fig7b",
        about="GPU-hours of a training step, two jobs packed (PlexRL Fig. 7b)",
        parameters={"steps": STEPS, "gpus": {name: list(gpus) for name, gpus in GPUS.items()}},
        records=records,
        targets=[
            at_least(f"{name}, live: saved against split", 1 - found[name, "live"], saved)
            for name, saved in _PAPER_SAVED.items()
            if (name, "live") in found
        ],
        published=[
            Published(f"{name}, {way}: GPU-hours of split's", 1 - saved, found[name, way])
            for name, saved in _PAPER_SAVED.items()
            for way in ("hrrs", "live")
            if (name, way) in found
        ],
    )


def _draw(report: Report, path: Path) -> None:
    with canvas(path, 1, width=8.0) as (panel,):
        bars(panel, report.records, "of_split", "GPU-hours of a step, of split's", aim=1.0)


SCENARIO = Scenario(
    about="GPU-hours of a step: split, shared by two jobs, colocated (PlexRL Fig. 7b)",
    run=_run,
    draw=_draw,
    policies=_WAYS,
)
