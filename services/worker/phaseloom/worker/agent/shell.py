"""The agent's shell: receives this node's commands and has its parts carry them out.

Commands that move state on a device run one at a time, in order of arrival. So do the commands of
one deployment, except that permits of reading operations run side by side. A command is
acknowledged after its effect is stored: the outcome of an operation, the report of a switch, the
record of a seal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace
from nats.aio.msg import Msg

from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import (
    AdjustClaims,
    CancelOperation,
    CloseActivation,
    Command,
    MirrorState,
    OpenActivation,
    Permit,
    Permits,
    PrefetchState,
    PrefetchVersion,
    ReleaseVersions,
    SealState,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.events import Event
from phaseloom.common.observability import metrics
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.logmark import LogMark
from phaseloom.common.transport.retry import until_done
from phaseloom.worker.agent.activations import Activations
from phaseloom.worker.agent.noderequests import NodeRequests
from phaseloom.worker.agent.prefetching import Prefetching
from phaseloom.worker.agent.processes import Processes
from phaseloom.worker.agent.sealing import Sealing
from phaseloom.worker.agent.sealrecords import SealRecords
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpgs import Wpgs
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.core.permits import AcceptedCommands

log = logging.getLogger(__name__)

ACK_WAIT_S = 6.0
"""Seconds after which NATS redelivers a command that nobody is handling. If one of several servers
is cut off, it may lose a command that it was about to deliver; a job then waits for this long."""
_KEEP_ALIVE_S = ACK_WAIT_S / 3
"""Seconds between two extensions of the deadline of each command in progress."""
_EARLY_PAUSE_S = 0.02
"""Seconds until a permit is redelivered whose activation has not been opened yet."""


class Agent:
    def __init__(
        self,
        settings: WorkerConfig,
        *,
        revision: int,
        bus: Bus,
        state: AgentStateClient,
        processes: Processes,
        agent_socket: str,
        tasks: asyncio.TaskGroup,
        mark: LogMark | None = None,
    ) -> None:
        """Args: revision: revision of this agent's node lease. Commands for other revisions are
           dropped.
        mark: records the position in the decision log, which commands reveal."""
        self._node = settings.node
        self._revision = revision
        self._bus = bus
        self._tasks = tasks
        self._mark = mark
        self._accepted = AcceptedCommands()
        self._in_progress: dict[int, Msg] = {}
        self.wpgs = Wpgs(
            settings,
            bus=bus,
            state=state,
            processes=processes,
            agent_socket=agent_socket,
            tasks=tasks,
            append=self._append,
        )
        self.node_requests = NodeRequests(self.wpgs, bus)
        self._activations = Activations(
            self.wpgs, state, node=settings.node, tasks=tasks, append=self._append
        )
        self._sealing = Sealing(
            state,
            SealRecords(bus),
            wpgs=self.wpgs.by_deployment,
            locks=self.wpgs.locks,
            state_lock=self.wpgs.state_lock,
            append=self._append,
        )
        self._prefetching = Prefetching(self.wpgs, state, self._sealing.release)

    def register_metrics(self) -> None:
        labels = {"node": self._node}
        wpgs = self.wpgs.by_deployment
        metrics.observe(metrics.WORKER_WPGS, lambda: [(len(wpgs), labels)])
        metrics.observe(metrics.WORKER_COMMANDS, lambda: [(len(self._in_progress), labels)])

    def receive(self, message: Msg) -> None:
        """Handle a message from the permits consumer. Pass messages in order of arrival."""
        try:
            command: Command = decode(message.data, Command)
        except PhaseloomError as error:
            self._tasks.create_task(self._bus.bury("worker", message, error.info))
            return
        if isinstance(command, Permit):
            traceparent = (message.headers or {}).get("traceparent", "")
            command = Permits(command.id, command.node, command.revision, [command], [traceparent])
        if self._mark is not None:
            self._mark.record(command.id.sequence)
        new = self._new_part(command) if command.revision == self._revision else None
        if new is None:
            log.info(
                "dropping %s %s: it is for another agent or was handled before",
                type(command),
                command.id,
            )
            self._tasks.create_task(message.ack())
            return
        self._tasks.create_task(self._handle(message, new))

    async def keep_alive(self) -> None:
        """Keep NATS from redelivering commands in progress, until cancelled."""
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            for message in list(self._in_progress.values()):
                await message.in_progress()

    def _new_part(self, command: Command) -> Command | None:
        """Return the part of a command that is new and record it as accepted; None if nothing is
        new."""
        if isinstance(command, Permits):
            traceparents = command.traceparents or [""] * len(command.permits)
            traced = zip(command.permits, traceparents, strict=True)
            new = [(permit, parent) for permit, parent in traced if permit.id not in self._accepted]
            for permit, _ in new:
                self._accepted.add(permit.id)
            permits, parents = [permit for permit, _ in new], [parent for _, parent in new]
            return replace(command, permits=permits, traceparents=parents) if new else None
        if command.id in self._accepted:
            return None
        self._accepted.add(command.id)
        return command

    async def _handle(  # noqa: PLR0912 - one arm a command
        self, message: Msg, command: Command
    ) -> None:
        with self._progress_of(message):
            match command:
                case Permits():
                    if not await self._activations.run(command):
                        for permit in command.permits:
                            self._accepted.forget(permit.id)
                        await message.nak(delay=_EARLY_PAUSE_S)
                        return
                case CancelOperation():
                    await self._activations.cancel(command)
                case AdjustClaims():
                    await self._activations.adjust(command)
                case OpenActivation():
                    await self._activations.open(command, message)
                case CloseActivation():
                    await self._activations.close(command)
                case StartWpg():
                    await self.wpgs.start(command)
                case StopWpg():
                    await self.wpgs.stop(command)
                case SealState():
                    await self._sealing.seal(command)
                case MirrorState():
                    await self._sealing.mirror(command)
                case ReleaseVersions():
                    await self._prefetching.release(command.versions)
                case PrefetchState():
                    await self._prefetching.prefetch_state(command)
                case PrefetchVersion():
                    await self._prefetching.prefetch_version(command)
        await message.ack()

    @contextmanager
    def _progress_of(self, message: Msg) -> Iterator[None]:
        self._in_progress[id(message)] = message
        try:
            yield
        finally:
            del self._in_progress[id(message)]

    async def _append(self, event: Event, msg_id: str) -> None:
        await until_done(lambda: self._bus.log.append(event, msg_id=msg_id), "append")
