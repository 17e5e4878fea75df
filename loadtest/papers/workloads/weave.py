"""Workloads after WEAVE §6.5: Table 6's job types, arrivals and lengths like Philly's.

The paper publishes the distributions of an iteration's times, and of arrivals only totals: 300 jobs
in 580 h, 14.4 h long on average and 142.9 h at most. Here lengths are lognormal, capped and scaled
to that; half of the gaps between arrivals are bursts, as in the real trace. The seed decides all.
"""

from __future__ import annotations

from math import exp
from random import Random

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison.clusters import Switching
from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob

PROFILES = ("Mixed", "BL", "RH", "TH")
WINDOW_H = 580.0
NUM_JOBS = 300
MEAN_H, LONGEST_H = 14.4, 142.9
_SIGMA = 1.47
_BURST_H, _QUIET_H = 0.13, 3.75
"""The mean gaps within a burst of arrivals and between bursts."""

_Range = tuple[float, float]
TIMES: dict[str, dict[str, tuple[_Range, _Range]]] = {
    "BL": {
        "S": ((50, 100), (50, 100)),
        "M": ((100, 200), (100, 200)),
        "L": ((200, 300), (200, 300)),
    },
    "RH": {
        "S": ((100, 200), (25, 50)),
        "M": ((200, 400), (50, 100)),
        "L": ((400, 600), (100, 200)),
    },
    "TH": {
        "S": ((25, 50), (100, 200)),
        "M": ((50, 100), (200, 400)),
        "L": ((100, 200), (400, 600)),
    },
}
"""The ranges of the seconds of (rollout, training), both uniform, by profile and size (Table 6)."""
MODELS = {"S": ("3B", "7B"), "M": ("7B", "14B"), "L": ("14B", "32B")}
NODES = {"A": {"S": 1, "M": 1, "L": 1}, "B": {"S": 1, "M": 2, "L": 4}}
"""The number of nodes of each pool, by variant and size."""


class Model(msgspec.Struct, frozen=True):
    """The working sets of a model in host memory on an 8-GPU node (WEAVE Table 2)."""

    rollout_gb: float
    train_gb: float


SIZES = {
    "3B": Model(113.4, 156.2),
    "7B": Model(275.7, 240.0),
    "14B": Model(445.4, 456.1),
    "32B": Model(490.3, 520.4),
}


FREE = Switching()


def generate(
    profile: str,
    seed: int,
    *,
    nodes: str = "A",
    slo: float = 0.0,
    num_jobs: int = NUM_JOBS,
    switching: Switching = FREE,
) -> list[SimJob]:
    """A workload of jobs, by arrival.

    Args: profile: one of `PROFILES`.
          nodes: `A`: one node of each pool for a job; `B`: by size.
          slo: the SLO of every job; 0: uniform between 1 and 2.
    """
    draws = Random(f"weave {profile} {seed}")
    arrivals_h = _arrivals_h(draws, num_jobs)
    lengths_h = _lengths_h(draws, num_jobs)
    return [
        draw_job(
            f"j{i}",
            arrivals_h[i],
            lengths_h[i],
            profile,
            draws,
            nodes=nodes,
            slo=slo,
            switching=switching,
        )
        for i in range(num_jobs)
    ]


def draw_job(
    name: str,
    arrival_h: float,
    length_h: float,
    profile: str,
    draws: Random,
    *,
    nodes: str = "A",
    slo: float = 0.0,
    switching: Switching = FREE,
) -> SimJob:
    """A job of Table 6, of any size.

    Args:   profile, nodes, slo, switching: as in `generate`.
    Raises: CallerError: there is no such profile, or no such variant of nodes.
    """
    if profile not in PROFILES or nodes not in NODES:
        raise CallerError(
            f"no workload {profile!r} on nodes {nodes!r}",
            field="workload",
            remedy=f"profiles {', '.join(PROFILES)}; nodes {', '.join(NODES)}",
        )
    kind = draws.choice(tuple(TIMES)) if profile == "Mixed" else profile
    size = draws.choice(tuple(MODELS))
    model = draws.choice(MODELS[size])
    rollout_s, train_s = (draws.uniform(low, high) for low, high in TIMES[kind][size])
    tolerance = slo or draws.uniform(1.0, 2.0)
    return SimJob(
        name=name,
        arrival_s=3600.0 * arrival_h,
        iterations=max(1, round(3600.0 * length_h / (rollout_s + train_s))),
        phases=(Phase(ROLLOUT, rollout_s), Phase(TRAIN, train_s)),
        demands=demands(model, NODES[nodes][size], NODES[nodes][size], switching),
        slo=tolerance,
        move_s=switching.move_s,
        model=model,
    )


def demands(
    model: str, rollout_nodes: int, train_nodes: int, switching: Switching
) -> dict[str, Demand]:
    size = SIZES[model]
    of_pools = ((ROLLOUT, rollout_nodes, size.rollout_gb), (TRAIN, train_nodes, size.train_gb))
    return {
        pool: Demand(
            num_nodes=num_nodes,
            host_bytes=round(gigabytes * 1e9),
            load_s=switching.phase_s / 2,
            offload_s=switching.phase_s / 2,
        )
        for pool, num_nodes, gigabytes in of_pools
    }


def _arrivals_h(draws: Random, num_jobs: int) -> list[float]:
    gaps = [
        draws.expovariate(1.0 / (_BURST_H if draws.random() < 0.5 else _QUIET_H))
        for _ in range(num_jobs - 1)
    ]
    scale = WINDOW_H * (num_jobs / NUM_JOBS) / sum(gaps) if gaps else 1.0
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap * scale)
    return arrivals


def _lengths_h(draws: Random, num_jobs: int) -> list[float]:
    lengths = [exp(draws.gauss(0.0, _SIGMA)) for _ in range(num_jobs)]
    for _ in range(20):  # the cap lowers the mean: scale again until both hold
        scale = MEAN_H * num_jobs / sum(lengths)
        lengths = [min(LONGEST_H, length * scale) for length in lengths]
    return lengths
