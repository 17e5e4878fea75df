"""Worker-process groups (WPGs): how they start, die and are rebuilt.

A WPG starts and dies as a whole, on any number of nodes: if it dies on one node, it is killed on
the others. Each start is an *incarnation*. It begins when no rank of the previous incarnation is
alive and all nodes are up. Messages about devices from an older incarnation are ignored.

An incarnation starts from the newest seal, or from the seeds, and replays in order the operations
that took effect after the seal. Operations that had a permit when the last incarnation died run
again too, as `replay`, because their outcomes may have been stored.
"""

from __future__ import annotations

from phaseloom.common.contract.commands import StartWpg, StopWpg
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import NodeLost, NodeUp, WpgLost, WpgStarted
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.kinds import KINDS
from phaseloom.scheduler.core.devices import devices
from phaseloom.scheduler.core.durability import holders, retention, seals
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.move import Relocation
from phaseloom.scheduler.core.state.node import Node, new_devices
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import WpgEvent, WpgState
from phaseloom.scheduler.core.state.wpg import RankAssignment
from phaseloom.scheduler.core.wpgs import moves

_REPLACES_STATE = frozenset(name for name, kind in KINDS.items() if kind.replaces_state)
_REBUILDING = frozenset({WpgState.STARTING, WpgState.RECOVERING})
_PERMANENT = frozenset({Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND})
"""Errors of a start that would occur again at the next one."""
_ALIVE = frozenset({WpgState.STARTING, WpgState.RECOVERING, WpgState.READY})

FIRST_PAUSE_S = 1.0
"""Pause before a rebuild after a WPG has died twice while idle. It doubles with each further
death."""
MAX_PAUSE_S = 60.0
STEADY_S = 600.0
"""An idle death after this much uptime resets the count of deaths."""


def node_up(step: Step, event: NodeUp) -> None:
    """Record a node's new lease: everything that ran there under an earlier lease is dead.

    Deployments that waited for this node start their next incarnation.
    """
    old = step.state.nodes.get(event.node)
    if old is not None and old.revision >= event.revision:
        return
    placed = [] if old is None else _placed(old)
    for name in placed:
        _lose_node(step, step.state.deployments[name], event.node)
    node = Node(
        node=event.node,
        pool=event.pool,
        devices=new_devices(event.node, event.devices),
        host_memory_bytes=event.host_memory_bytes,
        revision=event.revision,
        state_endpoint=event.state_endpoint,
        residency=event.exclusive_residency,
    )
    step.state.nodes[event.node] = node
    for name in placed:
        deployment = step.state.deployments[name]
        assigned = next(
            assigned for assigned in deployment.wpg.assignments if assigned.node == event.node
        )
        if _has_lost_a_device(step, deployment, assigned):
            groups.end_hold(step.state.cluster, event.node, name)
            deployment.wpg.lose_assignment(assigned)
            # `stop` no longer reaches this node, so it is told below to forget the deployment.
            step.state.request_forget(event.node, name, deployment.wpg.incarnation)
            continue
        devices.place(step, deployment, on=event.node)
        _try_start(step, deployment)
    for deployment in step.state.deployments.values():
        if deployment.wpg.state is WpgState.LOST and deployment.wpg.assignments:
            _try_start(step, deployment)  # it may have waited for a copy of its seal on this node
    for name in step.state.moving:
        deployment = step.state.deployments[name]
        assignments = (
            deployment.move.relocation.assignments if deployment.move.relocation is not None else []
        )
        for assigned in assignments:
            if assigned.node == event.node:
                _has_lost_a_device(step, deployment, assigned)
                moves.node_restarted(step, deployment, event.node)
    _repeat_stops(step, node)
    step.follow_up(FollowUp.PLACE)


def _has_lost_a_device(step: Step, deployment: Deployment, assigned: RankAssignment) -> bool:
    """Whether a node has returned without a device that a deployment has or will get.

    If so, the deployment's job fails.
    """
    last = max(assigned.devices)
    if last < len(step.node(assigned.node).devices):
        return False
    message = f"device {last} of {assigned.node} is gone"
    error = ErrorInfo(Code.RESOURCE_EXHAUSTED, message, remedy="submit the job again")
    step.follow_up(FollowUp.FAIL_JOB, deployment.job_name, error)
    return True


