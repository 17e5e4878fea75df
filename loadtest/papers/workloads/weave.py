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
    arrivals_h = _arrivals_h(draws, num_jobs, WINDOW_H * num_jobs / NUM_JOBS)
    lengths_h = _lengths_h(draws, num_jobs, MEAN_H)
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


PRODUCTION_JOBS, PRODUCTION_H = 200, 336.0
_PRODUCTION_MEAN_H = 27.9
_MODEL_SHARES = {"3B": 0.2, "7B": 0.4, "14B": 0.3, "32B": 0.1}
"""Jobs of 32B have two nodes of each pool (WEAVE Table 3), all others one. Solo-D's price for the
mean job of 27.9 h gives 1.09 nodes of each pool, so a tenth of the jobs has two."""
_TOKENS_K_SHARES = {4: 0.26, 8: 0.35, 16: 0.26, 32: 0.13}
"""Response limits from 4k to 32k, 12.1k on average."""
_SHORTEST_S, _LONGEST_S = 50.0, 900.0
"""The range of the phases (WEAVE §3.2)."""


def production(
    seed: int,
    *,
    num_jobs: int = PRODUCTION_JOBS,
    num_kinds: int = 0,
    multi_turn_share: float = 0.5,
    switching: Switching = FREE,
) -> list[SimJob]:
    """A workload like the two weeks of one tenant that WEAVE §6.4 replays, by arrival.

    The paper states the number of jobs, the weeks, sizes of 3B to 32B, limits of 4k to 32k tokens
    with a mean of 12.1k, a mean length of 27.9 h, SLOs uniform between 1 and 2, phases of 50 to
    900 s, and that multi-turn rollouts take 3 to 4 times as long as training. Chosen here: that
    half of the jobs have several turns, that phases grow with the limit and the size so that Table
    3's jobs fit, and arrivals and lengths with the shapes of `generate`.

    Args: num_kinds: how many pairs of phases there are; 0: each job has its own.
    """
    draws = Random(f"production {seed}")
    arrivals_h = _arrivals_h(draws, num_jobs, PRODUCTION_H * num_jobs / PRODUCTION_JOBS)
    lengths_h = _lengths_h(draws, num_jobs, _PRODUCTION_MEAN_H)
    kinds: list[tuple[str, float, float]] = []
    jobs = []
    for index in range(num_jobs):
        if not num_kinds or index < num_kinds:
            kinds.append(_production_kind(draws, multi_turn_share))
            model, rollout_s, train_s = kinds[-1]
        else:
            model, rollout_s, train_s = draws.choice(kinds)
        num_nodes = 2 if model == "32B" else 1
        jobs.append(
            SimJob(
                name=f"j{index}",
                arrival_s=3600.0 * arrivals_h[index],
                iterations=max(1, round(3600.0 * lengths_h[index] / (rollout_s + train_s))),
                phases=(Phase(ROLLOUT, rollout_s), Phase(TRAIN, train_s)),
                demands=demands(model, num_nodes, num_nodes, switching),
                slo=draws.uniform(1.0, 2.0),
                move_s=switching.move_s,
                model=model,
            )
        )
    return jobs


def _production_kind(draws: Random, multi_turn_share: float) -> tuple[str, float, float]:
    """A model, and the seconds of its rollout and training."""
    model = draws.choices(tuple(_MODEL_SHARES), tuple(_MODEL_SHARES.values()))[0]
    tokens_k = draws.choices(tuple(_TOKENS_K_SHARES), tuple(_TOKENS_K_SHARES.values()))[0]
    rollout_s = tokens_k * draws.uniform(12.0, 25.0)
    if draws.random() < multi_turn_share:
        rollout_s *= draws.uniform(1.5, 3.0)
        train_s = rollout_s / draws.uniform(3.0, 4.0)
    else:
        train_s = rollout_s / draws.uniform(0.5, 1.5)
    rollout_s, train_s = (min(_LONGEST_S, max(_SHORTEST_S, s)) for s in (rollout_s, train_s))
    return model, rollout_s, train_s


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


def _arrivals_h(draws: Random, num_jobs: int, window_h: float) -> list[float]:
    gaps = [
        draws.expovariate(1.0 / (_BURST_H if draws.random() < 0.5 else _QUIET_H))
        for _ in range(num_jobs - 1)
    ]
    scale = window_h / sum(gaps) if gaps else 1.0
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap * scale)
    return arrivals


def _lengths_h(draws: Random, num_jobs: int, mean_h: float) -> list[float]:
    lengths = [exp(draws.gauss(0.0, _SIGMA)) for _ in range(num_jobs)]
    for _ in range(20):  # the cap lowers the mean: scale again until both hold
        scale = mean_h * num_jobs / sum(lengths)
        lengths = [min(LONGEST_H, length * scale) for length in lengths]
    return lengths
