"""What is told late, or again: outcomes of dead incarnations, stops that were never confirmed."""

from __future__ import annotations

from typing import TypeVar

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.commands import (
    OpenActivation,
    Permit,
    ReleaseVersions,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    ActivationOpened,
    ActivationRefused,
    Event,
    JobFinished,
    JobSubmitted,
    NodeLost,
    OperationFinished,
    QueuedOperation,
    SchedulerConfigured,
    SealCommitted,
    TimerFired,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.operations import After, Outcome
from phaseloom.common.contract.specs import JobSpec, SchedulerConfig
from phaseloom.scheduler.core.core import Core
from phaseloom.scheduler.core.dispatch import choice
from phaseloom.scheduler.core.dispatch.dispatch import MAX_REFUSALS
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.outputs import Output
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.transitions import JobState, WpgState
from phaseloom.scheduler.core.validate import validate
from tests.support.world import CONFIG, TENANT, deployment, lost, node_up, spec

C = TypeVar("C")

A = JobKey(TENANT, "a")
POLICY, SAMPLER = deployment("a", "policy"), deployment("a", "sampler")
NODES = {POLICY.deployment: NodeId("t0"), SAMPLER.deployment: NodeId("r0")}
SPEC = JobSpec(deployments=[spec("sampler", "rollout"), spec("policy", "train", trainable=True)])
AWAY = ErrorInfo(Code.UNAVAILABLE, "rolled back")


class Teller:
    """Says every word itself, in the order that the story needs."""

    def __init__(self, config: SchedulerConfig = CONFIG) -> None:
        self.core = Core()
        self.now_s = 1000.0
        self.tell(SchedulerConfigured(config))
        self.tell(node_up("r0", "rollout"))
        self.tell(node_up("t0", "train"))

    def tell(self, event: Event, after_s: float = 0.0) -> list[Output]:
        self.now_s += after_s
        made = self.core.step(self.core.state.sequence + 1, self.now_s, event)
        validate(self.core.state)
        return made

    def submit(self, job: JobKey = A) -> None:
        self.tell(JobSubmitted(job, SPEC, "submit"))
        for name in ("sampler", "policy"):
            self.started(DeploymentKey(TENANT, job.job, name))

    def started(self, key: DeploymentKey) -> list[Output]:
        node = NODES[key.deployment]
        return self.tell(WpgStarted(key, self.incarnation(key), node, 10, 0))

    def killed(self, key: DeploymentKey) -> list[Output]:
        return self.tell(lost(key, self.incarnation(key), NODES[key.deployment]))

    def incarnation(self, key: DeploymentKey) -> int:
        return self.core.state.deployments[str(key)].wpg.incarnation

    def retry(self) -> list[Output]:
        """The pause after a refused switch-in is over."""
        timers = self.core.state.timers
        timer = max((t for t in timers if t.startswith("retry/")), key=lambda t: timers[t])
        return self.tell(TimerFired(timer), 0.6)


def commands(made: list[Output], kind: type[C]) -> list[C]:
    sent = [o.command for o in made if isinstance(o, outputs.SendCommand)]
    return [command for command in sent if isinstance(command, kind)]


def queued(
    key: DeploymentKey,
    slot: int | str,
    kind: str,
    version: int = 0,
    error: ErrorInfo | None = None,
    after: tuple[After, ...] = (),
    timeout_s: float = 0.0,
) -> QueuedOperation:
    op = OperationKey(key.tenant, key.job, key.deployment, str(slot))
    brings = VersionKey(POLICY, version) if version else None
    return QueuedOperation(
        op, f"id-{slot}", kind, list(after), brings, error=error, timeout_s=timeout_s
    )


def ended(permit: Permit, *, replay: bool = False) -> OperationFinished:
    return OperationFinished(
        permit.operation,
        permit.kind,
        Outcome.COMPLETED,
        permit.epoch,
        permit.incarnation,
        0.0,
        0.1,
        replay=replay,
    )


def settled(op: OperationKey, kind: str, error: ErrorInfo | None = None) -> OperationFinished:
    outcome = Outcome.FAILED if error else Outcome.COMPLETED
    return OperationFinished(op, kind, outcome, 0, 0, 0.0, 0.0, error=error)


# --- settled outcomes ---------------------------------------------------------------------------


def test_outcome_settled_during_a_replay_begins_it_anew() -> None:
    """A scheduler that was away appends it behind the start of the next incarnation."""
    teller = Teller(replace(CONFIG, max_losses=1))
    teller.submit()
    for event in (queued(POLICY, 1, "publish_weights"), queued(SAMPLER, 1, "sync_weights", 1)):
        (permit,) = commands(teller.tell(event), Permit)
        teller.tell(ended(permit))
    teller.tell(queued(SAMPLER, 2, "sync_weights", 1))
    teller.killed(SAMPLER)
    (replayed,) = commands(teller.started(SAMPLER), Permit)
    teller.tell(ended(replayed, replay=True))
    made = teller.killed(SAMPLER)
    assert any(isinstance(output, outputs.SettleCompletion) for output in made)
    teller.started(SAMPLER)
    sampler = teller.core.state.deployments[str(SAMPLER)]
    assert (sampler.wpg.state, sampler.durability.replay) == (WpgState.RECOVERING, [1])
    made = teller.tell(settled(queued(SAMPLER, 2, "").key, "sync_weights"))
    assert [stop.deployment for stop in commands(made, StopWpg)] == [SAMPLER]
    teller.killed(SAMPLER)
    (replayed,) = commands(teller.started(SAMPLER), Permit)
    assert replayed.operation.slot == "2", "it replaced all that came before"


def test_refused_step_that_is_settled_late_leaves_no_gradients_behind() -> None:
    """The live incarnation has run again what the refused step threw away in the dead one."""
    teller = Teller()
    teller.submit()
    (permit,) = commands(teller.tell(queued(POLICY, 1, "forward_backward")), Permit)
    teller.tell(ended(permit))
    teller.tell(queued(POLICY, 2, "forward_backward", error=AWAY))
    (step,) = commands(teller.tell(queued(POLICY, 3, "optim_step")), Permit)
    assert step.partial
    teller.killed(POLICY)
    (replayed,) = commands(teller.started(POLICY), Permit)
    made = teller.tell(ended(replayed, replay=True))
    for _ in range(MAX_REFUSALS):
        (again,) = commands(made, Permit)
        refusal = ActivationRefused(POLICY, again.epoch, NODES["policy"], AWAY)
        refused = teller.tell(refusal)
        made = teller.retry()
    assert any(isinstance(output, outputs.SettleCompletion) for output in refused)
    partial = ErrorInfo(Code.FAILED_PRECONDITION, "a part of the batch is missing")
    made = teller.tell(settled(step.operation, "optim_step", partial))
    assert teller.core.state.deployments[str(POLICY)].durability.history == []
    assert commands(made, StopWpg), "its gradients go with it"


# --- stops and names ----------------------------------------------------------------------------


def test_name_used_again_is_safe_from_a_stop_that_was_not_confirmed() -> None:
    """The old job is forgotten before its node is back."""
    teller = Teller(replace(CONFIG, outcome_retention_s=0.0))
    teller.submit()
    teller.tell(NodeLost(NODES["policy"], 1, "gone"))
    teller.tell(JobFinished(A, "finish"))
    forget = next(timer for timer in teller.core.state.timers if timer.startswith("forget/"))
    teller.tell(TimerFired(forget), 1000.0)
    assert str(A) not in teller.core.state.jobs
    made = teller.tell(node_up("t0", "train", revision=2))
    (stop,) = commands(made, StopWpg)
    teller.submit()
    assert teller.incarnation(POLICY) > stop.incarnation
    made = teller.tell(node_up("t0", "train", revision=3))
    assert commands(made, StartWpg)
    assert not commands(made, StopWpg)


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_workers_of_a_name_used_again_never_have_a_stops_incarnation(is_confirmed: bool) -> None:
    """Their deaths would have one message id, and the second be lost."""
    teller = Teller()
    teller.submit()
    teller.tell(JobFinished(A, "finish"))
    for revision in (2, 3):
        made = teller.tell(node_up("t0", "train", revision=revision))
    (stop,) = commands(made, StopWpg)
    if is_confirmed:
        teller.tell(lost(POLICY, stop.incarnation, NODES["policy"]))
    teller.tell(JobSubmitted(A, SPEC, "again"))
    assert teller.incarnation(POLICY) > stop.incarnation


# --- refused switch-ins -------------------------------------------------------------------------


def recovering(teller: Teller) -> list[Output]:
    teller.submit()
    (permit,) = commands(teller.tell(queued(POLICY, 1, "forward_backward")), Permit)
    teller.tell(ended(permit))
    teller.killed(POLICY)
    return teller.started(POLICY)


def test_state_that_never_fits_while_it_is_rebuilt_fails_its_job() -> None:
    teller = Teller()
    made = recovering(teller)
    too_large = ErrorInfo(Code.RESOURCE_EXHAUSTED, "does not fit")
    for _ in range(MAX_REFUSALS):
        (opened,) = commands(made, OpenActivation)
        teller.tell(ActivationRefused(POLICY, opened.epoch, NODES["policy"], too_large))
        made = teller.retry() if any("retry/" in t for t in teller.core.state.timers) else []
    assert teller.core.state.jobs[str(A)].state is JobState.FAILED


def test_switch_in_that_is_rolled_back_while_it_is_rebuilt_is_tried_again() -> None:
    teller = Teller()
    made = recovering(teller)
    for _ in range(3 * MAX_REFUSALS):
        (opened,) = commands(made, OpenActivation)
        teller.tell(ActivationRefused(POLICY, opened.epoch, NODES["policy"], AWAY))
        made = teller.retry()
    assert teller.core.state.jobs[str(A)].state is JobState.ACTIVE


def test_device_of_a_refused_switch_in_is_free_for_others_at_once() -> None:
    teller = Teller(replace(CONFIG, idle_grace_s=0.0))
    b = JobKey(TENANT, "b")
    teller.submit()
    teller.submit(b)
    (permit,) = commands(teller.tell(queued(POLICY, 1, "optim_step")), Permit)
    teller.tell(queued(deployment("b", "policy"), 1, "optim_step"))
    refusal = ActivationRefused(POLICY, permit.epoch, NODES["policy"], AWAY)
    made = teller.tell(refusal, 0.1)
    assert [p.operation.job_key for p in commands(made, Permit)] == [b]


# --- what stays ---------------------------------------------------------------------------------


def test_ended_job_leaves_nothing_that_grows() -> None:
    teller = Teller()
    teller.submit()
    for index in range(3):
        after = (After("policy", 100 + index),)
        teller.tell(queued(SAMPLER, f"r{index}", "generate", after=after, timeout_s=1.0))
    for index in range(3):
        teller.tell(TimerFired(f"expire/{SAMPLER}.r{index}"), 1.0)
    teller.tell(JobFinished(A, "finish"))
    teller.tell(ActivationOpened(SAMPLER, 5, NODES["sampler"], 0.0, 0.1, 0.1, 0, 0))
    assert teller.core.state.waiters == {}
    assert teller.core.state.switch_s == {}


def test_quantum_is_over_when_its_timer_is_due() -> None:
    state = Teller(replace(CONFIG, quantum_s=0.3)).core.state
    for since_s in (1000.0 + 0.1 * n for n in range(200)):
        assert choice.is_quantum_over(Step(state, 0, since_s + 0.3), since_s)


# --- what a rebuild begins with -----------------------------------------------------------------

TEACHER = deployment("a", "teacher")


def distilled() -> tuple[Teller, list[VersionKey]]:
    """A policy that syncs a version of another's, publishes, and syncs the next one's.

    Returns: what was released so far, too.
    """
    teller = Teller(replace(CONFIG, idle_grace_s=0.0))
    specs = [*SPEC.deployments, spec("teacher", "train", trainable=True)]
    teller.tell(JobSubmitted(A, JobSpec(deployments=specs), "submit"))
    for key, node in ((SAMPLER, "r0"), (POLICY, "t0"), (TEACHER, "t0")):
        teller.tell(WpgStarted(key, 1, NodeId(node), 10, 0))
    made: list[Output] = []
    for key, seq, brings in (
        (TEACHER, 1, None),
        (POLICY, 1, VersionKey(TEACHER, 1)),
        (POLICY, 2, None),
        (SAMPLER, 1, VersionKey(POLICY, 2)),
        (TEACHER, 2, None),
        (POLICY, 3, VersionKey(TEACHER, 2)),
    ):
        kind = "sync_weights" if brings else "publish_weights"
        (permit,) = commands(teller.tell(replace(queued(key, seq, kind), version=brings)), Permit)
        made += teller.tell(ended(permit))
    return teller, released(made)


def released(made: list[Output]) -> list[VersionKey]:
    return [version for release in commands(made, ReleaseVersions) for version in release.versions]


def test_deployment_that_syncs_and_publishes_is_rebuilt_from_versions_that_are_kept() -> None:
    """What it published is made again, behind the sync of a version that nobody holds any more."""
    teller, gone = distilled()
    assert VersionKey(TEACHER, 1) not in gone
    teller.killed(POLICY)
    slots = []
    permits = commands(teller.started(POLICY), Permit)
    while permits:
        slots.append(permits[0].operation.slot)
        permits = commands(teller.tell(ended(permits[0], replay=True)), Permit)
    assert slots == ["1", "2", "3"]


def test_version_that_no_rebuild_can_begin_with_any_more_is_released() -> None:
    teller, _ = distilled()
    made = teller.tell(SealCommitted(POLICY, 3, NodeId("t0"), [2]))
    assert set(released(made)) == {VersionKey(TEACHER, 1)}


def test_version_that_was_being_published_at_a_roll_back_is_released() -> None:
    teller = Teller()
    teller.submit()
    (saved,) = commands(teller.tell(queued(POLICY, 1, "save_state")), Permit)
    teller.tell(replace(ended(saved), checkpoints={"policy": "best"}))
    for event in (queued(POLICY, 2, "publish_weights"), queued(SAMPLER, 1, "sync_weights", 2)):
        (permit,) = commands(teller.tell(event), Permit)
        teller.tell(ended(permit))
    (publish,) = commands(teller.tell(queued(POLICY, 3, "publish_weights")), Permit)
    teller.killed(SAMPLER)
    unreadable = ErrorInfo(Code.DATA_LOSS, "the seal cannot be read")
    died = lost(SAMPLER, teller.incarnation(SAMPLER), NODES["sampler"])
    made = teller.tell(replace(died, error=unreadable))
    assert teller.core.state.jobs[str(A)].state is JobState.ROLLED_BACK
    assert commands(made, StopWpg)
    teller.tell(ended(publish))
    teller.killed(POLICY)
    assert released(teller.started(POLICY)) == [VersionKey(POLICY, 3)]


def test_node_with_fewer_devices_forgets_what_cannot_run_on_it_any_more() -> None:
    teller = Teller()
    teller.tell(node_up("t0", "train", revision=2, num_devices=2))
    specs = [spec("policy", "train", trainable=True, num_ranks=2)]
    teller.tell(JobSubmitted(A, JobSpec(deployments=specs), "submit"))
    made = teller.tell(node_up("t0", "train", revision=3))
    assert teller.core.state.jobs[str(A)].state is JobState.REJECTED
    (stop,) = commands(made, StopWpg)
    assert (stop.deployment, stop.forget) == (POLICY, True)
    teller.tell(lost(POLICY, stop.incarnation, NodeId("t0")))
    assert teller.core.state.stopping == {}
