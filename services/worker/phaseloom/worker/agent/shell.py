"""The agent's shell: it takes this node's commands, and drives its WPGs and its state manager.

Commands that move state on a device are done one at a time, in the order they came. So are the
commands of one deployment, except permits of reading operations, which run side by side. A command
is acknowledged after its effect is stored: an operation's outcome, a switch's report, a seal's
record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace
from nats.aio.msg import Msg

from phaseloom.common.contract.agents import (
    CallRoll,
    CancelPart,
    FindStore,
    IncarnationOver,
    NodeReply,
    NodeRequest,
    NotYet,
    Present,
    StoreFound,
    TakePart,
)
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
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.events import (
    ActivationOpened,
    ActivationRefused,
    ClaimsAdjusted,
    Event,
    WpgLost,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.state_agent import FetchState
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.observability import metrics, telemetry
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import Handler, Peer, close_fds
from phaseloom.common.transport.logmark import LogMark
from phaseloom.common.transport.retry import until_done
from phaseloom.worker.agent.modelfiles import ModelFiles
from phaseloom.worker.agent.nodes import IncarnationEnded, with_payloads
from phaseloom.worker.agent.processes import Processes
from phaseloom.worker.agent.rwlock import FairReadWriteLock
from phaseloom.worker.agent.sealing import Sealing
from phaseloom.worker.agent.sealrecords import SealRecords
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpg import Wpg
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.core.permits import TakenCommands, Verdict, judge_permit
from phaseloom.worker.rank.wire import (
    DevicesFreed,
    HostUp,
    MeetRanks,
    PrefetchWeights,
    RankFailed,
    RankMessage,
    RankUp,
    RollCall,
    RunPermits,
    RunShare,
    SharesDone,
    StopShare,
    TailReached,
    TokensDrawn,
)

log = logging.getLogger(__name__)

ACK_WAIT_S = 6.0
"""Seconds after which a command that nobody has in hand is delivered again. One of several servers
may lose what it was about to deliver when it was cut off: so long a job then stands still."""
_KEEP_ALIVE_S = ACK_WAIT_S / 3
"""Seconds between two extensions of a command in hand."""
_EARLY_PAUSE_S = 0.02
_STOP_S = 3.0


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
        """Args: mark: hears of how far the decision log has come, which the commands say."""
        self._settings = settings
        self._revision = revision
        self._bus = bus
        self._state = state
        self._processes = processes
        self._agent_socket = agent_socket
        self._tasks = tasks
        self._mark = mark
        self._models = ModelFiles(settings.node)
        self._taken = TakenCommands()
        self._wpgs: dict[DeploymentKey, Wpg] = {}
        self._by_token: dict[str, Wpg] = {}
        self._locks: defaultdict[DeploymentKey, FairReadWriteLock] = defaultdict(FairReadWriteLock)
        self._state_lock = asyncio.Lock()
        self._seals = Sealing(
            state,
            SealRecords(bus),
            wpgs=self._wpgs,
            locks=self._locks,
            state_lock=self._state_lock,
            append=self._append,
        )
        self._in_hand: dict[int, Msg] = {}
        self._stops: list[StopWpg] = []
        """The stop commands that are under way."""
        self._prefetching: Counter[VersionKey] = Counter()
        """The weights versions that ranks are fetching on a hint, each with how many hints."""
        self._gone: set[VersionKey] = set()
        """Those of them that were to be dropped since."""
        self._is_stopping = False

    def register_metrics(self) -> None:
        here = {"node": self._settings.node}
        metrics.observe(metrics.WORKER_WPGS, lambda: [(len(self._wpgs), here)])
        metrics.observe(metrics.WORKER_COMMANDS, lambda: [(len(self._in_hand), here)])

    async def stop(self) -> None:
        """End the ranks and leave the mesh; nothing is reported as lost."""
        self._is_stopping = True
        await asyncio.gather(*(wpg.stop(_STOP_S) for wpg in self._wpgs.values()))

    # --- ranks ----------------------------------------------------------------------------------

    async def rank_session(self, peer: Peer[RankMessage]) -> None:
        """Serve a connection on the agent's socket; its first call must present a token."""

        async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
            close_fds(fds)
            if isinstance(body, HostUp) and self._processes.connected(body.token, peer):
                return Done(), []
            token = body.token if isinstance(body, MeetRanks | RankUp | RankFailed) else ""
            wpg = self._by_token.get(token)
            if wpg is not None and isinstance(body, MeetRanks):
                return await wpg.meet(token)
            if wpg is None or not isinstance(body, RankUp | RankFailed):
                peer.cut("no rank of this agent")
                return Done(), []
            peer.handler = _answers(wpg, peer)
            wpg.connected(peer, body)
            return Done(), []

        peer.handler = answer
        peer.start()
        await peer.finish()

    async def _watch(self, wpg: Wpg) -> None:
        """Report the death of a WPG, once it is certain and the state manager knows."""
        await wpg.ended()
        if self._is_stopping:
            return
        for token in wpg.tokens:
            del self._by_token[token]
        if self._wpgs.get(wpg.deployment) is wpg:
            del self._wpgs[wpg.deployment]
        async with self._state_lock:
            await self._state.drop_wpg(wpg.deployment, wpg.incarnation, forget=False)
        await self._report_lost(wpg.deployment, wpg.incarnation, wpg.reason, wpg.culprits)

    async def _report_lost(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        reason: ErrorInfo,
        culprits: Sequence[DeploymentKey] = (),
    ) -> None:
        log.warning("%s incarnation %d ended: %s", deployment, incarnation, reason.message)
        node = self._settings.node
        await self._append(
            WpgLost(deployment, incarnation, NodeId(node), reason, list(culprits)),
            f"lost:{deployment}:{incarnation}:{node}",
        )

    async def _append(self, event: Event, msg_id: str) -> None:
        await until_done(lambda: self._bus.log.append(event, msg_id=msg_id), "append")

    # --- commands -------------------------------------------------------------------------------

    def take(self, message: Msg) -> None:
        """Take a message of the permits consumer; messages come in the order of arrival."""
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
        fresh = self._take_fresh(command) if command.revision == self._revision else None
        if fresh is None:
            log.info(
                "dropping %s %s of another incarnation or taken before", type(command), command.id
            )
            self._tasks.create_task(message.ack())
            return
        self._tasks.create_task(self._handle(message, fresh))

    def _take_fresh(self, command: Command) -> Command | None:
        """The command without the parts that were taken before; None: nothing is left."""
        if isinstance(command, Permits):
            traceparents = command.traceparents or [""] * len(command.permits)
            traced = zip(command.permits, traceparents, strict=True)
            fresh = [(one, traceparent) for one, traceparent in traced if one.id not in self._taken]
            for permit, _ in fresh:
                self._taken.add(permit.id)
            permits, parents = [permit for permit, _ in fresh], [parent for _, parent in fresh]
            return replace(command, permits=permits, traceparents=parents) if fresh else None
        if command.id in self._taken:
            return None
        self._taken.add(command.id)
        return command

    async def keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_ALIVE_S)
            for message in list(self._in_hand.values()):
                await message.in_progress()

    @contextmanager
    def _holding(self, message: Msg) -> Iterator[None]:
        self._in_hand[id(message)] = message
        try:
            yield
        finally:
            del self._in_hand[id(message)]

    async def _handle(  # noqa: PLR0912 - one arm a command
        self, message: Msg, command: Command
    ) -> None:
        with self._holding(message):
            match command:
                case Permits():
                    if not await self._permit(command):
                        for permit in command.permits:
                            self._taken.forget(permit.id)
                        await message.nak(delay=_EARLY_PAUSE_S)
                        return
                case CancelOperation():
                    await self._cancel(command)
                case AdjustClaims():
                    await self._adjust(command)
                case OpenActivation():
                    await self._open(command, message)
                case StartWpg():
                    await self._start(command)
                case StopWpg():
                    await self._stop(command)
                case CloseActivation():
                    await self._close(command)
                case SealState():
                    await self._seals.seal(command)
                case MirrorState():
                    await self._seals.mirror(command)
                case ReleaseVersions():
                    self._gone.update(v for v in command.versions if v in self._prefetching)
                    await self._seals.release(command.versions)
                case PrefetchState():
                    await self._prefetch(command)
                case PrefetchVersion():
                    await self._prefetch_version(command)
        await message.ack()

    async def _prefetch(self, command: PrefetchState) -> None:
        try:
            await self._state.prefetch(command.deployment, command.incarnation, command.in_s)
        except PhaseloomError as error:
            # Only a hint, which may come after the incarnation has ended.
            log.info("no prefetch of %s: %s", command.deployment, error)

    async def _prefetch_version(self, command: PrefetchVersion) -> None:
        wpg, version = self._wpgs.get(command.deployment), command.ticket.version
        if wpg is None or wpg.incarnation != command.incarnation:
            return
        self._prefetching[version] += 1
        try:
            await wpg.prefetch_version(PrefetchWeights(command.sources, command.ticket, command.id))
        except PhaseloomError as error:
            # Only a hint: the operation finds out itself what is wrong.
            log.info("no prefetch of version %s: %s", version, error)
        self._prefetching[version] -= 1
        if not self._prefetching[version]:
            del self._prefetching[version]
            if version in self._gone:
                # It may have come after it was dropped.
                self._gone.remove(version)
                await self._seals.release([version])

    async def _start(self, command: StartWpg) -> None:
        key = command.deployment
        async with self._locks[key].write():
            old = self._wpgs.get(key)
            if old is not None and old.incarnation >= command.incarnation:
                return
            if old is not None:
                old.kill(ErrorInfo(Code.ABORTED, "fenced by a newer incarnation"))
            wpg = Wpg(command, self._settings, self._agent_socket, self._bus, self._tasks)
            try:
                await self._verify_model(command)
                if command.sources:
                    await self._state.fetch_state(_state_of(command))
                await self._state.register_wpg(
                    wpg.tokens,
                    key,
                    command.incarnation,
                    command.devices,
                    command.seal_seq,
                    rank_offset=wpg.rank_offset,
                    num_ranks=wpg.num_ranks,
                )
                wpg.open_store()
            except PhaseloomError as error:
                wpg.abandon()
                await self._report_lost(key, command.incarnation, error.info)
                return
            if self._is_to_stop(command):
                # Ranks that meet on another node might wait there in vain.
                wpg.abandon()
                return
            self._wpgs[key] = wpg
            self._by_token |= dict.fromkeys(wpg.tokens, wpg)
            await wpg.start(self._processes)
            self._tasks.create_task(self._watch(wpg))
            try:
                await wpg.up(self._settings.start_timeout_s)
            except PhaseloomError as error:
                # The watcher reports it, once it is dead.
                wpg.kill(error.info)
                return
        await self._append(
            WpgStarted(
                deployment=key,
                incarnation=command.incarnation,
                node=command.node,
                state_bytes=wpg.state_bytes,
                applied=wpg.applied,
                devices=command.devices,
            ),
            f"started:{key}:{command.incarnation}:{command.node}",
        )

    async def _verify_model(self, command: StartWpg) -> None:
        """Verify the files of a registered model, if the ranks start from them.

        Raises: as `ModelFiles.verify`.
        """
        model = command.spec.model
        is_filled = bool(command.seal_seq or command.checkpoint) and model.adapter is None
        if model.pinned is not None and not is_filled:
            await self._models.verify(model.registered, model.pinned)

    def _is_to_stop(self, command: StartWpg) -> bool:
        """Whether a stop command for these ranks is under way already, so that they must not
        start."""
        return any(
            stop.deployment == command.deployment and stop.incarnation >= command.incarnation
            for stop in self._stops
        )

    async def _stop(self, command: StopWpg) -> None:
        self._stops.append(command)
        try:
            await self._end(command)
        finally:
            self._stops.remove(command)

    async def _end(self, command: StopWpg) -> None:
        wpg = self._wpgs.get(command.deployment)
        stopped = ErrorInfo(Code.ABORTED, "stopped by the scheduler")
        was_alive = wpg is not None and wpg.incarnation <= command.incarnation
        if wpg is not None and was_alive:
            wpg.reason = stopped
            # Whoever is switched in next must find the device empty.
            async with self._state_lock:
                if command.forget:
                    await wpg.stop(_STOP_S)
                else:
                    wpg.kill()
                    await wpg.ended()
        lock = self._locks[command.deployment]
        async with lock.write(), self._state_lock:
            await self._state.drop_wpg(
                command.deployment, command.incarnation, forget=command.forget
            )
        if command.forget and lock.is_unused:
            self._locks.pop(command.deployment, None)
        if not was_alive:
            # Nobody watches these ranks: the scheduler waits for this confirmation.
            await self._report_lost(command.deployment, command.incarnation, stopped)

    # --- activations ----------------------------------------------------------------------------

    async def _open(self, command: OpenActivation, message: Msg) -> None:
        key = command.deployment
        async with self._locks[key].write(), self._state_lock:
            wpg = self._wpgs.get(key)
            if wpg is None or wpg.incarnation != command.incarnation:
                return
            report: ActivationOpened | ActivationRefused
            try:
                wpg.is_switching = True  # it stays so where it fails: the rank may have died of it
                report = await self._switch_in(command, wpg, message)
                wpg.is_switching = False
                wpg.epoch = command.epoch
            except PhaseloomError as error:
                wpg.refused_epoch = command.epoch
                report = ActivationRefused(key, command.epoch, command.node, error.info)
        await self._append(report, f"activation:{key}:{command.epoch}:{command.node}")

    async def _switch_in(self, command: OpenActivation, wpg: Wpg, message: Msg) -> ActivationOpened:
        displaced = [self._wpgs[key] for key in command.displaces if key in self._wpgs]
        key = command.deployment
        started_s = time.time()
        with telemetry.span(
            "switch",
            parent=telemetry.extract(message.headers),
            links=[w.last_span for w in displaced if w.last_span is not None],
            tenant=key.tenant,
            job=key.job,
            deployment=key.deployment,
            node=self._settings.node,
            device=wpg.devices[0],
            epoch=command.epoch,
        ):
            switched = await self._state.switch_in(
                key,
                command.incarnation,
                command.epoch,
                command.displaces,
                ranks=command.ranks,
                traceparent=telemetry.inject({}).get("traceparent", ""),
            )
        return ActivationOpened(
            deployment=key,
            epoch=command.epoch,
            node=command.node,
            started_unix_s=started_s,
            offload_s=switched.offload_s,
            load_s=switched.load_s,
            bytes_out=switched.bytes_out,
            bytes_in=switched.bytes_in,
            displaced=switched.displaced,
            is_speculative=command.is_speculative,
        )

    async def _close(self, command: CloseActivation) -> None:
        async with self._locks[command.deployment].write(), self._state_lock:
            await self._state.switch_out(command.deployment, command.incarnation, command.epoch)

    async def _permit(self, command: Permits) -> bool:
        """Run the permits. Returns: False: their activation has not been opened here yet."""
        first = command.permits[0]
        key = first.operation.deployment_key
        lock = self._locks[key]
        is_mutating = first.kind in MUTATING_KINDS
        given = RunPermits(command.permits, command.traceparents)
        async with lock.write() if is_mutating else lock.read():
            wpg = self._wpgs.get(key)
            if wpg is None or not wpg.is_up:
                return True
            verdict = judge_permit(
                incarnation=first.incarnation,
                epoch=first.epoch,
                own_incarnation=wpg.incarnation,
                own_epoch=wpg.epoch,
                refused_epoch=wpg.refused_epoch,
            )
            if verdict is Verdict.EARLY:
                return False
            if verdict is Verdict.STALE:
                log.info("dropping stale permit of %s", first.operation)
                return True
            traceparent = command.traceparents[-1]
            last = telemetry.extract({"traceparent": traceparent} if traceparent else {})
            wpg.last_span = telemetry.span_context(last)
            if all(permit.kind != "save_state" for permit in command.permits):
                await _run(wpg, given)
                return True
            # A `save_state` gives the lock up before it has ended.
            running = self._tasks.create_task(_run(wpg, given))
            await wpg.until_devices_freed(given, running)
        await running
        return True

    async def _cancel(self, command: CancelOperation) -> None:
        """Pass a cancel to the ranks without waiting for any lock: the operation to stop may hold
        the lock."""
        key = command.operation.deployment_key
        wpg = self._wpgs.get(key)
        if wpg is None or wpg.incarnation != command.incarnation:
            log.info("%s is not cancelled: its ranks are gone", command.operation)
            return
        try:
            await wpg.cancel(command.operation, keeps_partial=command.keeps_partial)
        except PhaseloomError as error:
            log.info("%s is not cancelled: %s", command.operation, error)

    async def _adjust(self, command: AdjustClaims) -> None:
        """Change the compute share of running ranks without waiting for any lock: the operation
        that is to give up units holds it."""
        key = command.deployment
        wpg = self._wpgs.get(key)
        if wpg is None or wpg.incarnation != command.incarnation:
            return
        try:
            await wpg.adjust(command.units, command.id)
        except PhaseloomError as error:
            # Its units are free with its death, which is reported.
            log.info("the share of %s is not changed: %s", key, error)
            return
        if command.shrinks:
            adjusted = ClaimsAdjusted(key, command.incarnation, command.node, command.id)
            await self._append(adjusted, f"adjusted:{key}:{command.id}")

    # --- other nodes ----------------------------------------------------------------------------

    async def answer_node(self, request: NodeRequest) -> NodeReply:
        """Answer the agent of another node that has ranks of the same WPG."""
        key, incarnation = _incarnation_of(request)
        wpg = self._wpgs.get(key)
        if isinstance(request, FindStore):
            is_meant = wpg is not None and wpg.incarnation == incarnation
            address = wpg.store_address if wpg is not None and is_meant else ""
            return StoreFound(address) if address else NotYet()
        if wpg is None or wpg.incarnation != incarnation:
            return IncarnationOver(_over(key, incarnation))
        if wpg.is_killed:
            await wpg.ended()
            return IncarnationOver(wpg.reason)
        match request:
            case TakePart():
                return await wpg.take(request, partial(self._take_part, wpg))
            case CallRoll():
                try:
                    await wpg.roll_call_here()
                except IncarnationEnded as error:
                    return IncarnationOver(error.info)
            case CancelPart():
                await wpg.cancel_here(request.operation, keeps_partial=request.keeps_partial)
        return Present()

    async def _take_part(self, wpg: Wpg, share: RunShare) -> SharesDone:
        """Have this node's ranks run their share of a call whose leader is on another node.

        The share takes the deployment's lock here as the operation does on the leader's node.
        Raises: IncarnationEnded; PhaseloomError: a rank failed.
        """
        permit, lock = share.permit, self._locks[wpg.deployment]
        if permit.kind == "save_state" and not share.prepares:
            # State that was copied is written beside whatever runs.
            return await wpg.share_here(await with_payloads(self._bus, share))
        await wpg.until_sealed(permit.sealing)
        is_mutating = permit.kind in MUTATING_KINDS
        async with lock.write() if is_mutating else lock.read():
            if permit.epoch != wpg.epoch:
                raise ResourceError(
                    f"{permit.operation} is permitted under epoch {permit.epoch}, here it is "
                    f"{wpg.epoch}",
                    code=Code.ABORTED,
                )
            traceparent = share.traceparent
            last = telemetry.extract({"traceparent": traceparent} if traceparent else {})
            wpg.last_span = telemetry.span_context(last)
            return await wpg.share_here(await with_payloads(self._bus, share))


