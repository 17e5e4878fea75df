"""Operations that read a weights version by name: which version it is, and how long it is kept.

A version is kept while an open operation names it, whichever job published it, and then as long as
its publish said. A sampler with an adapter can read other adapters if it has room for them. A
trainer with an adapter can read adapters that could replace its own. A deployment with full weights
reads full weights, and its ranks check that they are of the same model. A reading operation never
changes what another one reads.
"""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.commands import ReleaseVersions
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.specs import Adapter, DeploymentSpec, ModelSpec
from phaseloom.common.contract.tenantlimits import limit_exceeded
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import JobVersions
from phaseloom.scheduler.core.state.node import Node
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import OpState

_FIELD = "args.weights"
_KEEP = "name an existing version; publish with a ttl_s that lasts until the version is read"
_LOAD = "use a deployment of the same model, or load the weights with sync_weights or load_state"


def too_many_named(step: Step, deployment: Deployment) -> ErrorInfo | None:
    """Return the error if a publish would exceed the versions of its job that may be named."""
    job = step.job_of(deployment)
    limit = step.limit_of(job.key.tenant, "max_versions")
    if not limit:
        return None
    nameable = [v for v in job.versions.named.values() if v.until_s > step.now_s]
    publishing = [seq for d in step.deployments_of(job) for seq in d.queue.naming]
    used = len(nameable) + len(publishing) + 1
    if used <= limit:
        return None
    remedy = "publish with a shorter ttl_s, or without one; wait until some have expired"
    label = "weights versions of the job could be named"
    return limit_exceeded("max_versions", label, used, limit, remedy, field="args.ttl_s").info


def start_reading(step: Step, op: Op) -> None:
    """Keep the version that an operation names, from the time when it is enqueued."""
    if op.version is None:
        return
    versions = _versions(step, op)
    if versions is not None:
        versions.begin_reading(str(op.version), op.key)


def resolve(step: Step, deployment: Deployment, op: Op) -> ErrorInfo | None:
    """Find the version that an operation names, when nothing else keeps the operation waiting.

    Returns: the error if the deployment cannot read the version.
    """
    version = op.version
    if version is None or op.is_mutating:
        return None
    policy = _policy(step, version)
    if isinstance(policy, ErrorInfo):
        return policy
    reason = _misfit(policy.spec.model, deployment.spec)
    if reason:
        message = f"{deployment.key.deployment} cannot read version {version}: {reason}"
        return ErrorInfo(Code.FAILED_PRECONDITION, message, field=_FIELD, remedy=_LOAD)
    op.adapter = policy.spec.model.adapter
    return None


def running_publish(step: Step, op: Op) -> Op | None:
    """The publish of the named version, if it is still running.

    A caller may know the outcome of a publish before the log does.
    """
    if op.version is None or op.is_mutating:
        return None
    policy = step.deployment(op.version.policy)
    publish = policy.queue.operations.get(op.version.seq) if policy is not None else None
    if publish is None or publish.has_ended or publish.kind != "publish_weights":
        return None
    return publish if publish.state is OpState.PERMITTED or publish.uncertain else None


def _policy(step: Step, version: VersionKey) -> Deployment | ErrorInfo:
    """The policy that has published a version, or the error if there is none."""
    job = step.state.jobs.get(str(version.policy.job_key))
    if job is None:
        message = f"job {version.policy.job!r} does not exist"
        return ErrorInfo(Code.NOT_FOUND, message, field=f"{_FIELD}.job", remedy=_KEEP)
    policy = step.deployment(version.policy)
    is_its = policy is not None and version.seq >= policy.queue.first_seq
    if policy is None or not is_its or version not in job.versions.published:
        message = f"weights version {version} does not exist or was released"
        return ErrorInfo(Code.NOT_FOUND, message, field=f"{_FIELD}.version", remedy=_KEEP)
    return policy


def _misfit(version_model: ModelSpec, spec: DeploymentSpec) -> str:
    """Why a deployment cannot read weights of another model; empty: no reason is known."""
    own_model = spec.model
    if version_model.adapter is None:
        return (
            ""
            if own_model.adapter is None
            else "it has full weights, and this deployment has an adapter"
        )
    if own_model.adapter is None:
        return "it is an adapter, and this deployment has full weights"
    if _base(version_model) != _base(own_model):
        return "it is an adapter of another base model"
    if spec.trainable:
        is_alike = replace(version_model.adapter, seed=own_model.adapter.seed) == own_model.adapter
        return (
            "" if is_alike else "a trainer reads only adapters with its own rank, alpha and targets"
        )
    return _no_room(version_model.adapter, own_model.adapter, spec)


def _no_room(adapter: Adapter, own_adapter: Adapter, spec: DeploymentSpec) -> str:
    """Why a sampler has no room for another adapter; empty: it has."""
    if not spec.max_adapters:
        return "this deployment has no room for other adapters; create it with max_adapters"
    if adapter.rank > own_adapter.rank:
        return f"it has rank {adapter.rank}, but there is room for rank {own_adapter.rank}"
    extra_targets = sorted({*adapter.targets} - {*own_adapter.targets})
    return f"this deployment has no adapter on {', '.join(extra_targets)}" if extra_targets else ""


def _base(model: ModelSpec) -> object:
    """The properties that identify a base model, wherever its files are."""
    files = model.pinned.files if model.pinned is not None else []
    return model.config, [(file.name, file.blake3) for file in files]


def record_copies(step: Step, deployment: Deployment, op: Op) -> None:
    """Record that the nodes of a deployment are about to have a copy of the version."""
    if op.version is None:
        return
    versions = _versions(step, op)
    if versions is not None and str(op.version) in versions.named:
        versions.note_copies(str(op.version), deployment.nodes)


def stop_reading(step: Step, op: Op, nodes: list[Node]) -> None:
    """Stop keeping the version that an ended operation has named.

    Args: nodes: those on which it may have run.
    """
    if op.version is None or op.is_mutating:
        return
    name, versions = str(op.version), _versions(step, op)
    named = versions.named.get(name) if versions is not None else None
    if versions is None or named is None or str(op.key) not in named.readers:
        if op.permitted_s:
            # The version was released while the operation ran; its node may have fetched it since.
            for node in nodes:
                step.send(ReleaseVersions, node, versions=[op.version])
        return
    versions.end_reading(name, op.key, step.now_s)
    if op.version not in versions.published and not named.is_read:
        versions.drop_name(name)
    elif named.until_s > step.now_s:
        wake_at(step, op.version, named.until_s)
    elif not named.is_read:
        step.follow_up(FollowUp.RELEASE, str(op.version.policy.job_key))


def wake_at(step: Step, version: VersionKey, until_s: float) -> None:
    """Check a version again once no operation may refer to it."""
    timer = f"version/{version.policy.job_key}/{version}"
    if timer not in step.state.timers:
        step.set_timer(timer, until_s)


def _versions(step: Step, op: Op) -> JobVersions | None:
    """The versions of the job whose version an operation reads by name; None: it reads none."""
    if op.version is None or op.is_mutating:
        return None
    job = step.state.jobs.get(str(op.version.policy.job_key))
    return job.versions if job is not None else None
