"""Replicas: copy data that depends on a node to another node before the node is vacated.

Two kinds of data count. Each part of a `remote` job's newest seal must be on two nodes. A weights
version of a deleted policy that its job still needs must be on some node, because nobody can make
it again. If too few of the nodes that have it will stay, one more node fetches a copy from them. If
that node cannot, another one is asked, again and again. The copy on the vacated node stays until
the next seal is committed, or until the version is no longer needed.

A running seal or move makes copies itself, so nothing is requested here in the meantime.

Cost of `request_copies`: linear in the deployments while a node is being vacated, else nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from phaseloom.common.contract.commands import FilesTicket, MirrorState, Ticket
from phaseloom.common.contract.events import StateMirrored
from phaseloom.common.contract.ids import NodeId, VersionKey, parse_operation_key
from phaseloom.common.contract.specs import Durability
from phaseloom.scheduler.core.durability import holders, retention, seals
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.durability import Copying
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import JOB_ENDED, WpgState


def request_copies(step: Step) -> None:
    """Request the missing copies; called when nodes, or the copies on them, may have changed."""
    if not step.state.closing:
        return
    for _, deployment in sorted(step.state.deployments.items()):
        if _is_idle(deployment):
            at_risk = list(_parts_at_risk(step, deployment))
            _give_up_failed(step, deployment, at_risk)
            for part in at_risk:
                _copy_part(step, deployment, part)
    for _, job in sorted(step.state.jobs.items()):
        for version in _retained_at_risk(step, job):
            _copy_retained(step, job, version)


# --- data at risk --------------------------------------------------------------------------------


def _is_idle(deployment: Deployment) -> bool:
    """Whether neither a seal nor a move is making copies of a deployment's state now."""
    return not deployment.durability.sealing and not deployment.is_on_its_way


def _parts_at_risk(step: Step, deployment: Deployment) -> Iterator[int]:
    """Parts of a deployment's seal that too few of the staying nodes have."""
    if deployment.wpg.state is WpgState.STOPPED or not deployment.durability.seal_seq:
        return
    if step.job_of(deployment).spec.durability is not Durability.REMOTE:
        return  # the seal is on its own nodes and moves with it
    for part in range(len(deployment.wpg.assignments)):
        if len(_staying(step, holders.nodes_with_part(deployment, part))) < seals.NUM_REMOTE_COPIES:
            yield part


def _retained_at_risk(step: Step, job: Job) -> Iterator[VersionKey]:
    """Retained versions of a job that too few of the staying nodes have."""
    if job.state in JOB_ENDED:
        return
    for name, nodes in sorted(job.versions.retained.items()):
        is_remote = job.spec.durability is Durability.REMOTE
        num_wanted = min(len(nodes), seals.NUM_REMOTE_COPIES) if is_remote else 1
        if len(_staying(step, nodes)) < num_wanted:
            yield _version(name)


def _version(name: str) -> VersionKey:
    key = parse_operation_key(name)
    assert key.seq is not None
    return VersionKey(key.deployment_key, key.seq)


def _staying(step: Step, nodes: Collection[NodeId]) -> list[NodeId]:
    return [node for node in nodes if node not in step.state.closing]


# --- requests ------------------------------------------------------------------------------------


def _give_up_failed(step: Step, deployment: Deployment, at_risk: Collection[int]) -> None:
    """Give up failed copies of parts that are no longer at risk, so that their nodes can copy other
    parts.

    A part is no longer at risk if, for example, its node stays after all.
    """
    for copying in [
        c for c in deployment.durability.copying if c.has_failed and c.part not in at_risk
    ]:
        deployment.durability.end_copying(copying)
        holders.give_up_copy(step, deployment, copying.node)


def _copy_part(step: Step, deployment: Deployment, part: int) -> None:
    before = next((c for c in deployment.durability.copying if c.part == part), None)
    if not _needs_request(step, before):
        return
    sources = seals.sources(step, deployment, part, but=NodeId(""))
    nodes_in_use = holders.nodes_in_use(deployment)
    if before is not None:
        nodes_in_use.discard(before.node)
    fit = [node for node in holders.copy_candidates(step, deployment) if node not in nodes_in_use]
    node = _next_node(fit, before)
    if node is None or not sources:
        return
    command = step.send(
        MirrorState,
        step.node(node),
        deployment=deployment.key,
        seal_seq=deployment.durability.seal_seq,
        versions=retention.durable_needed_seqs(step, deployment),
        sources=sources,
        ticket=holders.files_ticket(deployment, [node]),
        rank_offset=sum(len(earlier.devices) for earlier in deployment.wpg.assignments[:part]),
        num_ranks=deployment.spec.layout.num_ranks,
    )
    if before is not None:
        deployment.durability.end_copying(before)
        if before.node != node:
            holders.give_up_copy(step, deployment, before.node)
    failures = before.failures if before is not None else 0
    revision = step.node(node).revision
    copying = Copying(node, revision, command, part, failures=failures)
    deployment.durability.begin_copying(copying)
    step.notify("copy requested", f"{node} replaces a node that is being vacated", deployment.name)


