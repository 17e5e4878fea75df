"""A run of jobs that take turns on one device of two units: its log, made without a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from phaseloom.common.contract.events import Event, JobSubmitted, OperationFinished
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.specs import JobSpec, KindSlowdown, Residency, SlowdownTable
from phaseloom.common.process.slowdowns import SUB_STAGES
from phaseloom.scheduler.core.state.outputs import Output
from phaseloom.simulator.predictions import Entry
from phaseloom.simulator.rerun import Window
from tests.support.world import CONFIG, STATE_BYTES, TENANT, World, node_up, spec

ON_A_HALF, BESIDE = 1.5, 1.2
"""How much slower everything is on one of two units, and beside anything."""
TABLE = SlowdownTable(
    "made up",
    {kind: KindSlowdown({0.5: ON_A_HALF, 1.0: 1.0}) for kind in SUB_STAGES},
    splits=(0.5,),
    beside={kind: dict.fromkeys(SUB_STAGES, BESIDE) for kind in SUB_STAGES},
)
ROLL_OUT, TRAIN = "generate", "forward_backward"
DEPLOYMENTS = {ROLL_OUT: "sampler", TRAIN: "policy"}
THINKS_S = 0.7
"""The time from an outcome until the controller's next call."""
Calls = Mapping[str, list[str]]
"""By job: the kinds of its controller's calls, one after the other."""


@dataclass
class Mesh(World):
    """Jobs on one device of two units, with controllers that await each of their calls."""

    calls: dict[str, list[str]] = field(default_factory=dict)
    """By job: the calls to come."""
    made: dict[tuple[str, str], int] = field(default_factory=dict)
    """By job and kind: the calls made."""
    ran_s: dict[str, list[float]] = field(default_factory=dict)
    """By job: the seconds that each of its calls ran."""

    def call(self, job: str, kind: str, delay_s: float = 0.0) -> None:
        number = self.made[job, kind] = self.made.get((job, kind), 0) + 1
        slot = number if kind == TRAIN else f"r{number}"
        self.queue(job, DEPLOYMENTS[kind], slot, kind, delay_s=delay_s)

    def feed(self, event: Event) -> list[Output]:
        made = super().feed(event)
        if isinstance(event, OperationFinished) and self.calls:
            job = event.key.job
            self.ran_s.setdefault(job, []).append(event.duration_s)
            if self.calls[job]:
                self.call(job, self.calls[job].pop(0), THINKS_S)
        return made


def by_turns(calls: Calls) -> tuple[Mesh, list[Entry], Window]:
    """A run of these calls, one at a time on the device: its log, and when it was.

    Every deployment has run before, so that nothing is loaded.
    """
    config = replace(CONFIG, slowdowns=TABLE, idle_grace_s=0.0, speculative_switch_in=False)
    mesh = Mesh(config, duration_s=1.0, node_names={"d0": "train"})
    mesh.revisions["d0"] = 2
    device = node_up(
        "d0",
        "train",
        units=2,
        memory_bytes=10 * STATE_BYTES,
        residency=Residency.SHARED,
        revision=2,
    )
    mesh.later(0, device)
    for job in calls:
        specs = [spec("policy", "train", trainable=True), spec("sampler", "train")]
        mesh.later(0, JobSubmitted(JobKey(TENANT, job), JobSpec(deployments=specs), job))
        for kind in DEPLOYMENTS:
            mesh.call(job, kind)
    mesh.run()
    mesh.now_s += 5.0
    begin_s = mesh.now_s
    mesh.calls = {job: [*kinds] for job, kinds in calls.items()}
    for job in calls:
        mesh.call(job, mesh.calls[job].pop(0))
    mesh.run()
    entries = [(place, at_s, event) for place, (at_s, event) in enumerate(mesh.log, 1)]
    ended_s = [at_s for _, at_s, event in entries if isinstance(event, OperationFinished)]
    return mesh, entries, (begin_s, ended_s[-1])
