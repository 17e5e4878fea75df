"""Seals, the purge floor, and which weights versions are kept.

The floor F(d) is the seq below which a deployment's operation stream is not needed: its newest
committed seal, or less while a `publish_weights` under it made a version that somebody needs and
that is not yet as durable as the seal. Kept versions: a policy's newest, and every one that a
deployment holds or has a queued sync for.
"""

from __future__ import annotations

from phaseloom.common.ids import OperationKey, VersionKey
from phaseloom.common.messages import ReleaseVersions, SealCommitted, SealFailed, SealState
from phaseloom.scheduler.core import outputs
from phaseloom.scheduler.core.state import Deployment, Op, WpgState
from phaseloom.scheduler.core.step import Step

_GRADIENT_FREE = frozenset({"optim_step", "publish_weights"})


def mutated(step: Step, deployment: Deployment, op: Op) -> None:
    """A mutating operation took effect."""
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
        deployment.since_seal += 1


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
        needed.update(op.version for op in other.operations.values() if op.version is not None)
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


def is_due(step: Step, deployment: Deployment, times: int = 1) -> bool:
    """Whether to seal now: often enough mutated, and no gradients to carry along."""
    every = step.config.seal_every * times
    return (
        every > 0
        and deployment.since_seal >= every
        and not deployment.sealing
        and not deployment.replay
        and deployment.last_kind in _GRADIENT_FREE
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
    if deployment is None or event.seq <= deployment.seal_seq:
        return
    deployment.seal_seq = event.seq
    deployment.durable_versions = event.versions
    deployment.since_seal = sum(m.seq > event.seq for m in deployment.history)
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
    deployment.since_seal = 0
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
