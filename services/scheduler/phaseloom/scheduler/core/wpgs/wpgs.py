"""Worker-process groups: started, lost, rebuilt.

A WPG lives and dies whole, on however many nodes: where it dies on one, it is killed on the others,
and the next life begins once no rank of the last is alive and all of its nodes are there. Each life
has an incarnation; whatever an older one says about claims is ignored. A new life starts from the
newest seal (or the seeds) and runs again, in order, what took effect after it; an operation that
was permitted when the old life ended is run again too, as `replay`, since it may have had its
outcome stored.
"""

from __future__ import annotations

from phaseloom.common.contract.commands import StartWpg, StopWpg
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import NodeLost, NodeUp, WpgLost, WpgStarted
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.kinds import KINDS
from phaseloom.scheduler.core.devices import devices, host_memory
from phaseloom.scheduler.core.durability import seals
from phaseloom.scheduler.core.operations import operations
from phaseloom.scheduler.core.planning import groups
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.move import Relocation
from phaseloom.scheduler.core.state.node import Node, new_devices
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.step import FollowUp, Step
from phaseloom.scheduler.core.state.transitions import WpgEvent, WpgState
from phaseloom.scheduler.core.state.wpg import Span
from phaseloom.scheduler.core.wpgs import moves

_REPLACES_STATE = frozenset(name for name, kind in KINDS.items() if kind.replaces_state)
_REBUILDING = frozenset({WpgState.STARTING, WpgState.RECOVERING})
_ALIVE = frozenset({WpgState.STARTING, WpgState.RECOVERING, WpgState.READY})


def node_up(step: Step, event: NodeUp) -> None:
    """A node's agent took its lease: whatever ran under an earlier one is dead."""
    old = step.state.nodes.get(event.node)
    if old is not None and old.revision >= event.revision:
        return
    placed = [] if old is None else _placed(old)
    for name in placed:
        _lose(step, step.state.deployments[name], event.node)
    node = Node(
        node=event.node,
        pool=event.pool,
        devices=new_devices(event.devices),
        host_memory_bytes=event.host_memory_bytes,
        revision=event.revision,
        state_endpoint=event.state_endpoint,
        residency=event.exclusive_residency,
    )
    step.state.nodes[event.node] = node
    for name in placed:
        deployment = step.state.deployments[name]
        span = next(span for span in deployment.wpg.spans if span.node == event.node)
        if _has_lost_a_device(step, deployment, span):
            groups.end_hold(step.state.cluster, event.node, name)
            deployment.wpg.lose_span(span)
            # `stop` does not find this node to tell: it is told below to forget what it has of it.
            step.state.stopping.setdefault(event.node, {})[name] = deployment.wpg.incarnation
            continue
        devices.place(node, span.devices, deployment)
        _try_start(step, deployment)
    for deployment in step.state.deployments.values():
        if deployment.wpg.state is WpgState.LOST and deployment.wpg.spans:
            _try_start(step, deployment)  # it may have waited for what this node has
    for name in step.state.moving:
        deployment = step.state.deployments[name]
        spans = deployment.move.relocation.spans if deployment.move.relocation is not None else []
        for span in spans:
            if span.node == event.node:
                _has_lost_a_device(step, deployment, span)
                moves.came_back(step, deployment, event.node)
    _stop_again(step, node)
    step.follow(FollowUp.PLACE)


def _has_lost_a_device(step: Step, deployment: Deployment, span: Span) -> bool:
    """Whether a node has come back without what a deployment has, or is to get, of it: that ends
    its job."""
    last = max(span.devices)
    if last < len(step.node(span.node).devices):
        return False
    gone = f"device {last} of {span.node} is gone"
    error = ErrorInfo(Code.RESOURCE_EXHAUSTED, gone, remedy="submit the job again")
    step.follow(FollowUp.FAIL_JOB, deployment.job_name, error)
    return True


def _placed(node: Node) -> list[str]:
    return list(dict.fromkeys(devices.placed_on(node)))


