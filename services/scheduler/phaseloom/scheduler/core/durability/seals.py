"""Seals, the purge floor, and which weights versions are kept.

The *purge floor* of a deployment is the seq up to which its stored operations are not needed any
more. It is the seq of its newest committed seal, or less while a `publish_weights` under that made
a version that is needed and is not yet as durable as the seal.

These weights versions are kept: a policy's newest, and every one that a deployment holds, has a
queued sync for, or may have to sync again when it is rebuilt; every one that an open operation
names, and those that may be named for a time yet. Where the policy is deleted, versions that
somebody needs stay on its nodes as *retained versions*: nobody can make them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.common.contract.commands import FilesTicket, ReleaseVersions, SealState, StopWpg
from phaseloom.common.contract.events import SealCommitted, SealFailed
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import Durability
from phaseloom.scheduler.core.operations import gradients, reads
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.job import Job, NamedVersion
from phaseloom.scheduler.core.state.node import Closing
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, WpgState
from phaseloom.scheduler.core.state.tree import State

NUM_REMOTE_COPIES = 2
"""Copies of each part of a `remote` seal, the one on the deployment's own node included."""
RETRY_PAUSE_S = 5.0
"""First pause before a copy that has failed is asked for again; each one is twice as long as the
one before."""
MAX_RETRY_PAUSE_S = 80.0
_GRADIENT_FREE = frozenset({"optim_step", "publish_weights"})


def mutated(step: Step, deployment: Deployment, op: Op) -> None:
    """Note that a mutating operation of a deployment took effect.

    Weights versions and stored operations that nothing needs after it are dropped.
    """
    gradients.took_effect(deployment, op)
    if op.kind == "publish_weights":
        seq = op.key.seq
        assert seq is not None
        job = step.job(op.key.job_key)
        version = VersionKey(deployment.key, seq)
        job.versions.published.append(version)
        if op.ttl_s:
            job.versions.name(str(version), op.ttl_s, step.now_s)
            reads.wake_at(step, version, step.now_s + op.ttl_s)
        release_versions(step, job)
    elif op.kind == "sync_weights":
        deployment.durability.hold(op.version)
        # A sync replaces the whole state: no operation before it is needed to rebuild that.
        if not volatile_versions(step, deployment) and not deployment.queue.snapshots:
            delete(step, deployment, deployment.durability.forget_before_last())
        release_versions(step, step.job(op.key.job_key))
    if deployment.spec.trainable:
        deployment.durability.count_change(op.num_bytes, step.now_s)


def needed_versions(step: Step, job: Job) -> set[VersionKey]:
    """The weights versions of a job that must be kept: each policy's newest, those that may still
    be named, and the wanted ones.

    A deleted policy has none of the first two here: only the wanted ones of its versions are kept.
    """
    newest: dict[str, VersionKey] = {}
    nameable: list[VersionKey] = []
    for version in job.versions.published:
        if not is_retained(step, version):
            newest[str(version.policy)] = version
            named = job.versions.named.get(str(version))
            if named is not None and named.until_s > step.now_s:
                nameable.append(version)
    return {*newest.values(), *nameable, *wanted_versions(step, job)}


def wanted_versions(step: Step, job: Job, *, but: Deployment | None = None) -> set[VersionKey]:
    """The versions of a job that open operations name, and those that a deployment of the job
    holds, has a queued sync for or may sync again.

    Args: but: a deployment whose needs do not count.
    """
    named = job.versions.named
    needed = {v for v in job.versions.published if str(v) in named and named[str(v)].is_read}
    for other in step.deployments_of(job.key):
        if other is but:
            continue
        if other.durability.holds is not None:
            needed.add(other.durability.holds)
        needed.update(other.queue.queued_syncs.values())
        needed.update(m.version for m in other.durability.history if m.version is not None)
    return needed


def is_retained(step: Step, version: VersionKey) -> bool:
    """Whether the policy that made a version is deleted.

    A new policy may have been created under its name since.
    """
    policy = step.deployment(version.policy)
    return policy is None or version.seq < policy.queue.first_seq


def nodes_of(step: Step, version: VersionKey) -> list[NodeId]:
    """The nodes that have, or may have, parts of a weights version; empty: none is known."""
    policy = step.deployment(version.policy)
    if policy is not None and version.seq >= policy.queue.first_seq:
        holders = [node for part in policy.durability.replicas for node in part]
        return list(dict.fromkeys([*policy.nodes, *policy.move.stale_holders, *holders]))
    return step.job(version.policy.job_key).versions.retained.get(str(version), [])