def _placed(node: Node) -> list[str]:
    return list(dict.fromkeys(devices.placed_on(node)))


def _repeat_stops(step: Step, node: Node) -> None:
    """Tell a node again which deployments to forget.

    Their jobs ended while the node was away, or the node died before it had dropped their data.
    """
    for name in step.state.stopping.get(node.node, {}):
        step.send(
            StopWpg,
            node,
            deployment=DeploymentKey(*name.split(".")),
            incarnation=step.state.request_forget_again(node.node, name),
            forget=True,
        )


def _confirm_forgotten(step: Step, event: WpgLost) -> None:
    """Record that a node has forgotten a deployment, if it was told to."""
    name = str(event.deployment)
    stop_incarnation = step.state.stopping.get(event.node, {}).get(name)
    if stop_incarnation is not None and stop_incarnation <= event.incarnation:
        step.state.confirm_forgotten(event.node, name)
        # From now on the node can take a copy of the deployment's seal again.
        if step.state.closing:
            step.follow_up(FollowUp.PLACE)
        deployment = step.deployment(event.deployment)
        if deployment is not None and deployment.wpg.state is WpgState.STOPPED:
            # A later deployment of the same name continues its incarnations from here.
            deployment.wpg.raise_incarnation(event.incarnation)


def node_lost(step: Step, event: NodeLost) -> None:
    """Record that a node has lost its lease: all ranks on it count as dead."""
    node = step.state.nodes.get(event.node)
    if node is None or node.revision != event.revision or not node.is_up:
        return
    for name in _placed(node):
        _lose_node(step, step.state.deployments[name], event.node)
    node.is_up = False
    step.notify("node lost", event.reason, event.node)
    config = step.config
    for absence, after_s in (("away", config.node_grace_s), ("gone", config.node_gone_s)):
        if after_s:
            step.set_timer(f"{absence}/{node.node}/{node.revision}", step.now_s + after_s)


def place(step: Step, deployment: Deployment, assignments: list[RankAssignment]) -> None:
    """Put a deployment on devices and start it there.

    Args: assignments: devices for each rank, in order; the first is the leader's.
    """
    deployment.wpg.put_on(assignments)
    devices.place(step, deployment)
    start(step, deployment)


def move(step: Step, deployment: Deployment, assignments: list[RankAssignment]) -> None:
    """Move a deployment and its state elsewhere, as soon as its running operations have ended.

    Args: assignments: as for `place`. If they are the present ones, the deployment stays, and any
              move in progress ends.
    """
    if deployment.wpg.state is not WpgState.STOPPED:
        moves.start(step, deployment, assignments)


def advance_moves(step: Step) -> None:
    """Advance every move as far as this event allows."""
    for name in list(step.state.moving):
        deployment = step.state.deployments.get(name)
        if deployment is not None and deployment.move.relocation is not None:
            _advance_move(step, deployment, deployment.move.relocation)
        if deployment is None or deployment.move.relocation is None:
            step.state.remove_move(name)


def _advance_move(step: Step, deployment: Deployment, relocation: Relocation) -> None:
    if deployment.wpg.state is WpgState.LOST:
        _try_start(step, deployment)
    elif deployment.wpg.state is WpgState.READY and moves.advance(step, deployment, relocation):
        _record_death(step, deployment)
        _send_kill(step, deployment)