def _stop_again(step: Step, node: Node) -> None:
    """Jobs ended while the node was away, or it died before it had dropped their seals."""
    stopping = step.state.stopping.get(node.node, {})
    for name in stopping:
        stopping[name] += 1  # a life of its own, so that its confirmation is one too
        step.send(
            StopWpg,
            node,
            deployment=DeploymentKey(*name.split(".")),
            incarnation=stopping[name],
            forget=True,
        )


def _note_stopped(step: Step, event: WpgLost) -> None:
    stopping = step.state.stopping.get(event.node, {})
    name = str(event.deployment)
    if stopping.get(name, event.incarnation + 1) <= event.incarnation:
        del stopping[name]
        if not stopping:
            del step.state.stopping[event.node]
        # It can take a copy again.
        if step.state.closing:
            step.follow(FollowUp.PLACE)
        deployment = step.deployment(event.deployment)
        if deployment is not None and deployment.wpg.state is WpgState.STOPPED:
            # A successor of its name goes on from there.
            deployment.wpg.raise_incarnation(event.incarnation)


def node_lost(step: Step, event: NodeLost) -> None:
    node = step.state.nodes.get(event.node)
    if node is None or node.revision != event.revision or not node.is_up:
        return
    for name in _placed(node):
        _lose(step, step.state.deployments[name], event.node)
    node.is_up = False
    step.tell("node lost", event.reason, event.node)
    config = step.config
    for what, after_s in (("away", config.node_grace_s), ("gone", config.node_gone_s)):
        if after_s:
            step.set_timer(f"{what}/{node.node}/{node.revision}", step.now_s + after_s)


def place(step: Step, deployment: Deployment, spans: list[Span]) -> None:
    """Args: spans: a device for each rank, in order; the first is the leader's."""
    deployment.wpg.put_on(spans)
    for span in spans:
        devices.place(step.node(span.node), span.devices, deployment)
    start(step, deployment)


def move(step: Step, deployment: Deployment, spans: list[Span]) -> None:
    """Have it go elsewhere, its state with it, as soon as what runs has ended.

    Args: spans: as of `place`. Those where it is: it stays, whatever was decided before.
    """
    if deployment.wpg.state is not WpgState.STOPPED:
        moves.begin(step, deployment, spans)


def move_on(step: Step) -> None:
    """Take every move as far as the step's event allows."""
    for name in list(step.state.moving):
        deployment = step.state.deployments.get(name)
        if deployment is not None and deployment.move.relocation is not None:
            _move_on(step, deployment, deployment.move.relocation)
        if deployment is None or deployment.move.relocation is None:
            step.state.moving.remove(name)


def _move_on(step: Step, deployment: Deployment, relocation: Relocation) -> None:
    if deployment.wpg.state is WpgState.LOST:
        _try_start(step, deployment)
    elif deployment.wpg.state is WpgState.READY and moves.advance(step, deployment, relocation):
        _bury(step, deployment)
        _kill(step, deployment)


def start(step: Step, deployment: Deployment) -> None:
    step.advance_wpg(deployment, WpgEvent.STARTED)
    deployment.durability.incarnation_begins()
    deployment.wpg.begin(deployment.durability.seal_seq)
    nodes = deployment.nodes
    versions = seals.durable_needed(step, deployment) if deployment.durability.seal_seq else []
    rank_offset = 0
    for index, span in enumerate(deployment.wpg.spans):
        sources = _seal_sources(step, deployment, index)
        step.send(
            StartWpg,
            step.node(span.node),
            deployment=deployment.key,
            incarnation=deployment.wpg.incarnation,
            spec=deployment.spec,
            devices=span.devices,
            seal_seq=deployment.durability.seal_seq,
            checkpoint="" if deployment.durability.seal_seq else deployment.wpg.checkpoint,
            applied=0 if deployment.durability.seal_seq else deployment.wpg.origin_seq,
            rank_offset=rank_offset,
            nodes=nodes if len(nodes) > 1 else [],
            versions=versions,
            sources=sources,
            ticket=seals.ticket(deployment, [span.node]) if sources else None,
        )
        rank_offset += len(span.devices)