def _own_needed(step: Step, deployment: Deployment) -> set[int]:
    """Seqs of the needed versions that this policy has published."""
    needed = needed_versions(step, step.job_of(deployment))
    own = {version.seq for version in needed if version.policy == deployment.key}
    return {seq for seq in own if seq >= deployment.queue.first_seq}


def volatile_versions(step: Step, deployment: Deployment) -> set[int]:
    """Seqs of the needed versions of this policy that its nodes hold in memory only."""
    return _own_needed(step, deployment) - set(deployment.durability.durable_versions)


def release_versions(step: Step, job: Job) -> None:
    """Drop the weights versions of a job that nothing needs any more."""
    needed = needed_versions(step, job)
    _release(step, job, [version for version in job.versions.published if version not in needed])


def release_unnamed(step: Step, name: str) -> None:
    """Drop the versions of a job that could be named until now, and that nothing else needs."""
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


def _release(step: Step, job: Job, gone: list[VersionKey]) -> None:
    if not gone:
        return
    places = {node for d in step.deployments_of(job.key) for node in nodes_with(d)}
    places.update(node for nodes in job.versions.retained.values() for node in nodes)
    places.update(copying.node for copying in job.versions.copying.values())
    for version in gone:
        named = job.versions.drop_name(str(version))
        places.update(named.nodes)
        touch_readers(step, named)
    release_at(step, places, gone)
    published = [version for version in job.versions.published if version not in gone]
    job.versions.published = published
    for version in gone:
        nodes = job.versions.drop_retained(str(version))
        prefix = f"{version.policy}."
        if nodes and not any(name.startswith(prefix) for name in job.versions.retained):
            copying_of = job.versions.copying.items()
            fetching = [c.node for name, c in copying_of if name.startswith(prefix)]
            _forget_policy(step, job, version.policy, list(dict.fromkeys([*nodes, *fetching])))
        copying = job.versions.copying.get(str(version))
        if copying is not None and not copying.is_under_way(step.node(copying.node)):
            # A copy that is under way is given up when its answer comes.
            job.versions.end_copying(str(version))


def touch_readers(step: Step, named: NamedVersion) -> None:
    """Have the deployments looked at whose operations name a version: it may be there again, or
    gone for good."""
    for key in named.readers:
        reader = step.deployment(key.deployment_key)
        if reader is not None:
            step.touch(reader)


def release_at(step: Step, nodes: Iterable[NodeId], versions: list[VersionKey]) -> None:
    for name in sorted(nodes):
        step.send(ReleaseVersions, step.node(name), versions=versions)


def _forget_policy(step: Step, job: Job, policy: DeploymentKey, nodes: list[NodeId]) -> None:
    """Have nodes forget a deleted policy of which no version is needed any more: its seals go, too.

    Nothing is done where a policy of the same name exists: its next seal replaces the old ones.
    """
    if step.deployment(policy) is not None:
        return
    incarnation = job.earlier.incarnations[policy.deployment]
    for node in nodes:
        step.state.ask_to_forget(node, str(policy), incarnation)
        step.send(StopWpg, step.node(node), deployment=policy, incarnation=incarnation, forget=True)


def release_restored(step: Step, deployment: Deployment) -> None:
    """Release the versions that a WPG brought back from its seal and that nothing needs any more.

    They may have been released while it was away. A version that a dead incarnation was publishing
    when its job fell back has no user either.
    """
    needed = needed_versions(step, step.job_of(deployment))
    durability = deployment.durability
    seqs = [*durability.durable_versions, *durability.take_unfinished()]
    restored = [VersionKey(deployment.key, seq) for seq in seqs]
    gone = [version for version in restored if version not in needed]
    if gone:
        for node in step.nodes_of(deployment):
            step.send(ReleaseVersions, node, versions=gone)


def is_outcome_needed(state: State, key: OperationKey) -> bool:
    """Whether the outcome of an operation that ended long ago must still be kept.

    A rebuild compares the outcomes of the operations that it runs again with the stored ones. An
    `attach` tells by stored outcomes which seqs are gaps.
    """
    deployment = state.deployments.get(str(key.deployment_key))
    if deployment is None or key.seq is None:
        return False
    if state.jobs[str(key.job_key)].state in JOB_ENDED:
        return False
    history = deployment.durability.history
    return key.seq >= (history[0].seq if history else deployment.queue.next_seq)