def start(step: Step, deployment: Deployment) -> None:
    """Start an incarnation on the deployment's nodes, from its newest seal if it has one."""
    step.advance_wpg(deployment, WpgEvent.STARTED)
    deployment.durability.incarnation_begins()
    deployment.wpg.begin(deployment.durability.seal_seq)
    deployment.wpg.starting_on = deployment.nodes
    nodes = deployment.nodes
    versions = (
        retention.durable_needed_seqs(step, deployment) if deployment.durability.seal_seq else []
    )
    rank_offset = 0
    for index, assigned in enumerate(deployment.wpg.assignments):
        # A node without a good copy of its part of the seal fetches it from these.
        sources = []
        if deployment.durability.seal_seq:
            sources = seals.sources(step, deployment, index, but=assigned.node)
        step.send_for(
            StartWpg,
            step.node(assigned.node),
            deployment,
            spec=deployment.spec,
            devices=assigned.devices,
            seal_seq=deployment.durability.seal_seq,
            checkpoint="" if deployment.durability.seal_seq else deployment.wpg.checkpoint,
            applied=0 if deployment.durability.seal_seq else deployment.wpg.origin_seq,
            rank_offset=rank_offset,
            nodes=nodes if len(nodes) > 1 else [],
            versions=versions,
            sources=sources,
            ticket=holders.files_ticket(deployment, [assigned.node]) if sources else None,
        )
        rank_offset += len(assigned.devices)


def _try_start(step: Step, deployment: Deployment) -> None:
    """Start a deployment's next incarnation if that is possible now.

    It is possible when no rank of the previous incarnation can be alive, the state is readable, the
    pause after repeated deaths is over, and the nodes are up: those that the deployment is moving
    to, or else its present ones.
    """
    if deployment.wpg.dying_on or not holders.is_readable(step, deployment):
        return
    if deployment.wpg.retry_at_s > step.now_s:
        return
    if deployment.move.relocation is not None and moves.is_possible(
        step, deployment, deployment.move.relocation
    ):
        moves.relocate(step, deployment, deployment.move.relocation.assignments)
    if all(node.is_up for node in step.nodes_of(deployment)):
        start(step, deployment)


def pause_ended(step: Step, name: str) -> None:
    """Rebuild a WPG whose pause after repeated deaths is over."""
    deployment = step.state.deployments.get(name)
    if deployment is not None and deployment.wpg.state is WpgState.LOST:
        _try_start(step, deployment)


def restart(step: Step, deployment: Deployment) -> None:
    """Discard the state of the present incarnation, and start the next one from the seal or
    checkpoint on record."""
    if not deployment.wpg.assignments:
        return
    is_alive = deployment.wpg.state in _ALIVE
    _record_death(step, deployment)
    if is_alive:
        _send_kill(step, deployment)  # `lost` starts the next
    else:
        _try_start(step, deployment)


def started(step: Step, event: WpgStarted) -> None:
    """Record that a WPG is up on a node. When it is up on all nodes, its replay can begin."""
    deployment = step.deployment(event.deployment)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    if (
        deployment.wpg.state is not WpgState.STARTING
        or event.node not in deployment.wpg.starting_on
    ):
        return
    # The first node to report sets the state's seq; the other nodes must agree with it.
    is_first = len(deployment.wpg.starting_on) == len(deployment.wpg.assignments)
    deployment.wpg.starting_on.remove(event.node)
    if is_first:
        deployment.wpg.state_bytes = event.state_bytes
        deployment.durability.start_from(event.applied)
    elif event.applied != deployment.durability.applied:
        _reject_mixed_start(step, deployment, event)
        return
    deployment.wpg.state_bytes = max(deployment.wpg.state_bytes, event.state_bytes)
    if deployment.wpg.base and deployment.wpg.base == deployment.durability.seal_seq:
        # A node that fetched its part of the seal from elsewhere now has it on its own disk.
        holders.add_replica(deployment, deployment.nodes.index(event.node), event.node)
    if deployment.wpg.starting_on:
        return
    devices.weigh_host_memory(step, deployment)
    deployment.wpg.complete_start(step.now_s)
    deployment.durability.plan_replay(_replay_seqs(step, deployment, event.applied))
    has_replay = bool(deployment.durability.replay)
    step.advance_wpg(deployment, WpgEvent.UP_TO_REPLAY if has_replay else WpgEvent.UP)
    retention.release_restored(step, deployment)
    if not deployment.durability.seal_seq:
        holders.clear_stale_holders(step, deployment)
    if step.state.closing:
        step.follow_up(FollowUp.PLACE)  # the number of copies of its seal has changed
    is_rebuilt = deployment.wpg.incarnation > deployment.wpg.first_incarnation
    if is_rebuilt and not deployment.durability.replay:
        step.notify("recovered", _origin(deployment, event.applied), deployment.name)
    _touch_siblings(step, deployment)