def _seal_sources(step: Step, deployment: Deployment, index: int) -> list[str]:
    """Where a node of it gets its part of the seal, if it has none that is good."""
    if not deployment.durability.seal_seq:
        return []
    return seals.sources(step, deployment, index, but=deployment.nodes[index])


def _try_start(step: Step, deployment: Deployment) -> None:
    """Begin its next life, if no rank of the last can be alive, and its nodes and its state are
    there: those that it is on its way to, or else those that it was on."""
    if deployment.wpg.dying_on or not seals.is_readable(step, deployment):
        return
    if deployment.move.relocation is not None and moves.is_possible(
        step, deployment, deployment.move.relocation
    ):
        moves.relocate(step, deployment, deployment.move.relocation.spans)
    if all(node.is_up for node in step.nodes_of(deployment)):
        start(step, deployment)


def restart(step: Step, deployment: Deployment) -> None:
    """Throw this life's state away and begin another from what the deployment's books say."""
    if not deployment.wpg.spans:
        return
    is_alive = deployment.wpg.state in _ALIVE
    _bury(step, deployment)
    if is_alive:
        _kill(step, deployment)  # `lost` starts the next
    else:
        _try_start(step, deployment)


def started(step: Step, event: WpgStarted) -> None:
    deployment = step.deployment(event.deployment)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    if (
        deployment.wpg.state is not WpgState.STARTING
        or event.node not in deployment.wpg.starting_on
    ):
        return
    is_first = len(deployment.wpg.starting_on) == len(deployment.wpg.spans)
    deployment.wpg.came_up(event.node)
    if is_first:
        deployment.wpg.measure(event.state_bytes)
        deployment.durability.start_from(event.applied)
    elif event.applied != deployment.durability.applied:
        _began_apart(step, deployment, event)
        return
    deployment.wpg.measure(max(deployment.wpg.state_bytes, event.state_bytes))
    if deployment.wpg.base and deployment.wpg.base == deployment.durability.seal_seq:
        # Where it came from elsewhere, it is on this node's disk now.
        seals.note_replica(deployment, deployment.nodes.index(event.node), event.node)
    if deployment.wpg.starting_on:
        return
    host_memory.weigh(step, deployment)
    deployment.wpg.is_up()
    deployment.durability.plan_replay(_to_replay(step, deployment, event.applied))
    has_replay = bool(deployment.durability.replay)
    step.advance_wpg(deployment, WpgEvent.UP_TO_REPLAY if has_replay else WpgEvent.UP)
    seals.release_restored(step, deployment)
    if not deployment.durability.seal_seq:
        seals.clear_stale_holders(step, deployment)
    if step.state.closing:
        step.follow(FollowUp.PLACE)  # its copies count anew
    if deployment.wpg.incarnation > 1 and not deployment.durability.replay:
        step.tell("recovered", f"from its seal at {event.applied}", deployment.name)
    _touch_job(step, deployment)


def _began_apart(step: Step, deployment: Deployment, event: WpgStarted) -> None:
    """Its nodes have begun with states that do not belong together."""
    error = ErrorInfo(
        Code.DATA_LOSS,
        f"{event.node} has the state of {deployment.name} as of {event.applied}, "
        f"others as of {deployment.durability.applied}",
    )
    _bury(step, deployment)
    _kill(step, deployment)
    deployment.wpg.count_loss()
    _cannot_be_rebuilt(step, deployment, error)


def _to_replay(step: Step, deployment: Deployment, applied: int) -> list[int]:
    """Mutations after the state that the WPG starts with, from the last one that replaces it all.

    A `publish_weights` changes nothing here: it is run again only where its version is needed and
    not on disk, and then what made the state that it cuts is run again too. So is a `save_state`
    that was not durable, in its place.
    """
    history = [m for m in deployment.durability.history if m.seq > applied]
    wanted = seals.volatile_versions(step, deployment)
    first = 0
    for index, mutation in enumerate(history):
        if mutation.seq in wanted or any(cut < mutation.seq for cut in deployment.queue.cuts):
            break
        if mutation.kind in _REPLACES_STATE:
            first = index
    again = [m.seq for m in history[first:] if m.kind != "publish_weights" or m.seq in wanted]
    return sorted([*again, *deployment.queue.cuts])


