"""Measurements of a running simulation. `metrics` turns them into a result at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from phaseloom.common.contract.events import Event, JobFinished, JobSubmitted
from phaseloom.simulator.jobs import SimJob


class Span(NamedTuple):
    """An interval in which a node ran an operation or switched, for pictures."""

    node: str
    job: str
    activity: str
    """The kind of the operation, or `switch`."""
    start_s: float
    end_s: float


class Decision(NamedTuple):
    """A core step that placed or released a job."""

    num_jobs: int
    """Jobs that were placed or waiting before the step."""
    seconds: float
    """Processor time of this thread, which does not depend on other processes."""


@dataclass(slots=True)
class NodeMeter:
    pool: str
    price_per_hour: float
    num_gpus: int
    busy_s: float = 0.0
    switch_s: float = 0.0
    switches: int = 0
    """Activations that displaced another deployment."""
    held_s: float = 0.0
    """Time with a job pinned to the node. This time is paid for."""
    held_since_s: float = -1.0
    pinned: set[str] = field(default_factory=set)


@dataclass(slots=True)
class JobMeter:
    job: SimJob
    submitted_s: float = -1.0
    placed_s: float = -1.0
    ended_s: float = -1.0
    outcome: str = "open"
    """`done`, `rejected`, `failed`, or `open` if the simulation ended before the job."""
    reason: str = ""
    iteration_s: list[float] = field(default_factory=list)
    """Duration of each completed iteration, from the end of the previous one or the placement."""
    alone_s: float = 0.0
    """Time that the completed iterations, with the same draws, would have taken alone."""
    completed: int = 0
    """Completed iterations. One that is repeated after a failure counts once."""
    last_end_s: float = -1.0
    wait_s: float = 0.0
    """Total time from ready to started over all operations, including switches."""
    operations: int = 0
    attempts: int = 0
    switches: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    """Deployment → its moves. The deployments of a job move in the same move, one at a time."""

    opened: set[str] = field(default_factory=set)
    """Pools of which the job's placement needed a node that no other job held."""

    @property
    def moves(self) -> int:
        return max(self.moved.values(), default=0)


class Meter:
    """The measurements of one simulation.

    Args: records_spans: whether to keep every interval for pictures.
    """

    def __init__(self, *, records_spans: bool = False) -> None:
        self.nodes: dict[str, NodeMeter] = {}
        self.jobs: dict[str, JobMeter] = {}
        self.spans: list[Span] | None = [] if records_spans else None
        self.decisions: list[Decision] = []
        self.steps_s: dict[str, list[float]] = {}
        """Kind of event → CPU seconds of the timed steps."""
        self.steps: list[tuple[float, float, int]] = [(0.0, 0.0, 0)]
        """(time, $/h, GPUs) of the nodes that jobs are pinned to, after each change."""
        self.num_active = 0
        """Jobs that are submitted and have not ended."""
        self.peaks: dict[str, int] = {}
        """Pool → the most nodes held at once."""
        self._num_held: dict[str, int] = {}
        self.notices: dict[str, int] = {}
        """How many notices the core has sent, by kind."""

    def stepped(self, event: Event, num_jobs: int, seconds: float) -> None:
        if isinstance(event, JobSubmitted | JobFinished):
            self.decisions.append(Decision(num_jobs, seconds))
        self.steps_s.setdefault(type(event).__name__, []).append(seconds)

    def ran(self, node: str, job: str, kind: str, start_s: float, end_s: float) -> None:
        self.nodes[node].busy_s += end_s - start_s
        if self.spans is not None:
            self.spans.append(Span(node, job, kind, start_s, end_s))

    def switched(
        self, node: str, job: str, start_s: float, end_s: float, *, displaces: bool
    ) -> None:
        """Count a context switch.

        Args: displaces: whether another deployment had to leave.
        """
        meter = self.nodes[node]
        meter.switch_s += end_s - start_s
        if displaces:
            meter.switches += 1
            self.jobs[job].switches += 1
        if self.spans is not None and end_s > start_s:
            self.spans.append(Span(node, job, "switch", start_s, end_s))

    def moved(self, job: str, deployment: str) -> None:
        moved = self.jobs[job].moved
        moved[deployment] = moved.get(deployment, 0) + 1

    def pin(self, node: str, job: str, deployment: str, now_s: float) -> None:
        meter = self.nodes[node]
        if not meter.pinned:
            if not self.jobs[job].moved:
                self.jobs[job].opened.add(meter.pool)
            meter.held_since_s = now_s
            self._step(now_s, meter.price_per_hour, meter.num_gpus)
            num_held = self._num_held[meter.pool] = self._num_held.get(meter.pool, 0) + 1
            self.peaks[meter.pool] = max(self.peaks.get(meter.pool, 0), num_held)
        meter.pinned.add(deployment)

    def unpin(self, node: str, deployment: str, now_s: float) -> None:
        meter = self.nodes[node]
        if deployment not in meter.pinned:
            return
        meter.pinned.remove(deployment)
        if not meter.pinned:
            meter.held_s += now_s - meter.held_since_s
            self._num_held[meter.pool] -= 1
            self._step(now_s, -meter.price_per_hour, -meter.num_gpus)

    def _step(self, now_s: float, price: float, num_gpus: int) -> None:
        since_s, before, gpus = self.steps[-1]
        if since_s == now_s:
            self.steps.pop()
        self.steps.append((now_s, before + price, gpus + num_gpus))