def _origin(deployment: Deployment, applied: int) -> str:
    """Describe the state that a WPG has started from."""
    if deployment.durability.seal_seq:
        return f"from its seal at {applied}"
    if deployment.wpg.checkpoint:
        return f"from its checkpoint {deployment.wpg.checkpoint}"
    return "from its first state, because it had no seal yet"


def _reject_mixed_start(step: Step, deployment: Deployment, event: WpgStarted) -> None:
    """Kill a WPG whose nodes have started from different states, and let its job fall back."""
    error = ErrorInfo(
        Code.DATA_LOSS,
        f"{event.node} started {deployment.name} with the state of seq {event.applied}, other "
        f"nodes with that of seq {deployment.durability.applied}",
    )
    _record_death(step, deployment)
    _send_kill(step, deployment)
    deployment.wpg.count_loss()
    _cannot_be_rebuilt(step, deployment, error)


def _replay_seqs(step: Step, deployment: Deployment, applied: int) -> list[int]:
    """Seqs of the operations to replay on top of the state that a WPG starts with, in order.

    These are the mutations from the last one that replaces the whole state. There are two
    additions. A `publish_weights` changes no state and is replayed only if its version is needed
    and not durable. A `save_state` that was not durable is replayed at its place. For both, the
    mutations that lead to the state that they read are replayed too.

    Args: applied: the seq up to which operations are part of that state.
    """
    history = [m for m in deployment.durability.history if m.seq > applied]
    needed_versions = retention.volatile_versions(step, deployment)
    first = 0
    for index, mutation in enumerate(history):
        if mutation.seq in needed_versions or any(
            seq < mutation.seq for seq in deployment.queue.snapshots
        ):
            break
        if mutation.kind in _REPLACES_STATE:
            first = index
    again = [
        m.seq for m in history[first:] if m.kind != "publish_weights" or m.seq in needed_versions
    ]
    return sorted([*again, *deployment.queue.snapshots])


def replayed(step: Step, deployment: Deployment, seq: int) -> None:
    """Record that an operation was replayed; after the last one the deployment is ready."""
    deployment.durability.replayed(seq)
    deployment.wpg.forgive_refusals()
    _touch_siblings(step, deployment)
    if not deployment.durability.replay and deployment.wpg.state is WpgState.RECOVERING:
        step.advance_wpg(deployment, WpgEvent.REPLAYED)
        step.notify("recovered", f"replayed all mutations up to {seq}", deployment.name)


def _touch_siblings(step: Step, deployment: Deployment) -> None:
    """Dispatch all deployments of a job, because some may wait for a version that exists again."""
    for sibling in step.deployments_of(step.job_of(deployment)):
        step.touch(sibling)
    for named in step.job_of(deployment).versions.named.values():
        retention.touch_readers(step, named)


def lost(step: Step, event: WpgLost) -> None:
    """Record that the ranks of a WPG on a node are dead and reaped, and rebuild the WPG.

    - If a start can never succeed, the deployment or its job ends, or the job falls back to a
      checkpoint.
    - An operation that has killed its WPG too many times fails.
    - A WPG that keeps dying while idle is rebuilt after growing pauses; in the end its job fails.
    - A death caused by another WPG in the same process counts only for that one.
    """
    _confirm_forgotten(step, event)
    deployment = step.deployment(event.deployment)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    if deployment.wpg.state is WpgState.STOPPED or event.node not in deployment.nodes:
        return
    if deployment.wpg.state is WpgState.LOST:  # expected: its remaining ranks were being killed
        _lose_node(step, deployment, event.node)
        _try_start(step, deployment)
        return
    before = deployment.wpg.state
    culprits = _running_ops(deployment)  # before the death requeues them
    _lose_node(step, deployment, event.node)
    step.notify("WPG lost", event.error.message, deployment.name)
    deployment.wpg.failed(event.error)
    if event.is_innocent or _count_death(step, deployment, event, before, culprits):
        _try_start(step, deployment)


