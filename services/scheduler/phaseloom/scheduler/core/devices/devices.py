"""Devices and their slots: the deployments that are on a device, must leave it, or claim it.

Each device has one slot. If the device is shared in space, each deployment that runs in the slot
has a share of the device's compute units; shares never overlap. Other modules get slots from here
(`slot`, `slots_of`) and may read them, but only the functions below write a slot's fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from phaseloom.common.contract.ids import NodeId, OperationKey
from phaseloom.common.contract.specs import CommandId, Residency
from phaseloom.scheduler.core.state.activation import NOT_HINTED_S
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.node import Expected, Node, Pace, Share, Slot, SlotPhase
from phaseloom.scheduler.core.state.step import Step
from phaseloom.scheduler.core.state.tree import State

HOST_ROOM = 3
"""A node whose host memory is at least this multiple of the placed states also has room for their
weights versions, so nothing spills to NVMe."""


def slot(state: State, node: str, device: int) -> Slot:
    return state.nodes[node].devices[device].slots[0]


def units_of(state: State, slot: Slot) -> int:
    """Number of compute units of a slot's device."""
    return state.nodes[slot.node].devices[slot.device].units


def slots_of(step: Step, deployment: Deployment) -> list[Slot]:
    # Called several times per step, mostly for a single rank.
    nodes, assignments = step.state.nodes, deployment.wpg.assignments
    if len(assignments) == 1 and len(assignments[0].devices) == 1:
        return [nodes[assignments[0].node].devices[assignments[0].devices[0]].slots[0]]
    return [nodes[a.node].devices[index].slots[0] for a in assignments for index in a.devices]


def held_slots(state: State, deployment: Deployment) -> list[Slot]:
    """Slots of the ranks that take part in the running operations."""
    nodes, assignments = state.nodes, deployment.wpg.assignments
    slots = [nodes[a.node].devices[index].slots[0] for a in assignments for index in a.devices]
    idle = deployment.activation.idle_ranks
    return [slot for rank, slot in enumerate(slots) if rank not in idle] if idle else slots


def slots_on(node: Node) -> list[Slot]:
    return [slot for device in node.devices for slot in device.slots]


def placed_on(node: Node) -> list[str]:
    """Deployments placed on a node, once for each of their devices there."""
    return [name for slot in slots_on(node) for name in slot.placed]


def weigh_host_memory(step: Step, deployment: Deployment) -> None:
    """Mark the nodes that are short of host memory, now that the deployment's size is known."""
    for node in step.nodes_of(deployment):
        if is_crowded(step, node):
            step.state.mark_crowded(node.node)


def is_crowded(step: Step, node: Node) -> bool:
    """Whether the node's host memory may be too small for the states of all deployments placed on
    it."""
    sizes = (step.state.deployments[name].wpg.state_bytes for name in placed_on(node))
    return HOST_ROOM * sum(sizes) > node.host_memory_bytes


def victims(step: Step, slot: Slot, newcomer: Deployment) -> list[Deployment]:
    """Choose the deployments that must leave a slot for a newcomer.

    With per-job residency, all of other jobs' deployments leave first. Then the least recently used
    ones leave until the newcomer fits, running ones last.
    """
    residents = [step.state.deployments[name] for name in slot.resident if name != newcomer.name]
    if not residents:
        return []
    node, runs = step.node(slot.node), slot.runs
    leaving, staying = [], residents
    if node.residency is Residency.JOB:
        leaving = [d for d in residents if d.job_name != newcomer.job_name]
        staying = [d for d in residents if d.job_name == newcomer.job_name]
    staying.sort(key=lambda d: d.name in runs)
    used = newcomer.wpg.state_bytes + sum(d.wpg.state_bytes for d in staying)
    for resident in staying:
        if used <= node.devices[slot.device].memory_bytes:
            break
        leaving.append(resident)
        used -= resident.wpg.state_bytes
    return leaving


def claimant(step: Step, slot: Slot) -> Deployment | None:
    """The oldest claim among the deployments that wait for this slot's device."""
    for name in step.state.nodes[slot.node].claims:
        deployment = step.state.deployments[name]
        if (slot.node, slot.device) in deployment.places:
            return deployment
    return None


def claim(step: Step, deployment: Deployment) -> bool:
    """Record that a deployment was chosen and waits until all of its devices are free.

    The claim is recorded on all of its nodes at once, so claims have the same order on every node.
    The oldest claim is therefore first on each of its devices, which rules out deadlock.

    Returns: whether the claim is new.
    """
    new_on = [node for node in step.nodes_of(deployment) if deployment.name not in node.claims]
    for node in new_on:
        node.claims.append(deployment.name)
    return bool(new_on)


def unclaim(step: Step, deployment: Deployment) -> None:
    for assigned in deployment.wpg.assignments:
        claims = step.state.nodes[assigned.node].claims
        if deployment.name in claims:
            claims.remove(deployment.name)