def is_due(step: Step, deployment: Deployment, times: int = 1) -> bool:
    """Whether to seal now: enough has changed since the last seal, and no gradients are pending.

    Args: times: factor on the number of mutations that make a seal due. It is 1 where the state
              leaves its device anyway, when a seal costs least, and higher elsewhere. It does not
              apply to the limits on bytes and on age.
    """
    config = step.config
    has_enough = deployment.durability.since_seal > 0 and (
        deployment.durability.since_seal >= config.seal_every * times
        or deployment.durability.since_seal_bytes >= config.seal_bytes
        or step.now_s - deployment.durability.changed_s >= config.seal_age_s
    )
    return (
        config.seal_every > 0
        and has_enough
        and not deployment.durability.sealing
        # A state that is being saved may have to be made again, from the seal before it.
        and not deployment.queue.snapshots
        and not deployment.is_on_its_way
        and not deployment.durability.replay
        and deployment.durability.last_kind in _GRADIENT_FREE
        # A refused step throws gradients away: a seal must not bring them back.
        and not gradients.pending(deployment)
    )


def seal(step: Step, deployment: Deployment) -> None:
    """Ask every node of a deployment to seal its part of the state as it is now.

    A `remote` seal is skipped, and people are told so, where too few nodes can take copies of it.
    """
    durability = step.job_of(deployment).spec.durability
    replicas = _replicas(step, deployment) if durability is Durability.REMOTE else {}
    if replicas is None:
        step.tell("not sealed", "no other node is there to keep a copy of it", deployment.name)
        deployment.durability.skip_seal()
        return
    deployment.durability.seal()
    versions = [
        seq for seq in _own_needed(step, deployment) if seq <= deployment.durability.applied
    ]
    for node in step.nodes_of(deployment):
        step.order(
            SealState,
            node,
            deployment,
            seq=deployment.durability.applied,
            versions=sorted(versions),
            durability=durability,
            replicas={} if not replicas else replicas[node.node],
            num_parts=len(deployment.wpg.assignments),
            ticket=ticket(deployment, replicas[node.node]) if replicas else None,
        )


def committed(step: Step, event: SealCommitted) -> None:
    """Note that a node has its part of a seal on disk; the last part completes the seal.

    With the seal, stored operations and weights versions are dropped that are not needed any more.
    """
    deployment = step.deployment(event.deployment)
    if deployment is None or event.node not in deployment.nodes:
        return
    if event.seq <= max(deployment.durability.seal_seq, deployment.wpg.origin_seq):
        return
    versions = _note_part(deployment, event)
    if versions is None:
        return
    _note_copies(step, deployment, event, versions)
    drop_other_parts(step, deployment)
    deployment.durability.count_from_seal(step.now_s)
    floor = _floor(step, deployment)
    delete(step, deployment, deployment.durability.forget_up_to(floor))
    release_versions(step, step.job_of(deployment))
    clear_stale_holders(step, deployment)
    _look_at_copies(step)


def _look_at_copies(step: Step) -> None:
    """Look again at the nodes that are to be left: the copies that count on them may have changed.

    Nothing is done where no node is to be left.
    """
    if step.state.closing:
        step.follow(FollowUp.PLACE)


def clear_stale_holders(step: Step, deployment: Deployment) -> None:
    """Have the nodes that a deployment has left drop what they still keep of it."""
    retained = step.job_of(deployment).versions.retained
    if any(name.startswith(f"{deployment.name}.") for name in retained):
        return  # versions of an earlier policy of its name: they stay until the job ends
    for node in deployment.move.stale_holders:
        forget_at(step, deployment, node)
    deployment.move.keep([])