def _copy_retained(step: Step, job: Job, version: VersionKey) -> None:
    name = str(version)
    before = job.versions.copying.get(name)
    if not _needs_request(step, before):
        return
    nodes = job.versions.retained[name]
    sources = [step.node(node).state_endpoint for node in nodes if step.node(node).is_up]
    hosts = step.state.cluster.hosts.values()
    forgetting = [n for n, names in step.state.stopping.items() if str(version.policy) in names]
    fit = [h.node for h in hosts if h.is_up and h.node not in (*nodes, *forgetting)]
    job_nodes = {node for deployment in step.deployments_of(job) for node in deployment.nodes}
    # The job's own nodes, which read the version, come first.
    fit.sort(key=lambda node: (node not in job_nodes, node))
    node = _next_node(fit, before)
    if node is None or not sources:
        return
    incarnation = _newest_incarnation(step, job, version)
    command = step.send(
        MirrorState,
        step.node(node),
        deployment=version.policy,
        seal_seq=0,
        versions=[],
        sources=sources,
        ticket=FilesTicket(version.policy, incarnation, [str(node)]),
        keeps=Ticket(version, version.policy, incarnation, [str(node)]),
    )
    failures = before.failures if before is not None else 0
    if before is not None and before.node != node:
        retention.release_at(step, [before.node], [version])  # it may have the version nevertheless
    copying = Copying(node, step.node(node).revision, command, failures=failures)
    job.versions.begin_copying(name, copying)
    step.notify("copy requested", f"{node} replaces a node that is being vacated", name)


def _newest_incarnation(step: Step, job: Job, version: VersionKey) -> int:
    """The newest incarnation of the policy that published a version.

    State managers refuse tickets that name an earlier incarnation.
    """
    successor = step.deployment(version.policy)
    earlier = job.earlier.incarnations.get(version.policy.deployment, 0)
    return max(earlier, successor.wpg.incarnation if successor is not None else 0)


def _needs_request(step: Step, before: Copying | None) -> bool:
    if before is None:
        return True
    if before.has_failed:
        return before.retry_at_s <= step.now_s
    return not before.is_under_way(step.node(before.node))


def _next_node(fit: list[NodeId], before: Copying | None) -> NodeId | None:
    """The node to ask next for a copy, or None.

    After a failure the nodes are asked in turn, starting after the node that failed.
    """
    if before is not None and before.has_failed:
        fit = sorted(fit)
        fit = [*(node for node in fit if node > before.node), *fit]
    return fit[0] if fit else None


# --- answers -------------------------------------------------------------------------------------


def mirrored(step: Step, event: StateMirrored) -> bool:
    """Record that a node has fetched a copy or could not.

    Returns: whether this module had requested the copy.
    """
    deployment = step.deployment(event.deployment)
    if deployment is not None:
        for copying in deployment.durability.copying:
            if copying.command == event.command:
                _record_part(step, deployment, copying, event)
                return True
    job = step.state.jobs.get(str(event.deployment.job_key))
    for name, copying in job.versions.copying.items() if job is not None else ():
        if job is not None and copying.command == event.command:
            _record_retained(step, job, name, event)
            return True
    return False


def _record_part(
    step: Step, deployment: Deployment, copying: Copying, event: StateMirrored
) -> None:
    if event.error is not None:
        _failed(step, copying, event, deployment.name)
        return
    deployment.durability.end_copying(copying)
    holders.add_replica(deployment, copying.part, event.node)
    step.follow_up(FollowUp.PLACE)  # a `phaseloom drain` may be waiting for this copy


def _record_retained(step: Step, job: Job, name: str, event: StateMirrored) -> None:
    if name not in job.versions.retained:
        job.versions.end_copying(name)
        retention.release_at(step, [event.node], [_version(name)])
    elif event.error is not None:
        _failed(step, job.versions.copying[name], event, name)
    else:
        job.versions.end_copying(name, on=event.node)
        step.follow_up(FollowUp.PLACE)


def _failed(step: Step, copying: Copying, event: StateMirrored, subject: str) -> None:
    assert event.error is not None
    copying.has_failed = True
    copying.failures += 1
    copying.retry_at_s = step.now_s + holders.retry_pause_s(copying.failures)
    step.set_timer(f"copies/{step.sequence}", copying.retry_at_s)
    step.notify("copy failed", f"{event.node}: {event.error.message}", subject)


# --- description ---------------------------------------------------------------------------------


def describe_needed_copies(step: Step, node: NodeId) -> list[str]:
    """Describe the replicas that would fall below the required count if this node were shut
    down."""
    lines = []
    for _, deployment in sorted(step.state.deployments.items()):
        for part in _parts_at_risk(step, deployment):
            if node in holders.nodes_with_part(deployment, part) and node not in deployment.nodes:
                seal_seq = deployment.durability.seal_seq
                line = f"{deployment.name} needs the copy of its seal at {seal_seq} on this node"
                copying = next((c for c in deployment.durability.copying if c.part == part), None)
                lines.append(f"{line}; {_progress(step, deployment, copying)}")
    for _, job in sorted(step.state.jobs.items()):
        for version in _retained_at_risk(step, job):
            if node in job.versions.retained[str(version)]:
                line = f"weights version {version} is only here and cannot be made again"
                copying = job.versions.copying.get(str(version))
                lines.append(f"{line}; {_progress(step, None, copying)}")
    return lines


def _progress(step: Step, deployment: Deployment | None, copying: Copying | None) -> str:
    if deployment is not None and not _is_idle(deployment):
        return "another copy is being made"
    if copying is None:
        return "no other node can take a copy"
    if copying.has_failed:
        left_s = max(0.0, copying.retry_at_s - step.now_s)
        return f"{copying.node} could not take a copy, next try in {left_s:.0f} s"
    return f"{copying.node} is fetching a copy"
