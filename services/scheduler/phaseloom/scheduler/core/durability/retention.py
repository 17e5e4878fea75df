"""Which weights versions are kept, and the release of all others.

These versions are kept: the newest of each policy; every version that a deployment holds, has a
queued sync for, or may have to sync again when it is rebuilt; every version that an open operation
names; and versions that may still be named for a while. If a policy is deleted, the versions that
others need stay on its nodes as *retained versions*, because nobody can make them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.common.contract.commands import ReleaseVersions, StopWpg, Ticket
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.scheduler.core.durability import holders
from phaseloom.scheduler.core.operations import reads
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job, NamedVersion
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import Step


def record_published(step: Step, deployment: Deployment, op: Op) -> None:
    """Record the version that a `publish_weights` has made, and release the versions that it
    replaces."""
    seq = op.key.seq
    assert seq is not None
    job = step.job(op.key.job_key)
    version = VersionKey(deployment.key, seq)
    job.versions.published.append(version)
    if op.ttl_s:
        job.versions.name(str(version), op.ttl_s, step.now_s)
        reads.wake_at(step, version, step.now_s + op.ttl_s)
    release_versions(step, job)


def needed_versions(step: Step, job: Job) -> set[VersionKey]:
    """The weights versions of a job that must be kept: the newest of each policy, those that may
    still be named, and those in use.

    For a deleted policy only the versions in use are kept.
    """
    newest: dict[str, VersionKey] = {}
    nameable: list[VersionKey] = []
    for version in job.versions.published:
        if not is_retained(step, version):
            newest[str(version.policy)] = version
            named = job.versions.named.get(str(version))
            if named is not None and named.until_s > step.now_s:
                nameable.append(version)
    return {*newest.values(), *nameable, *versions_in_use(step, job)}


def versions_in_use(step: Step, job: Job, *, but: Deployment | None = None) -> set[VersionKey]:
    """Versions of a job that open operations name, or that a deployment of the job holds, has a
    queued sync for or may sync again.

    Args: but: a deployment whose needs do not count.
    """
    named = job.versions.named
    needed = {v for v in job.versions.published if str(v) in named and named[str(v)].is_read}
    for reader in step.deployments_of(job):
        if reader is but:
            continue
        if reader.durability.holds is not None:
            needed.add(reader.durability.holds)
        needed.update(reader.queue.queued_syncs.values())
        needed.update(m.version for m in reader.durability.history if m.version is not None)
    return needed


def is_retained(step: Step, version: VersionKey) -> bool:
    """Whether the policy that made a version is deleted.

    A new policy with the same name may exist.
    """
    policy = step.deployment(version.policy)
    return policy is None or version.seq < policy.queue.first_seq


def nodes_of(step: Step, version: VersionKey) -> list[NodeId]:
    """Nodes that have, or may have, parts of a weights version; empty: none is known."""
    policy = step.deployment(version.policy)
    if policy is not None and version.seq >= policy.queue.first_seq:
        holders = [node for part in policy.durability.replicas for node in part]
        return list(dict.fromkeys([*policy.nodes, *policy.move.stale_holders, *holders]))
    return step.job(version.policy.job_key).versions.retained.get(str(version), [])


def sources_of(step: Step, version: VersionKey) -> list[str]:
    """Endpoints of the nodes that have a weights version; nodes that are up come first."""
    nodes = [step.node(node) for node in nodes_of(step, version)]
    return [node.state_endpoint for node in sorted(nodes, key=lambda node: not node.is_up)]


def ticket(step: Step, reader: Deployment, version: VersionKey) -> Ticket:
    """The ticket for a weights version. It is not signed yet, because only the shell knows the
    secret."""
    nodes = [str(node.node) for node in step.nodes_of(reader)]
    return Ticket(version, reader.key, reader.wpg.incarnation, nodes)


def needed_seqs(step: Step, deployment: Deployment) -> set[int]:
    """Seqs of the needed versions that this policy has published."""
    needed = needed_versions(step, step.job_of(deployment))
    published = {version.seq for version in needed if version.policy == deployment.key}
    return {seq for seq in published if seq >= deployment.queue.first_seq}


def volatile_versions(step: Step, deployment: Deployment) -> set[int]:
    """Seqs of the needed versions of this policy that are only in memory."""
    return needed_seqs(step, deployment) - set(deployment.durability.durable_versions)


def durable_needed_seqs(step: Step, deployment: Deployment) -> list[int]:
    """Seqs of the needed versions of this policy that are durable.

    Its next incarnation does not have to make them again.
    """
    return sorted(needed_seqs(step, deployment) & set(deployment.durability.durable_versions))


def release_versions(step: Step, job: Job) -> None:
    """Drop the weights versions of a job that are no longer needed."""
    needed = needed_versions(step, job)
    _release(step, job, [version for version in job.versions.published if version not in needed])


def release_unnamed(step: Step, name: str) -> None:
    """Drop the versions of a job whose naming time is over and that nothing else needs."""
    job = step.state.jobs.get(name)
    if job is None:
        return
    for version in job.versions.published:
        named = job.versions.named.get(str(version))
        if named is not None and named.until_s > step.now_s:
            reads.wake_at(step, version, named.until_s)
    release_versions(step, job)


def release_all(step: Step, job: Job) -> None:
    _release(step, job, job.versions.published)


def release_restored(step: Step, deployment: Deployment) -> None:
    """Release the unneeded versions that a WPG has brought back from its seal.

    They may have been released while it was down. The same applies to a version that a dead
    incarnation was publishing when its job fell back.
    """
    needed = needed_versions(step, step.job_of(deployment))
    durability = deployment.durability
    seqs = [*durability.durable_versions, *durability.take_unfinished()]
    restored = [VersionKey(deployment.key, seq) for seq in seqs]
    unneeded = [version for version in restored if version not in needed]
    if unneeded:
        for node in step.nodes_of(deployment):
            step.send(ReleaseVersions, node, versions=unneeded)


def _release(step: Step, job: Job, versions: list[VersionKey]) -> None:
    if not versions:
        return
    holder_nodes = {node for d in step.deployments_of(job) for node in holders.nodes_with(d)}
    holder_nodes.update(node for nodes in job.versions.retained.values() for node in nodes)
    holder_nodes.update(copying.node for copying in job.versions.copying.values())
    for version in versions:
        named = job.versions.drop_name(str(version))
        holder_nodes.update(named.nodes)
        touch_readers(step, named)
    # A node that never had a version ignores its release, so naming too many nodes is harmless.
    release_at(step, holder_nodes, versions)
    published = [version for version in job.versions.published if version not in versions]
    job.versions.published = published
    for version in versions:
        nodes = job.versions.drop_retained(str(version))
        prefix = f"{version.policy}."
        if nodes and not any(name.startswith(prefix) for name in job.versions.retained):
            copying_of = job.versions.copying.items()
            fetching = [c.node for name, c in copying_of if name.startswith(prefix)]
            _forget_policy(step, job, version.policy, list(dict.fromkeys([*nodes, *fetching])))
        copying = job.versions.copying.get(str(version))
        if copying is not None and not copying.is_under_way(step.node(copying.node)):
            # A copy that is still being fetched is given up when its answer arrives.
            job.versions.end_copying(str(version))


def touch_readers(step: Step, named: NamedVersion) -> None:
    """Dispatch the deployments whose operations name a version, because it may be available again
    or permanently gone."""
    for name in dict.fromkeys(named.readers.values()):
        reader = step.state.deployments.get(name)
        if reader is not None:
            step.touch(reader)


def release_at(step: Step, nodes: Iterable[NodeId], versions: list[VersionKey]) -> None:
    for name in sorted(nodes):
        step.send(ReleaseVersions, step.node(name), versions=versions)


def _forget_policy(step: Step, job: Job, policy: DeploymentKey, nodes: list[NodeId]) -> None:
    """Have nodes forget a deleted policy whose versions are no longer needed, including its seals.

    Nothing is done if a policy of the same name exists: its next seal replaces the old ones.
    """
    if step.deployment(policy) is not None:
        return
    incarnation = job.earlier.incarnations[policy.deployment]
    for node in nodes:
        step.state.request_forget(node, str(policy), incarnation)
        step.send(StopWpg, step.node(node), deployment=policy, incarnation=incarnation, forget=True)
