"""Seals, the purge floor, and which weights versions are kept.

The floor F(d) is the seq below which a deployment's operation stream is not needed: its newest
committed seal, or less while a `publish_weights` under it made a version that somebody needs and
that is not yet as durable as the seal. Kept versions: a policy's newest, and every one that a
deployment holds or has a queued sync for.
"""

from __future__ import annotations

from phaseloom.common.ids import OperationKey, VersionKey
from phaseloom.common.messages import ReleaseVersions, SealCommitted, SealFailed, SealState
from phaseloom.scheduler.core import gradients, outputs
from phaseloom.scheduler.core.state import JOB_ENDED, Deployment, Op, State, WpgState
from phaseloom.scheduler.core.step import Step

_GRADIENT_FREE = frozenset({"optim_step", "publish_weights"})


def mutated(step: Step, deployment: Deployment, op: Op) -> None:
    """A mutating operation took effect."""
    gradients.took_effect(deployment, op)
    if op.kind == "publish_weights":
        seq = op.key.seq
        assert seq is not None
        step.job(op.key.job_key).published.append(VersionKey(deployment.key, seq))
        release_versions(step, deployment)
    elif op.kind == "sync_weights":
        deployment.holds = op.version
        # The whole state is replaced: what came before is not needed to rebuild it.
        if not volatile_versions(step, deployment):
            delete(step, deployment, [m.seq for m in deployment.history[:-1]])
            deployment.history = deployment.history[-1:]
        release_versions(step, deployment)
    if deployment.spec.trainable:
        if not deployment.since_seal:
            deployment.changed_s = step.now_s
        deployment.since_seal += 1
        deployment.since_seal_bytes += op.num_bytes


def needed_versions(step: Step, deployment: Deployment) -> set[VersionKey]:
    """Versions of this deployment's job that must be kept."""
    job = step.job(deployment.key.job_key)
    newest: dict[str, VersionKey] = {}
    for version in job.published:
        newest[str(version.policy)] = version
    needed = set(newest.values())
    for other in step.deployments_of(job.key):
        if other.holds is not None:
            needed.add(other.holds)
        needed.update(other.queued_syncs.values())
    return needed


def volatile_versions(step: Step, deployment: Deployment) -> set[int]:
    """Needed versions of this policy that its node's memory alone holds."""
    needed = needed_versions(step, deployment)
    seqs = {version.seq for version in needed if version.policy == deployment.key}
    return seqs - set(deployment.durable_versions)


def release_versions(step: Step, deployment: Deployment) -> None:
    job = step.job(deployment.key.job_key)
    needed = needed_versions(step, deployment)
    gone = [version for version in job.published if version not in needed]
    if not gone:
        return
    job.published = [version for version in job.published if version in needed]
    for name in sorted({d.node for d in step.deployments_of(job.key) if d.node is not None}):
        step.send(ReleaseVersions, step.node(name), versions=gone)


def release_restored(step: Step, deployment: Deployment) -> None:
    """A WPG came back with its seal's versions; some may have been released meanwhile."""
    needed = needed_versions(step, deployment)
    restored = [VersionKey(deployment.key, seq) for seq in deployment.durable_versions]
    gone = [version for version in restored if version not in needed]
    if gone:
        step.send(ReleaseVersions, step.node_of(deployment), versions=gone)


def is_outcome_needed(state: State, key: OperationKey) -> bool:
    """Whether the outcome of an operation that ended long ago must still be kept.

    A rebuild compares with it, and an `attach` tells by it what a gap is.
    """
    deployment = state.deployments.get(str(key.deployment_key))
    if deployment is None or key.seq is None:
        return False
    if state.jobs[str(key.job_key)].state in JOB_ENDED:
        return False
    history = deployment.history
    return key.seq >= (history[0].seq if history else deployment.next_seq)


def is_due(step: Step, deployment: Deployment, times: int = 1) -> bool:
    """Whether to seal now: enough has changed since, and there are no gradients to carry along.

    Args: times: how much more patient to be with the number of mutations: a seal costs least when
        the state leaves its device anyway. A long log or an old seal waits for nothing.
    """
    config = step.config
    has_enough = deployment.since_seal > 0 and (
        deployment.since_seal >= config.seal_every * times
        or deployment.since_seal_bytes >= config.seal_bytes
        or step.now_s - deployment.changed_s >= config.seal_age_s
    )
    return (
        config.seal_every > 0
        and has_enough
        and not deployment.sealing
        and not deployment.replay
        and deployment.last_kind in _GRADIENT_FREE
        # A refused step throws gradients away: a seal must not bring them back.
        and not gradients.pending(deployment)
    )


def seal(step: Step, deployment: Deployment) -> None:
    deployment.sealing = deployment.applied
    versions = [
        version.seq
        for version in needed_versions(step, deployment)
        if version.policy == deployment.key and version.seq <= deployment.applied
    ]
    step.send(
        SealState,
        step.node_of(deployment),
        deployment=deployment.key,
        incarnation=deployment.incarnation,
        seq=deployment.applied,
        versions=sorted(versions),
    )


def committed(step: Step, event: SealCommitted) -> None:
    deployment = step.deployment(event.deployment)
    if deployment is None or event.seq <= max(deployment.seal_seq, deployment.origin_seq):
        return
    deployment.seal_seq = event.seq
    deployment.durable_versions = event.versions
    later = [m for m in deployment.history if m.seq > event.seq]
    deployment.since_seal = len(later)
    deployment.since_seal_bytes = sum(m.num_bytes for m in later)
    deployment.changed_s = step.now_s
    if deployment.sealing <= event.seq:
        deployment.sealing = 0
    floor = _floor(step, deployment)
    delete(step, deployment, [m.seq for m in deployment.history if m.seq <= floor])
    deployment.history = [m for m in deployment.history if m.seq > floor]


def failed(step: Step, event: SealFailed) -> None:
    deployment = step.deployment(event.deployment)
    if deployment is None:
        return
    deployment.sealing = 0
    # Not at once again: what filled the disk is likely still there.
    deployment.since_seal = deployment.since_seal_bytes = 0
    step.tell("seal failed, the previous one stands", event.error.message, deployment.name)


def _floor(step: Step, deployment: Deployment) -> int:
    pending = volatile_versions(step, deployment)
    # While an incarnation is being rebuilt, it needs all that came after the seal it began with.
    is_rebuilding = deployment.state in (WpgState.STARTING, WpgState.RECOVERING)
    sealed = deployment.base if is_rebuilding else deployment.seal_seq
    return min([sealed, *[seq - 1 for seq in pending]])


def delete(step: Step, deployment: Deployment, seqs: list[int]) -> None:
    if seqs:
        key = deployment.key
        keys = [OperationKey(key.tenant, key.job, key.deployment, str(seq)) for seq in seqs]
        step.emit(outputs.DeleteOperations(keys))
