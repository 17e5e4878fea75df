"""A backlog of jobs made from PlexRL Table 2, for its Fig. 8 (PlexRL §6.3).

The paper replays three months of its own cluster, which it does not publish. What it says is kept:
the cycles and operations of its three model sizes, one-step-asynchronous rollout on nodes of the
job's own, training nodes that jobs share. What it does not say is chosen here: the mix of sizes,
training nodes by size, lognormal numbers of iterations and rollout times with a cap, and arrivals
within a small part of the time that the pool takes to drain, so that a line forms.

Pure: the seed decides.
"""

from __future__ import annotations

from math import exp, log
from random import Random

import msgspec

from phaseloom.simulator.jobs import ROLLOUT, TRAIN, Demand, Phase, SimJob


class Model(msgspec.Struct, frozen=True):
    """A row of Table 2, and the resources of a job of that size."""

    name: str
    cycle_s: float
    compute_log_prob_s: float
    update_actor_s: float
    sync_weight_s: float
    num_train_nodes: int
    num_rollout_nodes: int
    host_bytes: int
    """The host memory on each training node, as WEAVE Table 2 measures the nearest size."""
    load_s: float
    """The time to load the state onto the devices, and as long to offload it: 19 s at 30B (PlexRL
    §6.2), by size below that. At 235B the optimizer state stays on the host."""
    share: float
    """The share of all jobs."""

    @property
    def train_s(self) -> float:
        return self.compute_log_prob_s + self.update_actor_s + self.sync_weight_s


MODELS = (
    Model("7B", 289.03, 9.66, 38.08, 9.76, 1, 1, 240_000_000_000, 4.4, 0.5),
    Model("30B", 284.80, 19.62, 56.35, 7.57, 2, 2, 520_400_000_000, 19.0, 0.3),
    Model("235B", 589.71, 20.11, 82.39, 8.89, 4, 4, 458_700_000_000, 19.0, 0.2),
)


class Shape(msgspec.Struct, frozen=True):
    """How the backlog is drawn."""

    num_jobs: int = 200
    within_s: float = 12 * 3600.0
    """The time over which arrivals are uniform."""
    mean_s: float = 4 * 3600.0
    """The mean length of a job alone."""
    spread: float = 0.6
    """The sigma of the lognormal of job lengths."""
    longest_s: float = 8 * 3600.0
    rollout_sigma: float = 0.15
    rollout_worst: float = 1.3
    """The cap of a rollout at the token limit, over its mean."""
    steps_ahead: int = 1


TWO_HUNDRED = Shape()


def plexrl(seed: int, shape: Shape = TWO_HUNDRED) -> list[SimJob]:
    """A backlog of jobs, by arrival.

    A job's rollout fills its cycle; training on the rollout before goes on beside it, as in the
    paper's regime of one step of staleness.
    """
    draws = Random(f"plexrl {seed}")
    arrivals = sorted(draws.uniform(0, shape.within_s) for _ in range(shape.num_jobs))
    return [_job(f"j{i:03d}", at_s, draws, shape) for i, at_s in enumerate(arrivals)]


def _job(name: str, arrival_s: float, draws: Random, shape: Shape) -> SimJob:
    model = draws.choices(MODELS, [model.share for model in MODELS])[0]
    length_s = _lognormal(draws, shape.mean_s, shape.spread, shape.longest_s)
    rollout_s = model.cycle_s if shape.steps_ahead else model.cycle_s - model.train_s
    return SimJob(
        name=name,
        arrival_s=arrival_s,
        iterations=max(1, round(length_s / model.cycle_s)),
        phases=(
            Phase(ROLLOUT, rollout_s, shape.rollout_worst * rollout_s, shape.rollout_sigma),
            Phase(TRAIN, model.train_s),
        ),
        demands={
            ROLLOUT: Demand(model.num_rollout_nodes),
            TRAIN: Demand(model.num_train_nodes, model.host_bytes, model.load_s, model.load_s),
        },
        steps_ahead=shape.steps_ahead,
        model=model.name,
    )


def _lognormal(draws: Random, mean: float, sigma: float, cap: float) -> float:
    """A draw from a lognormal, capped.

    Args: mean: the mean before the cap.
    """
    return min(cap, exp(draws.gauss(log(mean) - sigma**2 / 2, sigma)))
