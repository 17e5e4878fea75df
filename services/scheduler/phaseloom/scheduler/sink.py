"""The sink performs the core's outputs on the bus, retrying while the server is away.

Everything here may be done twice: commands and events carry ids, and the first stored outcome wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
from nats.js.errors import NotFoundError
from opentelemetry.context import Context

from phaseloom.common.contract import commands, streams
from phaseloom.common.contract.codec import content_type_of, encode
from phaseloom.common.contract.completions import decode_outcome
from phaseloom.common.contract.events import OperationFinished
from phaseloom.common.contract.ids import DeploymentKey, JobKey, OperationKey
from phaseloom.common.contract.kinds import READING_KINDS
from phaseloom.common.contract.operations import Completion, checkpoints_of
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.observability import telemetry
from phaseloom.common.transport import tickets
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.groupcommit import GroupCommit
from phaseloom.common.transport.link import AlreadyStored
from phaseloom.common.transport.retry import ATTEMPT_S, until_done
from phaseloom.scheduler import permits
from phaseloom.scheduler.core.state import outputs
from phaseloom.scheduler.snapshots import Snapshots

_DELETIONS_AT_ONCE = 8


class BusSink:
    def __init__(self, bus: Bus, snapshots: Snapshots, *, secret: str = "") -> None:
        """Args: secret: the mesh's secret, which signs tickets."""
        self._bus = bus
        self._secret = secret
        self._snapshots = snapshots
        self._deletions: asyncio.Queue[tuple[int, str, str]] = asyncio.Queue()
        """(number, stream, subject) of each deletion that nobody performs yet."""
        self._num_deletions = 0
        self._undeleted: dict[int, None] = {}
        """Numbers of the deletions that are not performed, in order."""
        self._deleted = asyncio.Condition()
        self._permits = GroupCommit(self._send_permits)

    async def run(self) -> None:
        """Delete data that is no longer needed, in the background."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_DELETIONS_AT_ONCE):
                group.create_task(self._run_deletions())

    async def _run_deletions(self) -> None:
        while True:
            number, stream, subject = await self._deletions.get()
            await self._delete_now(stream, subject)
            del self._undeleted[number]
            async with self._deleted:
                self._deleted.notify_all()

    async def _wait_until_deleted(self) -> None:
        """Wait for the deletions so far. Later ones may follow without end."""
        last = self._num_deletions
        async with self._deleted:
            await self._deleted.wait_for(lambda: next(iter(self._undeleted), last + 1) > last)

    async def perform(self, output: outputs.Output, context: Context | None) -> None:
        name = type(output).__name__

        async def report_full(reason: str) -> None:
            await self._bus.notice("scheduler", "waiting for room", reason, name)

        await until_done(
            lambda: self._perform(output, context),
            name,
            attempt_s=ATTEMPT_S,
            report_full=report_full,
        )

    async def _perform(self, output: outputs.Output, context: Context | None) -> None:
        match output:
            case outputs.SendCommand(command):
                await self._send_command(self._signed(command), context)
            case outputs.WriteCompletion(key, completion, content_type):
                await self._write(key, completion, content_type)
            case outputs.SettleCompletion(key, kind, completion, content_type):
                await self._write(key, completion, content_type)
                await self._append_stored(key, kind, completion)
            case outputs.DeleteOperations(keys):
                for key in keys:
                    self._delete(streams.ops_stream(key.tenant), streams.op_subject(key))
            case outputs.PutView(job, status):
                await self._bus.keys.put(Bucket.VIEW, str(job), encode(status))
                if status.state != "active":  # the run's record has this state's facts already
                    await self._bus.publish(streams.run_subject(job, status.run), status)
            case outputs.DropCheckpoint(job):
                # Delete at once: a new job of this name must not find the checkpoint.
                subject = f"$KV.{Bucket.CHECKPOINTS}.{job}"
                await self._bus.stored.delete(f"KV_{Bucket.CHECKPOINTS}", subject)
            case outputs.ForgetJob(job, deployments):
                self._forget(job, deployments)
            case outputs.PublishNotice(what, reason, subject):
                await self._bus.notice("scheduler", what, reason, subject)

    async def _send_command(self, command: commands.Command, context: Context | None) -> None:
        match command:
            case commands.Permit(kind=kind) if kind in READING_KINDS:
                await self._permits.add((command, context))
            case commands.Permits():
                await self._permits.add((command, context))
            case _:
                await self._send(command, context)

    def _signed(self, command: commands.Command) -> commands.Command:
        """Sign the command's tickets, so that state managers accept them."""
        if isinstance(command, commands.MirrorState):
            holds, keeps = (
                None if ticket is None else tickets.signed(ticket, self._secret)
                for ticket in (command.holds, command.keeps)
            )
            command = msgspec.structs.replace(command, holds=holds, keeps=keeps)
        match command:
            case (
                commands.Permit(ticket=commands.Ticket() as ticket)
                | commands.PrefetchVersion(ticket=ticket)
            ):
                return msgspec.structs.replace(command, ticket=tickets.signed(ticket, self._secret))
            case commands.Permits(permits=permits):
                signed_permits: list[Any] = [self._signed(permit) for permit in permits]
                return msgspec.structs.replace(command, permits=signed_permits)
            case commands.StartWpg() | commands.SealState() | commands.MirrorState() if (
                command.ticket is not None
            ):
                files = tickets.signed(command.ticket, self._secret)
                return msgspec.structs.replace(command, ticket=files)
        return command

    async def _send(self, command: commands.Command, context: Context | None) -> None:
        # Receivers handle a command once, even if it is sent twice. The server also drops known
        # ids, to save work. A batch has no id: its composition depends on timing, and another batch
        # with the same first permit would be dropped.
        msg_id = None if isinstance(command, commands.Permits) else f"cmd:{command.id}"
        await self._bus.publish(
            streams.permit_subject(command.node),
            command,
            msg_id=msg_id,
            headers=telemetry.inject({}, context) if context else {},
        )

    async def _send_permits(
        self, permits_to_send: list[tuple[commands.Permit | commands.Permits, Context | None]]
    ) -> None:
        """Send the permits that have arrived since the last call, in one message per activation."""
        if len(permits_to_send) == 1:
            await self._send(*permits_to_send[0])
            return
        activations: dict[tuple[DeploymentKey, int], list[tuple[commands.Permit, str]]] = {}
        for command, context in permits_to_send:
            for permit, traceparent in permits.traced(command, context):
                activation = permit.operation.deployment_key, permit.epoch
                activations.setdefault(activation, []).append((permit, traceparent))
        await asyncio.gather(*(self._send(permits.batch(p), None) for p in activations.values()))

    async def save(self, sequence: int, snapshot: bytes, *, is_last: bool = False) -> None:
        """Store a snapshot and truncate the log below the snapshot before it.

        Args: is_last: whether this leader handles nothing after it, so that a core of any version
            may continue from it.
        Raises: LeaseLost: another leader has stored one.
        """
        await self._wait_until_deleted()
        first_kept = await self._snapshots.save(sequence, snapshot, is_last=is_last)
        if first_kept:
            await until_done(
                lambda: self._bus.log.truncate(first_kept), "truncate the log", attempt_s=ATTEMPT_S
            )

    async def _write(self, key: OperationKey, completion: Completion, content_type: str) -> None:
        # The first stored outcome decides. A refusal usually means that a restart repeats the
        # output.
        with contextlib.suppress(AlreadyStored):
            await self._bus.publish(
                streams.done_subject(key), completion, content_type=content_type
            )

    async def _append_stored(self, key: OperationKey, kind: str, proposed: Completion) -> None:
        """Append the stored outcome to the log, whether it is ours or the workers'."""
        subject = streams.done_subject(key)
        stored = (await self._bus.stored.get_all(streams.DONE, [subject], must_exist=True)).get(
            subject
        )
        completion = proposed
        if stored is not None:
            completion = decode_outcome(stored.payload, content_type_of(stored.headers))
        event = OperationFinished(
            key=key,
            kind=kind,
            outcome=completion.outcome,
            epoch=0,
            incarnation=0,
            started_unix_s=time.time(),
            duration_s=0.0,
            error=completion.error,
            checkpoints=checkpoints_of(completion),
        )
        await self._bus.log.append(event, msg_id=f"settled:{key}")

    def _forget(self, job: JobKey, deployments: list[str]) -> None:
        self._delete(streams.DONE, f"{streams.PREFIX}.done.{job}.>")
        self._delete(streams.ops_stream(job.tenant), f"{streams.PREFIX}.op.{job}.>")
        self._delete_key(Bucket.VIEW, str(job))
        self._delete_key(Bucket.CHECKPOINTS, str(job))
        for name in deployments:
            self._delete_key(Bucket.SEALS, f"{job}.{name}")

    def _delete_key(self, bucket: Bucket, key: str) -> None:
        self._delete(f"KV_{bucket}", f"$KV.{bucket}.{key}")

    async def _delete_now(self, stream: str, subject: str) -> None:
        with contextlib.suppress(NotFoundError):  # no such tenant: nothing to delete
            await until_done(
                lambda: self._bus.stored.delete(stream, subject), "delete", attempt_s=ATTEMPT_S
            )

    def _delete(self, stream: str, subject: str) -> None:
        self._num_deletions += 1
        self._undeleted[self._num_deletions] = None
        self._deletions.put_nowait((self._num_deletions, stream, subject))
