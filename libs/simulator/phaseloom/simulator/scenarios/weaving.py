"""What WEAVE's scenarios of whole clusters share: policies, costs of switching, the yardstick."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from phaseloom.simulator.jobs import SimJob
from phaseloom.simulator.metrics import Result
from phaseloom.simulator.optimum import Pricing, Terms
from phaseloom.simulator.scenarios.common import HOST_BYTES, ample, config, record_of, run
from phaseloom.simulator.scenarios.optimal import over_optimal
from phaseloom.simulator.scenarios.report import Record
from phaseloom.simulator.workloads.weave import Switching

ORDERINGS = {
    "coexec": "round_robin",
    "coexec_repack": "fcfs",
    "random": "round_robin",
    "most_idle": "round_robin",
    "solo": "fcfs",
}
SWITCHING = Switching(phase_s=5.0, move_s=308.0)
"""A switch of a phase: 2 s in WEAVE Table 4, 2.5 to 9 s in llm-d's recording; a move: 197 to 419 s
(WEAVE §6.6)."""
MAX_GROUP_JOBS = 5
EFFORT = 0.2
"""Of the optimum's solver, in its deterministic seconds: the sets of jobs that it does not finish
are within a few percent of their bounds by then, and cost as many real ones."""


def pricing(max_group_jobs: int = MAX_GROUP_JOBS) -> Pricing:
    return Pricing(Terms(host_bytes=HOST_BYTES, max_group_jobs=max_group_jobs), effort=EFFORT)


def planned_switch_s(jobs: Sequence[SimJob]) -> float:
    """A phase of the largest job leaves and another comes."""
    takes = [take for job in jobs for take in job.takes.values()]
    return max(take.offload_s for take in takes) + max(take.load_s for take in takes)


def measured(
    jobs: Sequence[SimJob],
    policy: str,
    seed: int,
    *,
    workload: str = "",
    max_group_jobs: int = MAX_GROUP_JOBS,
) -> tuple[Record, Result]:
    """Run a workload under a policy, and compare it with the optimum of whoever was there."""
    settings = config(
        policy,
        ORDERINGS[policy],
        max_group_jobs=max_group_jobs,
        switch_s=planned_switch_s(jobs),
    )
    result, cpu_s = run(jobs, ample(jobs), settings, seed)
    record = record_of(result, cpu_s, policy=policy, seed=seed, workload=workload)
    ratio, gap = over_optimal(result, jobs, pricing(max_group_jobs))
    return replace(record, cost_over_optimal=ratio, optimal_gap=gap or None), result
