"""Decision logs of made-up GRPO jobs whose cycle is known by construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phaseloom.common.contract.events import Event, JobSubmitted, OperationFinished, QueuedOperation
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import After, Outcome
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec

TOKEN_LIMIT = 1000
JOB = JobKey("demo", "sums")


def submitted(job: JobKey = JOB) -> JobSubmitted:
    pools = {"sampler": "rollout", "reference": "rollout", "policy": "train"}
    specs = [DeploymentSpec(n, p, "noop", ModelSpec({})) for n, p in pools.items()]
    return JobSubmitted(job, JobSpec(deployments=specs), "r1")


@dataclass
class JobLog:
    """Collects events of one job with their times; `entries()` puts them in order."""

    job: JobKey = JOB
    events: list[tuple[float, Event]] = field(default_factory=list)
    next_seq: dict[str, int] = field(default_factory=dict)

    def queue(
        self, time_s: float, deployment: str, kind: str, *after: After, size: int = 0
    ) -> After:
        seq = self.next_seq.get(deployment, 1)
        self.next_seq[deployment] = seq + 1
        key = OperationKey(self.job.tenant, self.job.job, deployment, str(seq))
        operation = QueuedOperation(key, f"{deployment}{seq}", kind, after=list(after), size=size)
        self.events.append((time_s, operation))
        return After(deployment, seq)

    def finish(
        self, end_s: float, duration_s: float, operation: After, kind: str, num_tokens: int = 0
    ) -> None:
        key = OperationKey(self.job.tenant, self.job.job, operation.deployment, str(operation.seq))
        event = OperationFinished(
            key,
            kind,
            Outcome.COMPLETED,
            1,
            1,
            end_s - duration_s,
            duration_s,
            num_tokens=num_tokens,
        )
        self.events.append((end_s, event))

    def entries(self) -> list[tuple[int, float, Event]]:
        in_order = sorted(self.events, key=lambda e: e[0])
        return [(i, t, e) for i, (t, e) in enumerate([(0.0, submitted(self.job)), *in_order], 1)]


@dataclass(frozen=True)
class Turn:
    """Seconds of one GRPO step, in the order in which they pass."""

    sync_s: float = 0.02
    generate_s: float = 0.5
    reward_s: float = 0.1
    forward_s: float = 0.08
    micro_batch_s: float = 0.1
    optim_s: float = 0.04
    publish_s: float = 0.02
    num_tokens: int = TOKEN_LIMIT
    """That the generation came to."""

    @property
    def rollout_s(self) -> float:
        return self.sync_s + self.generate_s + self.reward_s + self.forward_s

    @property
    def train_s(self) -> float:
        return 4 * self.micro_batch_s + self.optim_s + self.publish_s

    @property
    def period_s(self) -> float:
        return self.rollout_s + self.train_s


def grpo_log(
    steps: int,
    turn: Callable[[int], Turn],
    *,
    warm_up: int = 0,
    job: JobKey = JOB,
    wait_s: Callable[[int], float] = lambda _step: 0.0,
) -> JobLog:
    """A synchronous GRPO job: warm-up steps, then `steps` turns.

    Args: wait_s: how long the train device is taken by somebody else at each step, while this
        job's first micro-batch is ready.
    """
    log, now_s = JobLog(job), 1.0
    for _ in range(warm_up):
        for kind in ("forward_backward", "optim_step"):
            operation = log.queue(now_s, "policy", kind)
            now_s += 0.05
            log.finish(now_s, 0.05, operation, kind)
    published: list[After] = []
    for step in range(steps):
        t = turn(step)
        sync = log.queue(now_s, "sampler", "sync_weights", *published)
        generate = log.queue(now_s, "sampler", "generate", size=TOKEN_LIMIT)
        log.finish(now_s + t.sync_s, t.sync_s, sync, "sync_weights")
        now_s += t.sync_s + t.generate_s
        log.finish(now_s, t.generate_s, generate, "generate", t.num_tokens)
        now_s += t.reward_s
        forward = log.queue(now_s, "reference", "forward")
        now_s += t.forward_s
        log.finish(now_s, t.forward_s, forward, "forward")
        kinds = {"forward_backward": t.micro_batch_s, "optim_step": t.optim_s}
        train = ["forward_backward"] * 4 + ["optim_step", "publish_weights"]
        operations = [log.queue(now_s, "policy", kind) for kind in train]
        now_s += wait_s(step)
        for operation, kind in zip(operations, train, strict=True):
            duration_s = kinds.get(kind, t.publish_s)
            now_s += duration_s
            log.finish(now_s, duration_s, operation, kind)
        published = [operations[-1]]
    return log