def replayed(step: Step, deployment: Deployment, seq: int) -> None:
    deployment.durability.replayed(seq)
    deployment.wpg.forgive_refusals()
    _touch_job(step, deployment)
    if not deployment.durability.replay and deployment.wpg.state is WpgState.RECOVERING:
        step.advance_wpg(deployment, WpgEvent.REPLAYED)
        step.tell("recovered", f"every mutation up to {seq} is in effect again", deployment.name)


def _touch_job(step: Step, deployment: Deployment) -> None:
    """Others of the job may wait for a weights version that is there again."""
    for other in step.deployments_of(deployment.key.job_key):
        step.touch(other)


def lost(step: Step, event: WpgLost) -> None:
    """The ranks on a node are dead and reaped. Start anew, unless the start itself cannot
    succeed."""
    _note_stopped(step, event)
    deployment = step.deployment(event.deployment)
    if deployment is None or event.incarnation != deployment.wpg.incarnation:
        return
    if deployment.wpg.state is WpgState.STOPPED or event.node not in deployment.nodes:
        return
    if deployment.wpg.state is WpgState.LOST:  # it was being killed, to be rebuilt
        _lose(step, deployment, event.node)
        _try_start(step, deployment)
        return
    before = deployment.wpg.state
    culprits = _running_ops(deployment)
    _lose(step, deployment, event.node)
    step.tell("WPG lost", event.error.message, deployment.name)
    deployment.wpg.failed(event.error)
    if before is not WpgState.STARTING or not _is_out_of_reach(deployment, event):
        deployment.wpg.count_loss()
    if before in _REBUILDING and event.error.code is Code.DATA_LOSS:
        _cannot_be_rebuilt(step, deployment, event.error)
        return
    if before is WpgState.STARTING and _is_hopeless(step, deployment, event.error):
        _cannot_start(step, deployment, event.error)
        return
    if deployment.wpg.losses > step.config.max_losses:
        if culprits:
            _give_up(step, deployment, culprits, event.error)
        elif before is WpgState.RECOVERING:
            step.follow(FollowUp.FAIL_JOB, deployment.job_name, event.error)
            return
    _try_start(step, deployment)


def _is_out_of_reach(deployment: Deployment, event: WpgLost) -> bool:
    """Whether it began with a seal that its node could not fetch: that is nobody's failure here."""
    if not deployment.wpg.base or event.error.code is not Code.UNAVAILABLE:
        return False
    return event.node not in seals.holders(deployment, deployment.nodes.index(event.node))


def _cannot_start(step: Step, deployment: Deployment, error: ErrorInfo) -> None:
    if deployment.wpg.is_trial:
        step.follow(FollowUp.END_DEPLOYMENT, deployment.name, error)
    else:
        step.follow(FollowUp.FAIL_JOB, deployment.job_name, error)


def _cannot_be_rebuilt(step: Step, deployment: Deployment, error: ErrorInfo) -> None:
    """Its job may fall back to its checkpoint, unless it is that which cannot be read."""
    if deployment.wpg.is_trial:
        _cannot_start(step, deployment, error)
        return
    job = step.job_of(deployment)
    is_at_origin = not deployment.wpg.base and not deployment.durability.history
    newest = job.checkpoints.get(deployment.key.deployment, "")
    if is_at_origin and deployment.wpg.checkpoint == newest:
        step.follow(FollowUp.FAIL_JOB, str(job.key), error)
    else:
        step.follow(FollowUp.FALL_BACK, str(job.key), error)


def _running_ops(deployment: Deployment) -> list[Op]:
    ops = [deployment.queue.find(key) for key in deployment.activation.running]
    return [op for op in ops if op is not None]


def _is_hopeless(step: Step, deployment: Deployment, error: ErrorInfo) -> bool:
    refused = error.code in (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND)
    return refused or deployment.wpg.losses > step.config.max_losses