def _count_death(
    step: Step, deployment: Deployment, event: WpgLost, before: WpgState, culprits: list[Op]
) -> bool:
    """Count a death of a WPG, and return whether to rebuild it.

    Args: before: its state when it died. culprits: the operations that it was running.
    """
    is_idle = before is WpgState.READY and not culprits
    if is_idle and step.now_s - deployment.wpg.up_since_s >= STEADY_S:
        deployment.wpg.forgive_losses()
    if before is not WpgState.STARTING or not _is_out_of_reach(deployment, event):
        deployment.wpg.count_loss()
    if before in _REBUILDING and event.error.code is Code.DATA_LOSS:
        _cannot_be_rebuilt(step, deployment, event.error)
        return False
    has_too_many = deployment.wpg.losses > step.config.max_losses
    if before is WpgState.STARTING and (event.error.code in _PERMANENT or has_too_many):
        _cannot_start(step, deployment, event.error)
        return False
    if has_too_many:
        if culprits:
            _fail_culprits(step, deployment, culprits, event.error)
        else:
            step.follow_up(
                FollowUp.FAIL_JOB, deployment.job_name, _repeated_deaths_error(deployment, event)
            )
            return False
    elif is_idle and deployment.wpg.losses > 1:
        _pause(step, deployment)
    return True


def _repeated_deaths_error(deployment: Deployment, event: WpgLost) -> ErrorInfo:
    """The error of a job whose WPG keeps dying without an operation to blame."""
    return ErrorInfo(
        Code.ABORTED,
        f"the workers of {deployment.key.deployment} died {deployment.wpg.losses} times "
        f"without completing an operation: {event.error.message}",
        remedy="find the cause in the worker's log, then submit the job again",
        details=event.error.details,
    )


def _pause(step: Step, deployment: Deployment) -> None:
    """Delay the rebuild of a WPG, because the cause of its deaths may be temporary."""
    pause_s = min(FIRST_PAUSE_S * 2.0 ** (deployment.wpg.losses - 2), MAX_PAUSE_S)
    deployment.wpg.put_off(step.now_s + pause_s)
    step.set_timer(f"rebuild/{deployment.name}", deployment.wpg.retry_at_s)
    reason = f"in {pause_s:g} s, after {deployment.wpg.losses} deaths while idle"
    step.notify("rebuilding a WPG after a pause", reason, deployment.name)


def _is_out_of_reach(deployment: Deployment, event: WpgLost) -> bool:
    """Whether a WPG could not start only because a node could not fetch the seal."""
    if not deployment.wpg.base or event.error.code is not Code.UNAVAILABLE:
        return False
    return event.node not in holders.nodes_with_part(deployment, deployment.nodes.index(event.node))


def _cannot_start(step: Step, deployment: Deployment, error: ErrorInfo) -> None:
    if deployment.wpg.is_trial:
        step.follow_up(FollowUp.END_DEPLOYMENT, deployment.name, error)
    else:
        step.follow_up(FollowUp.FAIL_JOB, deployment.job_name, error)


def _cannot_be_rebuilt(step: Step, deployment: Deployment, error: ErrorInfo) -> None:
    """Let a deployment's job fall back to its checkpoint, or fail if that cannot be read either."""
    if deployment.wpg.is_trial:
        _cannot_start(step, deployment, error)
        return
    job = step.job_of(deployment)
    is_at_origin = not deployment.wpg.base and not deployment.durability.history
    newest = job.checkpoints.get(deployment.key.deployment, "")
    if is_at_origin and deployment.wpg.checkpoint == newest:
        step.follow_up(FollowUp.FAIL_JOB, str(job.key), error)
    else:
        step.follow_up(FollowUp.FALL_BACK, str(job.key), error)


def _running_ops(deployment: Deployment) -> list[Op]:
    ops = [deployment.queue.find(key) for key in deployment.activation.running]
    return [op for op in ops if op is not None]


def _fail_culprits(step: Step, deployment: Deployment, ops: list[Op], error: ErrorInfo) -> None:
    """Fail the operations that keep killing their WPG; the job continues without them.

    There is usually one, because an operation that was running at a loss runs alone afterwards.
    There are more only if the first loss is already one too many.
    """
    given_up = ErrorInfo(
        Code.ABORTED,
        f"its workers died {deployment.wpg.losses} times while it ran: {error.message}",
        remedy="make the operation smaller, or find the cause in the worker's log",
    )
    for op in ops:
        operations.end_or_settle(step, deployment, op, given_up)
    deployment.wpg.forgive_losses()