def use(step: Step, deployment: Deployment, slots: list[Slot]) -> None:
    """Mark a deployment as the running and most recently used one in its slots.

    Args: slots: the slots of all of its ranks.
    """
    name, idle = deployment.name, deployment.activation.idle_ranks
    for rank, slot in enumerate(slots):
        if rank in idle:
            continue
        if slot.running in ("", name):
            _lead(step, slot, deployment)
        if name in slot.resident:
            slot.resident.remove(name)
        slot.resident.append(name)


def _lead(step: Step, slot: Slot, deployment: Deployment) -> None:
    """Record the deployment that has run in a slot longest; its job becomes the holder."""
    name, job = deployment.name, deployment.job_name
    slot.running = name
    slot.is_released = False
    if slot.used_by != name:
        slot.used_by = name
        slot.used_since_s = step.now_s
    if slot.holder != job:
        slot.holder = job
        slot.held_since_s = step.now_s


def _stops(step: Step, slot: Slot, name: str) -> None:
    """Record that a deployment no longer runs in a slot. Its neighbours continue."""
    slot.shares = [share for share in slot.shares if share.deployment != name]
    if slot.running != name:
        return
    slot.running = ""
    if slot.shares:
        _lead(step, slot, step.state.deployments[slot.shares[0].deployment])


def forget_job(step: Step, slot: Slot, deployment: Deployment) -> None:
    """Forget a job in a slot that its last deployment has left."""
    key = deployment.key.job_key
    if not any(step.state.deployments[name].key.job_key == key for name in slot.placed):
        slot.served.pop(deployment.job_name, None)
        slot.rounds.pop(deployment.job_name, None)
    step.job_of(deployment).progress.leave_rounds()


# --- where deployments are -----------------------------------------------------------------------


def place(step: Step, deployment: Deployment, *, on: NodeId | None = None) -> None:
    """Record on a deployment's devices that it is placed there. Args: on: only on this node's
    devices."""
    for slot in slots_of(step, deployment):
        if on in (None, slot.node):
            slot.placed.append(deployment.name)


def leave(step: Step, deployment: Deployment) -> None:
    """Record that a deployment is no longer placed on its devices."""
    for slot in slots_of(step, deployment):
        slot.placed.remove(deployment.name)
        forget_job(step, slot, deployment)
    step.state.forget_observed(deployment.name)


def forget(step: Step, deployment: Deployment) -> None:
    """Forget everything recorded about a deployment on its devices."""
    name = deployment.name
    for slot in slots_of(step, deployment):
        slot.ready.pop(name, None)
        if name in slot.resident:
            slot.resident.remove(name)  # where a switch-in was refused, it may have been noted
        if slot.used_by == name:
            slot.used_by = ""
        if slot.holder == deployment.job_name:
            slot.holder = ""


def switch_in(slots: Iterable[Slot], deployment: Deployment) -> None:
    """Record that the deployment's state is on these devices."""
    for slot in slots:
        if deployment.name not in slot.resident:
            slot.resident.append(deployment.name)


def switch_out(slots: Iterable[Slot], deployment: Deployment) -> None:
    """Record that the deployment's state is no longer on these devices."""
    for slot in slots:
        if deployment.name in slot.resident:
            slot.resident.remove(deployment.name)


def book_again(step: Step, deployment: Deployment) -> None:
    """Record that the deployment's state may still be on its devices, as the first to evict."""
    for slot in slots_of(step, deployment):
        if deployment.name not in slot.resident:
            slot.resident.insert(0, deployment.name)


def vacate(step: Step, deployment: Deployment) -> None:
    """Record that a deployment's processes are gone: no part of it is running or resident."""
    name = deployment.name
    deployment.activation.close()
    for key in list(deployment.activation.running):
        free(step, deployment, key, "")
    for slot in slots_of(step, deployment):
        if name in slot.resident:
            slot.resident.remove(name)
        _stops(step, slot, name)
        if slot.speculative == name:
            slot.speculative = ""
        slot.expected.pop(deployment.job_name, None)
    unclaim(step, deployment)
    deployment.activation.hint(NOT_HINTED_S)
    step.touch(deployment)


# --- what runs -----------------------------------------------------------------------------------


def free(step: Step, deployment: Deployment, key: OperationKey, kind: str) -> None:
    """Record that a running operation has ended. After the last one, the devices are idle."""
    activation = deployment.activation
    activation.ended(key, step.now_s)
    for slot in slots_of(step, deployment):
        if deployment.name not in slot.runs:
            continue  # it has no part in what runs
        if slot.running == deployment.name:
            slot.last = f"{key.deployment}.{kind}"
            slot.idle_since_s = step.now_s
        if not activation.running:
            _stops(step, slot, deployment.name)
    if activation.idle_ranks and not activation.running:
        activation.leave_out([])
        if any(deployment.name not in slot.resident for slot in slots_of(step, deployment)):
            # It is on a part of its devices only: it needs an activation again.
            activation.close()