def _give_up(step: Step, deployment: Deployment, ops: list[Op], error: ErrorInfo) -> None:
    """They killed their WPG again and again: they fail, and the rest goes on without them. More
    than one only if the first loss is one too many: what ran in a loss runs alone after it."""
    given_up = ErrorInfo(
        Code.ABORTED,
        f"its workers died {deployment.wpg.losses} times while it ran: {error.message}",
        remedy="make it smaller, or look at the worker's log",
    )
    for op in ops:
        operations.give_up(step, deployment, op, given_up)
    deployment.wpg.forgive_losses()


def _lose(step: Step, deployment: Deployment, node: NodeId) -> None:
    """No rank on this node is alive: then the WPG is dead, and is killed on its others."""
    if deployment.wpg.state in _ALIVE:
        _bury(step, deployment)
        _kill(step, deployment, but=node)
    else:
        deployment.wpg.died_on(node)


def _kill(step: Step, deployment: Deployment, *, but: NodeId | None = None) -> None:
    """Have the ranks of a buried WPG killed; `lost` hears of it. Args: but: not on this node."""
    nodes = step.nodes_of(deployment)
    deployment.wpg.kill_on([node.node for node in nodes if node.is_up and node.node != but])
    _stop_command(step, deployment, deployment.wpg.dying_on, forget=False)


def _bury(step: Step, deployment: Deployment) -> None:
    """Book the death of a WPG: claims freed, its open operation queued again."""
    if deployment.wpg.state in _ALIVE:
        step.advance_wpg(deployment, WpgEvent.DIED)
        deployment.wpg.is_dead()
    cut = [op for op in deployment.queue.every if op.is_cut]
    for op in [*_running_ops(deployment), *cut]:
        operations.requeue(step, op)
    devices.vacate(step, deployment)
    deployment.durability.incarnation_died()


def rebuild(step: Step, deployment: Deployment, error: ErrorInfo | None) -> None:
    """A mutating operation failed half-way: kill this incarnation; `lost` starts the next."""
    is_lost = error is not None and error.code is Code.DATA_LOSS
    if is_lost and error is not None and deployment.wpg.state in _REBUILDING:
        _cannot_be_rebuilt(step, deployment, error)
        return
    _bury(step, deployment)
    reason = error.message if error else "a mutating operation failed"
    step.tell("rebuilding a WPG without the failed operation", reason, deployment.name)
    deployment.wpg.count_loss()
    if deployment.wpg.losses > step.config.max_losses:
        failure = ErrorInfo(Code.DATA_LOSS, f"{deployment.name} cannot be rebuilt: {reason}")
        step.follow(FollowUp.FAIL_JOB, deployment.job_name, error or failure)
        return
    _kill(step, deployment)


def stop(step: Step, deployment: Deployment, *, forget: bool = True) -> None:
    """For good. Args: forget: its seals and weights versions go too."""
    if deployment.wpg.state is WpgState.STOPPED:
        return
    devices.vacate(step, deployment)
    if deployment.wpg.spans and deployment.wpg.state is WpgState.LOST:
        deployment.wpg.next_incarnation()  # its loss is told already: this must be confirmed apart
    nodes = seals.nodes_with(deployment) if forget else deployment.nodes
    if forget:
        for node in nodes:
            stopping = step.state.stopping.setdefault(node, {})
            stopping[deployment.name] = deployment.wpg.incarnation
    _stop_command(step, deployment, nodes, forget=forget)
    devices.leave(step, deployment)
    deployment.wpg.stop()
    if not forget:
        seals.stop_copying(step, deployment)
    deployment.move.keep([])
    deployment.durability.drop_replicas()
    if deployment.move.relocation is not None:
        moves.let_go(step, deployment)
        deployment.move.end()
    step.advance_wpg(deployment, WpgEvent.STOPPED)


def _stop_command(step: Step, deployment: Deployment, nodes: list[NodeId], *, forget: bool) -> None:
    for node in nodes:
        step.send(
            StopWpg,
            step.node(node),
            deployment=deployment.key,
            incarnation=deployment.wpg.incarnation,
            forget=forget,
        )