def _lose_node(step: Step, deployment: Deployment, node: NodeId) -> None:
    """Record that no rank of a WPG is alive on this node, and kill the WPG on its other nodes."""
    if deployment.wpg.state in _ALIVE:
        _record_death(step, deployment)
        _send_kill(step, deployment, but=node)
    elif node in deployment.wpg.dying_on:
        deployment.wpg.dying_on.remove(node)


def _send_kill(step: Step, deployment: Deployment, *, but: NodeId | None = None) -> None:
    """Kill the remaining ranks of a dead WPG; `lost` runs when they are dead.

    Args: but: a node on which no rank is alive.
    """
    nodes = step.nodes_of(deployment)
    alive_on = [node.node for node in nodes if node.is_up and node.node != but]
    deployment.wpg.dying_on = alive_on
    _send_stop(step, deployment, deployment.wpg.dying_on, forget=False)


def _record_death(step: Step, deployment: Deployment) -> None:
    """Record the death of a WPG: free its devices and queue its running operations again."""
    if deployment.wpg.state in _ALIVE:
        step.advance_wpg(deployment, WpgEvent.DIED)
        deployment.wpg.starting_on = []
    being_saved = [op for op in deployment.queue.every if op.has_snapshot]
    for op in [*_running_ops(deployment), *being_saved]:
        operations.requeue(step, op)
    devices.vacate(step, deployment)
    deployment.durability.incarnation_died()


def rebuild(step: Step, deployment: Deployment, error: ErrorInfo | None) -> None:
    """Kill an incarnation in which a mutating operation failed half-way; `lost` starts the next
    one.

    If data is lost, or the WPG has died too often, the job falls back to its checkpoint or fails.
    """
    is_lost = error is not None and error.code is Code.DATA_LOSS
    if is_lost and error is not None and deployment.wpg.state in _REBUILDING:
        _cannot_be_rebuilt(step, deployment, error)
        return
    _record_death(step, deployment)
    reason = error.message if error else "a mutating operation failed"
    step.notify("rebuilding a WPG without the failed operation", reason, deployment.name)
    deployment.wpg.count_loss()
    if deployment.wpg.losses > step.config.max_losses:
        failure = ErrorInfo(Code.DATA_LOSS, f"{deployment.name} cannot be rebuilt: {reason}")
        step.follow_up(FollowUp.FAIL_JOB, deployment.job_name, error or failure)
        return
    _send_kill(step, deployment)


def stop(step: Step, deployment: Deployment, *, forget: bool = True) -> None:
    """Stop a WPG permanently.

    Args: forget: whether its nodes also drop its seals and weights versions.
    """
    if deployment.wpg.state is WpgState.STOPPED:
        return
    devices.vacate(step, deployment)
    if deployment.wpg.assignments and deployment.wpg.state is WpgState.LOST:
        # Its death is already confirmed. A new number distinguishes the confirmation of this stop.
        deployment.wpg.next_incarnation()
    nodes = holders.nodes_with(deployment) if forget else deployment.nodes
    if forget:
        for node in nodes:
            step.state.request_forget(node, deployment.name, deployment.wpg.incarnation)
    _send_stop(step, deployment, nodes, forget=forget)
    devices.leave(step, deployment)
    deployment.wpg.starting_on = []
    deployment.wpg.dying_on = []
    if not forget:
        holders.stop_copying(step, deployment)
    deployment.move.keep([])
    deployment.durability.drop_replicas()
    if deployment.move.relocation is not None:
        moves.release_nodes(step, deployment)
        deployment.move.end()
    step.advance_wpg(deployment, WpgEvent.STOPPED)


def _send_stop(step: Step, deployment: Deployment, nodes: list[NodeId], *, forget: bool) -> None:
    for node in nodes:
        step.send_for(StopWpg, step.node(node), deployment, forget=forget)