def forget_at(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Have a node drop everything that it has of a deployment that is not placed on it."""
    step.state.ask_to_forget(node, deployment.name, deployment.wpg.incarnation)
    step.order(StopWpg, step.node(node), deployment, forget=True)


def _note_part(deployment: Deployment, event: SealCommitted) -> list[int] | None:
    """Note a node's part of the seal that was asked for last.

    Returns: the seqs of the weights versions that are durable with the whole seal; None while parts
             are missing, or where the part belongs to another seal.
    """
    if len(deployment.wpg.assignments) == 1:
        return event.versions
    if event.seq != deployment.durability.seal_asked:
        return None
    parts = deployment.durability.seal_parts
    deployment.durability.note_part(event.node, event.versions, event.copies)
    if any(node not in parts for node in deployment.nodes):
        return None
    return sorted(set.intersection(*(set(part) for part in parts.values())))


def _note_copies(
    step: Step, deployment: Deployment, event: SealCommitted, versions: list[int]
) -> None:
    """Note which nodes have a deployment's new seal.

    Nodes that have only the seal before it become stale holders, except those that the deployment
    is about to move to.
    """
    before = _copied_to(deployment)
    parts = (
        deployment.durability.part_copies
        if len(deployment.wpg.assignments) > 1
        else {event.node: event.copies}
    )
    # A part that was noted by a core that knew of no copies has none.
    gone = {name for name, leave in step.state.closing.items() if leave.why is Closing.GONE}
    replicas = [
        [node, *(copy for copy in parts.get(node, []) if copy not in gone)]
        for node in deployment.nodes
    ]
    deployment.durability.sealed(event.seq, versions, replicas)
    for node in sorted(gone & {copy for copies in parts.values() for copy in copies}):
        forget_at(step, deployment, node)  # in case the node comes back all the same
    holders = {node for part in deployment.durability.replicas for node in part}
    holders.update(_targets(deployment))
    deployment.move.keep([*deployment.move.stale_holders, *before], but=holders)


# --- who has the seal -----------------------------------------------------------------------------


def holders(deployment: Deployment, index: int) -> list[NodeId]:
    """The nodes that have this part of a deployment's newest seal; empty where it has no seal."""
    if not deployment.durability.seal_seq:
        return []
    # Where no copies were noted, the seal is on the deployment's own nodes.
    return (
        deployment.durability.replicas[index]
        if deployment.durability.replicas
        else [deployment.nodes[index]]
    )


def note_replica(deployment: Deployment, index: int, node: NodeId) -> None:
    """Note that one more node has this part of a deployment's newest seal."""
    if not deployment.durability.replicas:
        deployment.durability.set_replicas([[own] for own in deployment.nodes])
    deployment.durability.note_replica(index, node)


def drop_other_parts(step: Step, deployment: Deployment) -> None:
    """Have each node that is about to get one part of a seal forget any other part that it has.

    A node has at most one part of a deployment's seal.
    """
    for index, node in enumerate(_targets(deployment)):
        others = [part for i, part in enumerate(deployment.durability.replicas) if i != index]
        if node not in deployment.nodes and any(node in part for part in others):
            deployment.durability.drop_replicas_on({node})
            forget_at(step, deployment, node)


def give_up_copy(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Note that the copy which a node was told to fetch, and may have by now, is not needed.

    Where the seal has several parts the node forgets the copy at once; else it becomes a stale
    holder, which forgets it after the next seal.
    """
    if len(deployment.wpg.assignments) > 1:
        forget_at(step, deployment, node)  # the node may be about to get another part
    elif node not in deployment.move.stale_holders:
        deployment.move.keep([*deployment.move.stale_holders, node])


def stop_copying(step: Step, deployment: Deployment) -> None:
    """Give up every copy of a deployment's seal that is being made for a node that is left."""
    for copying in deployment.durability.copying:
        give_up_copy(step, deployment, copying.node)
    deployment.durability.stop_copying()


def nodes_with(deployment: Deployment) -> list[NodeId]:
    """All nodes that have, or may have, anything of a deployment."""
    every = [
        *deployment.nodes,
        *deployment.move.stale_holders,
        *_copied_to(deployment),
        *_targets(deployment),
    ]
    return list(dict.fromkeys(every))


def nodes_in_use(deployment: Deployment) -> set[NodeId]:
    """The nodes that have, or will have, a part of a deployment's newest seal.

    None of them can take another part.
    """
    return {*deployment.nodes, *_copied_to(deployment), *_targets(deployment)}


def _copied_to(deployment: Deployment) -> list[NodeId]:
    copies = [node for part in deployment.durability.replicas for node in part]
    return [*copies, *(copying.node for copying in deployment.durability.copying)]


def _targets(deployment: Deployment) -> list[NodeId]:
    """The nodes that a deployment is moving to, by part; empty where it does not move."""
    return (
        []
        if deployment.move.relocation is None
        else [assigned.node for assigned in deployment.move.relocation.assignments]
    )


def drop_replicas(deployment: Deployment) -> None:
    """Note that a deployment has no seal any more.

    Nodes that have the old seal and do not run the deployment become stale holders, which are told
    to forget it later.
    """
    deployment.move.keep(nodes_with(deployment), but=deployment.nodes)
    deployment.durability.drop_replicas()


def is_readable(step: Step, deployment: Deployment) -> bool:
    """Whether every part of the seal that a deployment is rebuilt from is on a node that is up.

    Without a seal there is nothing to read, which counts as readable.
    """
    if not deployment.durability.seal_seq:
        return True
    return all(
        any(step.node(node).is_up for node in holders(deployment, index))
        for index in range(len(deployment.wpg.assignments))
    )


def sources(step: Step, deployment: Deployment, index: int, *, but: NodeId) -> list[str]:
    """Endpoints of the state managers that may have this part of a seal, or the versions needed.

    Nodes that are down are left out, and nodes that only have another part of the seal, which goes
    by the same name.

    Args: but: a node that is left out: the one that fetches.
    """
    own = holders(deployment, index)
    parts = range(len(deployment.wpg.assignments))
    others = {node for i in parts if i != index for node in holders(deployment, i)}
    names = [
        *own,
        *(
            node
            for node in [*deployment.nodes, *deployment.move.stale_holders]
            if node not in others
        ),
    ]
    if deployment.durability.holds is not None:
        names += nodes_of(step, deployment.durability.holds)
    nodes = [step.node(name) for name in dict.fromkeys(names) if name != but]
    return [node.state_endpoint for node in nodes if node.is_up]


def durable_needed(step: Step, deployment: Deployment) -> list[int]:
    """Seqs of a policy's needed weights versions that are durable.

    Its next incarnation does not make them again.
    """
    return sorted(_own_needed(step, deployment) & set(deployment.durability.durable_versions))


def ticket(deployment: Deployment, nodes: Iterable[NodeId]) -> FilesTicket:
    """A ticket by which these nodes may fetch a deployment's seals and durable versions.

    It is not signed yet: only the shell knows the secret.
    """
    return FilesTicket(deployment.key, deployment.wpg.incarnation, [str(node) for node in nodes])


def fit_for_copy(step: Step, deployment: Deployment) -> list[NodeId]:
    """Other nodes that could take a copy of a part of a deployment's seal, the best ones first.

    First come the nodes that the deployment is moving to, or that have a copy of an earlier seal;
    then the nodes of its own pool, where it could be rebuilt at once; then all others.
    """
    known = nodes_with(deployment)
    fit = [
        host
        for host in step.state.cluster.hosts.values()
        if host.is_up
        and host.node not in deployment.nodes
        and deployment.name not in step.state.stopping.get(host.node, {})
    ]
    fit.sort(
        key=lambda host: (
            host.node not in known,
            host.pool != deployment.spec.pool,
            host.node,
        )
    )
    return [host.node for host in fit]


def retry_pause_s(num_failures: int) -> float:
    """Pause after so many failed tries in a row to copy a seal or a version to another node."""
    return min(RETRY_PAUSE_S * 2.0 ** (num_failures - 1), MAX_RETRY_PAUSE_S)


def _replicas(step: Step, deployment: Deployment) -> dict[NodeId, dict[NodeId, str]] | None:
    """For each node of a deployment, the other node (with its endpoint) that copies its part.

    Returns: None where too few nodes can take a copy.
    """
    wanted = _targets(deployment)
    names = fit_for_copy(step, deployment)
    others = [name for name in names if name not in wanted]
    chosen: dict[NodeId, dict[NodeId, str]] = {}
    for index, node in enumerate(deployment.nodes):
        # A node that the deployment is moving to gets the part that it is to run.
        name = wanted[index] if len(wanted) == len(deployment.wpg.assignments) else None
        if name is None or name not in names:
            if not others:
                return None
            name = others.pop(0)
        chosen[node] = {name: step.node(name).state_endpoint}
    return chosen


def failed(step: Step, event: SealFailed) -> None:
    """Note that a node could not seal its part of the state: the previous seal stands."""
    deployment = step.deployment(event.deployment)
    if deployment is None or event.node not in deployment.nodes:
        return
    step.tell("seal failed, the previous one stands", event.error.message, deployment.name)
    if event.seq != deployment.durability.seal_asked:
        return  # this seal is given up already, since another node failed first
    deployment.durability.seal_failed()
    _look_at_copies(step)


def _floor(step: Step, deployment: Deployment) -> int:
    """The purge floor of a deployment: a seq; see the module."""
    pending = volatile_versions(step, deployment)
    # An incarnation that is being rebuilt needs every operation after the seal it began with.
    is_rebuilding = deployment.wpg.state in (WpgState.STARTING, WpgState.RECOVERING)
    sealed = deployment.wpg.base if is_rebuilding else deployment.durability.seal_seq
    return min([sealed, *[seq - 1 for seq in pending]])


def delete(step: Step, deployment: Deployment, seqs: list[int]) -> None:
    """Have the stored operations of a deployment that have these seqs deleted."""
    if seqs:
        key = deployment.key
        keys = [OperationKey(key.tenant, key.job, key.deployment, str(seq)) for seq in seqs]
        step.emit(outputs.DeleteOperations(keys))