def _incarnation_of(request: NodeRequest) -> tuple[DeploymentKey, int]:
    if isinstance(request, CancelPart):
        return request.operation.deployment_key, request.incarnation
    return request.deployment, request.incarnation


def _over(key: DeploymentKey, incarnation: int) -> ErrorInfo:
    return ErrorInfo(Code.UNAVAILABLE, f"incarnation {incarnation} of {key} is over")


def _state_of(command: StartWpg) -> FetchState:
    return FetchState(
        command.deployment,
        command.seal_seq,
        command.versions,
        command.sources,
        command.ticket,
        rank_offset=command.rank_offset,
        num_ranks=command.spec.layout.num_ranks,
    )


async def _run(wpg: Wpg, given: RunPermits) -> None:
    try:
        await wpg.run(given)
    except PhaseloomError as error:
        # It died, or it is not in the state that the scheduler believes: the next incarnation is
        # rebuilt from what is stored.
        wpg.kill(error.info)


def _answers(wpg: Wpg, peer: Peer[RankMessage]) -> Handler[RankMessage]:
    """The handler of the requests that a leader may send its agent, once it has proved who it
    is."""

    async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        close_fds(fds)
        if isinstance(body, TailReached | TokensDrawn):
            await wpg.tell_leader(body)
            return Done(), []
        if not wpg.is_leader(peer):
            raise CallerError("only a leader has other ranks", code=Code.PERMISSION_DENIED)
        match body:
            case RunShare():
                return await wpg.share(body), []
            case StopShare():
                await wpg.stop_share(body)
                return Done(), []
            case DevicesFreed():
                wpg.devices_freed(body.first)
                return Done(), []
            case RollCall():
                await wpg.roll_call()
                return Done(), []
        raise CallerError(f"an agent does not answer {type(body).__name__}", field="type")

    return answer
