"""Recorded runs made by hand, small enough to work out every figure on paper."""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseloom.cli.recorder import Recorded
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    ActivationOpened,
    Event,
    NodeUp,
    OperationFinished,
    QueuedOperation,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.contract.specs import DeviceSpec

NODES = {"sampler": "r0", "policy": "t0"}
KINDS = {"sampler": "generate", "policy": "forward_backward"}


@dataclass
class HandMade:
    """Events with their log times; `recorded()` puts them in order."""

    events: list[tuple[float, Event]] = field(default_factory=list)
    next_seq: dict[DeploymentKey, int] = field(default_factory=dict)

    def mesh(self, *jobs: str, num_devices: int = 1) -> None:
        """Nodes with so many devices; every deployment is on the first of its node."""
        devices = [DeviceSpec(1)] * num_devices
        for node, pool in (("r0", "rollout"), ("t0", "train")):
            self.events.append((1.0, NodeUp(NodeId(node), pool, devices, 1, 1, "h:1")))
        for job in jobs:
            for name in NODES:
                self.started(job, name, [0])

    def started(self, job: str, name: str, devices: list[int]) -> None:
        key = DeploymentKey("demo", job, name)
        self.events.append((2.0, WpgStarted(key, 1, NodeId(NODES[name]), 100, 0, devices)))

    def operation(self, job: str, name: str, queued_s: float, start_s: float, end_s: float) -> None:
        key = self._key(job, name)
        kind = KINDS[name]
        self.events.append((queued_s, QueuedOperation(key, str(key), kind)))
        finished = OperationFinished(key, kind, Outcome.COMPLETED, 1, 1, start_s, end_s - start_s)
        self.events.append((end_s, finished))

    def refused(self, job: str, name: str, queued_s: float) -> None:
        key = self._key(job, name)
        error = ErrorInfo(Code.INVALID_ARGUMENT, "bad")
        self.events.append((queued_s, QueuedOperation(key, str(key), KINDS[name], error=error)))

    def switch_in(
        self, job: str, name: str, start_s: float, offload_s: float, load_s: float
    ) -> None:
        opened = ActivationOpened(
            DeploymentKey("demo", job, name),
            1,
            NodeId(NODES[name]),
            start_s,
            offload_s,
            load_s,
            bytes_out=100 if offload_s else 0,
            bytes_in=100 if load_s else 0,
        )
        self.events.append((start_s + offload_s + load_s, opened))

    def recorded(self) -> list[Recorded]:
        in_order = sorted(self.events, key=lambda e: e[0])
        return [Recorded(i, t, e) for i, (t, e) in enumerate(in_order, 1)]

    def _key(self, job: str, name: str) -> OperationKey:
        deployment = DeploymentKey("demo", job, name)
        seq = self.next_seq.get(deployment, 0) + 1
        self.next_seq[deployment] = seq
        return OperationKey("demo", job, name, str(seq))


def alone(job: str, rollout_s: float, train_s: float) -> HandMade:
    """Two steps from second 100 on, nothing waits."""
    log = HandMade()
    log.mesh(job)
    log.switch_in(job, "sampler", 98.0, 0.0, 1.0)
    log.switch_in(job, "policy", 98.0, 0.0, 1.0)
    now_s = 100.0
    for _ in range(2):
        log.operation(job, "sampler", now_s, now_s, now_s + rollout_s)
        now_s += rollout_s
        log.operation(job, "policy", now_s, now_s, now_s + train_s)
        now_s += train_s
    return log


def shared() -> HandMade:
    """Jobs `a` (4 s rollout, 4 s train) and `b` (3 s, 5 s): two steps each, a second a switch.

    r0: a 100-104 | 104-105 | b 105-108 | 108-109 | a 109-113 | 113.5-114.5 | b 114.5-117.5
    t0: a 104-108 | 108-109 | b 109-114 | 114-115 | a 115-119 | 119-120     | b 120-125
    b's second rollout is ready at 114: half of the switch to it, begun at 113.5, is hidden.
    """
    log = HandMade()
    log.mesh("a", "b")
    log.switch_in("a", "policy", 49.0, 0.0, 1.0)
    log.operation("a", "policy", 50.0, 50.0, 51.0)  # warm-up
    log.refused("a", "sampler", 60.0)
    log.switch_in("a", "sampler", 98.0, 0.0, 1.0)
    log.operation("a", "sampler", 100.0, 100.0, 104.0)
    log.switch_in("b", "sampler", 104.0, 0.6, 0.4)
    log.operation("b", "sampler", 100.0, 105.0, 108.0)
    log.operation("a", "policy", 104.0, 104.0, 108.0)
    log.switch_in("b", "policy", 108.0, 0.6, 0.4)
    log.operation("b", "policy", 108.0, 109.0, 114.0)
    log.switch_in("a", "sampler", 108.0, 0.6, 0.4)
    log.operation("a", "sampler", 108.0, 109.0, 113.0)
    log.switch_in("b", "sampler", 113.5, 0.6, 0.4)
    log.switch_in("a", "policy", 114.0, 0.6, 0.4)
    log.operation("a", "policy", 113.0, 115.0, 119.0)
    log.operation("b", "sampler", 114.0, 114.5, 117.5)
    log.switch_in("b", "policy", 119.0, 0.6, 0.4)
    log.operation("b", "policy", 117.5, 120.0, 125.0)
    log.operation("b", "sampler", 130.0, 130.0, 132.0)  # last evaluation
    return log
