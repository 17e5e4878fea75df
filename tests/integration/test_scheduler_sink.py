"""What the scheduler's sink sends, on a real server."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import Command, NodeCommand, Permit, Permits, Ticket
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.tickets import is_genuine
from phaseloom.scheduler.core.state.outputs import SendCommand
from phaseloom.scheduler.sink import BusSink
from phaseloom.scheduler.snapshots import Snapshots

NODE = NodeId("n0")


def permit(index: int, deployment: str = "policy", kind: str = "forward") -> Permit:
    operation = OperationKey("t", "a", deployment, f"r{index}")
    return Permit(CommandId(7, index), NODE, 1, operation, "", kind, 1, 7, 0)


async def sent(bus: Bus) -> list[NodeCommand]:
    end = (await bus.js.stream_info(streams.PERMITS)).state.last_seq
    messages = [await bus.js.get_msg(streams.PERMITS, seq) for seq in range(1, end + 1)]
    return [decode(message.data or b"", Command) for message in messages]


async def test_permits_that_wait_for_one_another_go_together_by_activation(bus: Bus) -> None:
    sink = BusSink(bus, Snapshots(bus))
    given = [permit(1), permit(2), permit(3, "critic"), permit(4), permit(5, kind="optim_step")]
    await asyncio.gather(*(sink.perform(SendCommand(one), None) for one in given))
    commands = await sent(bus)
    assert sorted(len(c.permits) for c in commands if isinstance(c, Permits)) == [1, 2]
    taken = [one for c in commands for one in (c.permits if isinstance(c, Permits) else [c])]
    assert sorted(taken, key=lambda one: one.id) == given
    for command in commands:
        if isinstance(command, Permits):
            assert command.id == command.permits[0].id
            assert len({one.operation.deployment for one in command.permits}) == 1


async def test_permits_of_another_grouping_are_not_taken_for_sent(bus: Bus) -> None:
    """A scheduler that starts over sends again what it is not sure of, in other company."""
    sink = BusSink(bus, Snapshots(bus))
    for permits in ([permit(1), permit(2)], [permit(1), permit(2), permit(3)]):
        command = Permits(permits[0].id, NODE, 1, permits, [])
        await sink.perform(SendCommand(command), None)
    assert [len(c.permits) for c in await sent(bus) if isinstance(c, Permits)] == [2, 3]


async def test_tickets_are_signed_alike_by_all_that_lead(bus: Bus) -> None:
    version = VersionKey(DeploymentKey("t", "a", "policy"), 3)
    ticket = Ticket(version, DeploymentKey("t", "a", "sampler"), 1, [NODE])
    command = replace(permit(1, "sampler", "sync_weights"), ticket=ticket)
    for number in range(2):
        again = replace(command, id=CommandId(7, number))
        await BusSink(bus, Snapshots(bus), secret="ours").perform(SendCommand(again), None)
    first, second = (c.ticket for c in await sent(bus) if isinstance(c, Permit))
    assert first is not None
    assert first == second
    assert replace(first, mac=b"") == ticket
    assert is_genuine(first, "ours")
    assert not is_genuine(first, "")