def free_tail(step: Step, deployment: Deployment, ranks: list[int]) -> None:
    """Release the devices of ranks that are idle until the running operation ends.

    Other deployments may use these devices. The deployment stays resident on them until it must
    leave.
    """
    activation = deployment.activation
    for rank in ranks:
        if rank in activation.idle_ranks:
            continue
        node, device = deployment.places[rank]
        freed = slot(step.state, node, device)
        _stops(step, freed, deployment.name)
        freed.idle_since_s = step.now_s
        if freed.holder == deployment.job_name:
            set_released(freed, True)
        step.dirty.add((node, device))
    activation.leave_out(ranks)


def release(step: Step, deployment: Deployment) -> None:
    """Record that a deployment no longer runs on its devices."""
    for slot in slots_of(step, deployment):
        if slot.running == deployment.name:
            _stops(step, slot, deployment.name)


def note_ready(step: Step, deployment: Deployment, *, is_ready: bool) -> None:
    """Record whether one of a deployment's operations can run now."""
    for slot in slots_of(step, deployment):
        if is_ready:
            slot.ready[deployment.name] = deployment.job_name
        else:
            slot.ready.pop(deployment.name, None)


def serve(step: Step, slot: Slot, job: str, kind: str, *, continues: bool) -> None:
    """Record that an operation of a job starts.

    Args: continues: whether it continues the slot's current phase. If not, it starts another.
    """
    if not continues:
        slot.phase = SlotPhase(job, began_s=step.now_s)
    if kind not in slot.phase.kinds:
        slot.phase.kinds.append(kind)
    slot.served[job] = step.sequence


def set_released(slot: Slot, is_released: bool) -> None:
    """Record that the holder of a slot has ended its phase, or has started one."""
    slot.is_released = is_released
    if is_released:
        slot.phase = SlotPhase()


def note_round(slot: Slot, job: str, number: int) -> None:
    """Record the round of the phase that a job has started in a slot."""
    slot.rounds[job] = number


def note_timer(slot: Slot, timer: str) -> None:
    """Record the timer at which a slot is examined again."""
    slot.timer = timer


# --- sharing in space ----------------------------------------------------------------------------


def free_units(step: Step, slot: Slot) -> list[int]:
    """Compute units of a slot's device that belong to no share."""
    used = {unit for share in slot.shares for unit in share.units}
    return [unit for unit in range(units_of(step.state, slot)) if unit not in used]


def give_share(slot: Slot, deployment: Deployment, units: list[int]) -> None:
    """Give a deployment these free units. Must be called before `use`, which marks it as
    running."""
    assert slot.share_of(deployment.name) is None, f"{deployment.name}: two shares of a device"
    slot.shares.append(Share(deployment.name, units))


def ask_back(share: Share, units: list[int], command: CommandId) -> None:
    """Record that a share was requested to keep only these units. It may use the others until it
    confirms."""
    share.remaining_units = units
    share.command = command


def confirm(share: Share) -> None:
    """Record that a share has given up the requested units."""
    share.units = share.remaining_units
    share.remaining_units, share.command = [], None


def grow(share: Share, units: list[int]) -> None:
    """Set the units of a share that grows: its present ones and free ones."""
    share.units = units
    share.remaining_units, share.command = [], None


def set_pace(share: Share, now_s: float, stage: str, neighbours: str, speed: float) -> None:
    """Record the current neighbours of a share's deployment and its speed according to the table.

    Args: stage: the kind of sub-stage that it is in.
          neighbours: the neighbours' sub-stages, as in `Pace`.
    """
    if share.pace is None:
        share.pace = Pace(stage, now_s, now_s, len(share.units))
    elif (share.pace.neighbours, share.pace.speed) != (neighbours, speed):
        pass_time(share, now_s)
    share.pace.neighbours, share.pace.speed = neighbours, speed
    share.pace.min_units = min(share.pace.min_units, len(share.units))


def pass_time(share: Share, now_s: float) -> None:
    """Add the time since the last update, at the current rate."""
    pace = share.pace
    assert pace is not None, f"{share.deployment}: no pace"
    passed_s = now_s - pace.since_s
    pace.work_s += passed_s * pace.speed
    pace.time_by_neighbours_s[pace.neighbours] = (
        pace.time_by_neighbours_s.get(pace.neighbours, 0.0) + passed_s
    )
    pace.since_s = now_s


# --- who is expected -----------------------------------------------------------------------------


def expect(slot: Slot, job: str, expected: Expected | None) -> None:
    """Record when a job is expected to need the slot next. None: nothing is predicted."""
    if expected is None:
        slot.expected.pop(job, None)
    else:
        slot.expected[job] = expected


def came(slot: Slot, job: str) -> Expected | None:
    """Record that an operation of a job starts. Returns its prediction, or None."""
    slot.speculative = ""
    return slot.expected.pop(job, None)


def note_speculative(slot: Slot, name: str) -> None:
    """Record the deployment for which an activation was opened speculatively. Empty: none."""
    slot.speculative = name
