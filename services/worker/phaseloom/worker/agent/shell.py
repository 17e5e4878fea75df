"""The agent's shell: takes this node's commands, drives its WPGs and its state manager.

Commands of a device that move state are done one at a time, in the order they came; those of one
deployment too, but for permits of reading operations, which run side by side. A command is
acknowledged after its effect is stored: an operation's outcome, a switch's report, a seal's record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerContext
from weakref import WeakValueDictionary

from msgspec.structs import replace
from nats.aio.msg import Msg

from phaseloom.common.contract.agents import (
    CallRoll,
    CancelPart,
    FindStore,
    LifeOver,
    NodeReply,
    NodeRequest,
    NotYet,
    Present,
    StoreFound,
    TakePart,
)
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import (
    CancelOperation,
    CloseActivation,
    Command,
    MirrorState,
    OpenActivation,
    Permit,
    Permits,
    PrefetchState,
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
    Event,
    SealCommitted,
    SealFailed,
    StateMirrored,
    WpgLost,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.state_agent import BringState
from phaseloom.common.contract.state_rank import Done
from phaseloom.common.observability import metrics, telemetry
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import Handler, Peer, close_fds
from phaseloom.worker.agent.nodes import LifeEnded, with_payloads
from phaseloom.worker.agent.rwlock import Turns
from phaseloom.worker.agent.sealrecords import SealRecords
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpg import Wpg
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.core.permits import TakenCommands, Verdict, judge_permit
from phaseloom.worker.patience import until_answered
from phaseloom.worker.rank.wire import (
    MeetRanks,
    RankFailed,
    RankMessage,
    RankUp,
    RollCall,
    RunPermits,
    RunsApart,
    RunShare,
    SharesDone,
)

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 10.0
"""A command in hand is extended this often: a third of the server's ack_wait."""
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
        forks: ForkServerContext,
        agent_socket: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._settings = settings
        self._revision = revision
        self._bus = bus
        self._records = SealRecords(bus)
        self._state = state
        self._forks = forks
        self._agent_socket = agent_socket
        self._tasks = tasks
        self._taken = TakenCommands()
        self._wpgs: dict[DeploymentKey, Wpg] = {}
        self._by_token: dict[str, Wpg] = {}
        self._turns: defaultdict[DeploymentKey, Turns] = defaultdict(Turns)
        self._state_lock = asyncio.Lock()
        self._sealing: WeakValueDictionary[DeploymentKey, asyncio.Lock] = WeakValueDictionary()
        """Held until a deployment's seal is written. No other waits for it: what holds it up may be
        another node, and who waits holds up operations of its own."""
        self._in_hand: dict[int, Msg] = {}
        self._stops: list[StopWpg] = []
        """Under way."""
        self._is_stopping = False

    def register_metrics(self) -> None:
        here = {"node": self._settings.node}
        metrics.observe(metrics.WORKER_WPGS, lambda: [(len(self._wpgs), here)])
        metrics.observe(metrics.WORKER_COMMANDS, lambda: [(len(self._in_hand), here)])

    async def stop(self) -> None:
        """Leave the mesh: the ranks end, and nothing is reported lost."""
        self._is_stopping = True
        await asyncio.gather(*(wpg.stop(_STOP_S) for wpg in self._wpgs.values()))

    # --- ranks ----------------------------------------------------------------------------------

    async def rank_session(self, peer: Peer[RankMessage]) -> None:
        """A connection on the agent's socket: the first call must present a token."""

        async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
            close_fds(fds)
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
        await self._report_lost(wpg.deployment, wpg.incarnation, wpg.reason)

    async def _report_lost(
        self, deployment: DeploymentKey, incarnation: int, reason: ErrorInfo
    ) -> None:
        log.warning("%s incarnation %d ended: %s", deployment, incarnation, reason.message)
        node = self._settings.node
        await self._append(
            WpgLost(deployment, incarnation, NodeId(node), reason),
            f"lost:{deployment}:{incarnation}:{node}",
        )

    async def _append(self, event: Event, msg_id: str) -> None:
        await until_answered(lambda: self._bus.append(event, msg_id=msg_id))

    # --- commands -------------------------------------------------------------------------------

    def take(self, message: Msg) -> None:
        """Handler of the permits consumer, in the order of arrival."""
        try:
            command: Command = decode(message.data, Command)
        except PhaseloomError as error:
            self._tasks.create_task(self._bus.bury("worker", message, error.info))
            return
        if isinstance(command, Permit):
            traceparent = (message.headers or {}).get("traceparent", "")
            command = Permits(command.id, command.node, command.revision, [command], [traceparent])
        fresh = self._take_fresh(command) if command.revision == self._revision else None
        if fresh is None:
            log.info("dropping %s %s of another life or taken before", type(command), command.id)
            self._tasks.create_task(message.ack())
            return
        self._tasks.create_task(self._handle(message, fresh))

    def _take_fresh(self, command: Command) -> Command | None:
        """What of it was not taken before."""
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

    async def _handle(self, message: Msg, command: Command) -> None:
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
                case OpenActivation():
                    await self._open(command, message)
                case StartWpg():
                    await self._start(command)
                case StopWpg():
                    await self._stop(command)
                case CloseActivation():
                    await self._close(command)
                case SealState():
                    await self._seal(command)
                case MirrorState():
                    await self._mirror(command)
                case ReleaseVersions():
                    await self._release(command.versions)
                case PrefetchState():
                    await self._prefetch(command)
        await message.ack()

    async def _prefetch(self, command: PrefetchState) -> None:
        try:
            await self._state.prefetch(command.deployment, command.incarnation, command.in_s)
        except PhaseloomError as error:
            # Only a hint; it may come after the life that it speaks of.
            log.info("no prefetch of %s: %s", command.deployment, error)

    async def _start(self, command: StartWpg) -> None:
        key = command.deployment
        async with self._turns[key].alone():
            old = self._wpgs.get(key)
            if old is not None and old.incarnation >= command.incarnation:
                return
            if old is not None:
                old.kill(ErrorInfo(Code.ABORTED, "fenced by a newer incarnation"))
            wpg = Wpg(command, self._settings, self._agent_socket, self._bus, self._tasks)
            try:
                if command.sources:
                    await self._state.bring_state(_state_of(command))
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
                # Where the ranks would meet on another node, they might wait for those in vain.
                wpg.abandon()
                return
            self._wpgs[key] = wpg
            self._by_token |= dict.fromkeys(wpg.tokens, wpg)
            await wpg.start(self._forks)
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

    def _is_to_stop(self, command: StartWpg) -> bool:
        """Whether its end is waited for already; it will be told as soon as this is over."""
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
        turns = self._turns[command.deployment]
        async with turns.alone(), self._state_lock:
            await self._state.drop_wpg(
                command.deployment, command.incarnation, forget=command.forget
            )
        if command.forget and turns.is_unused:
            self._turns.pop(command.deployment, None)
        if not was_alive:
            # Nobody watches it: this is the confirmation that the scheduler waits for.
            await self._report_lost(command.deployment, command.incarnation, stopped)

    # --- activations ----------------------------------------------------------------------------

    async def _open(self, command: OpenActivation, message: Msg) -> None:
        key = command.deployment
        async with self._turns[key].alone(), self._state_lock:
            wpg = self._wpgs.get(key)
            if wpg is None or wpg.incarnation != command.incarnation:
                return
            report: ActivationOpened | ActivationRefused
            try:
                report = await self._switch_in(command, wpg, message)
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
            early=command.early,
        )

    async def _close(self, command: CloseActivation) -> None:
        async with self._turns[command.deployment].alone(), self._state_lock:
            await self._state.switch_out(command.deployment, command.incarnation, command.epoch)

    async def _permit(self, command: Permits) -> bool:
        """Run what it permits; False: its activation has not been opened yet."""
        first = command.permits[0]
        key = first.operation.deployment_key
        turns = self._turns[key]
        is_mutating = first.kind in MUTATING_KINDS
        given = RunPermits(command.permits, command.traceparents)
        async with turns.alone() if is_mutating else turns.together():
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
            # What is saved gives its turn up before it has ended.
            running = self._tasks.create_task(_run(wpg, given))
            await wpg.until_apart(given, running)
        await running
        return True

    async def _cancel(self, command: CancelOperation) -> None:
        """Past everything that waits: what is to be stopped may be what they wait for."""
        key = command.operation.deployment_key
        wpg = self._wpgs.get(key)
        if wpg is None or wpg.incarnation != command.incarnation:
            log.info("%s is not cancelled: its ranks are gone", command.operation)
            return
        try:
            await wpg.cancel(command.operation)
        except PhaseloomError as error:
            log.info("%s is not cancelled: %s", command.operation, error)

    # --- other nodes ----------------------------------------------------------------------------

    async def answer_node(self, request: NodeRequest) -> NodeReply:
        """What an agent asks that has other ranks of a WPG of this node."""
        key, incarnation = _life_of(request)
        wpg = self._wpgs.get(key)
        if isinstance(request, FindStore):
            is_meant = wpg is not None and wpg.incarnation == incarnation
            address = wpg.store_address if wpg is not None and is_meant else ""
            return StoreFound(address) if address else NotYet()
        if wpg is None or wpg.incarnation != incarnation:
            return LifeOver(_over(key, incarnation))
        if wpg.is_killed:
            await wpg.ended()
            return LifeOver(wpg.reason)
        match request:
            case TakePart():
                return await wpg.take(request, partial(self._take_part, wpg))
            case CallRoll():
                try:
                    await wpg.roll_call_here()
                except LifeEnded as error:
                    return LifeOver(error.info)
            case CancelPart():
                await wpg.cancel_here(request.operation)
        return Present()

    async def _take_part(self, wpg: Wpg, share: RunShare) -> SharesDone:
        """Have this node's ranks do their share of a call of the leader's, which is elsewhere.

        It has its turn here as the operation has it there. Raises: LifeEnded; PhaseloomError.
        """
        permit, turns = share.permit, self._turns[wpg.deployment]
        if permit.kind == "save_state" and not share.prepares:
            # What is cut is written beside whatever runs.
            return await wpg.share_here(await with_payloads(self._bus, share))
        await wpg.until_sealed(permit.sealing)
        is_mutating = permit.kind in MUTATING_KINDS
        async with turns.alone() if is_mutating else turns.together():
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

    # --- copies ---------------------------------------------------------------------------------

    async def _mirror(self, command: MirrorState) -> None:
        """Bring a copy of another node's state, so that its deployment can go on here."""
        key, error = command.deployment, None
        request = BringState(
            key,
            command.seal_seq,
            command.versions,
            command.sources,
            command.ticket,
            command.holds,
            command.keeps,
            command.rank_offset,
            command.num_ranks,
        )
        try:
            async with self._turns[key].alone():
                await self._state.bring_state(request)
        except PhaseloomError as failure:
            error = failure.info
        done = StateMirrored(key, command.seal_seq, command.node, command.id, error)
        await self._append(done, f"mirrored:{key}:{command.id}")

    # --- seals ----------------------------------------------------------------------------------

    async def _seal(self, command: SealState) -> None:
        """Commit a seal: the copy is made now, written while the deployment runs on."""
        key = command.deployment
        sealing = self._sealing_of(key)
        try:
            async with self._turns[key].alone():
                await sealing.acquire()
                try:
                    async with self._state_lock:
                        await self._state.prepare_seal(key, command.incarnation, command.seq)
                except BaseException:
                    sealing.release()
                    raise
                finally:
                    self._note_sealed(command)
            try:
                await self._write_seal(command)
            finally:
                sealing.release()
        except PhaseloomError as error:
            await self._append(
                SealFailed(key, command.seq, command.node, error.info),
                f"seal-failed:{key}:{command.id}",
            )

    def _sealing_of(self, policy: DeploymentKey) -> asyncio.Lock:
        return self._sealing.setdefault(policy, asyncio.Lock())

    async def _release(self, versions: list[VersionKey]) -> None:
        """A seal under way may still have to write them."""
        async with asyncio.TaskGroup() as tasks:
            for policy in {version.policy for version in versions}:
                tasks.create_task(self._release_of(policy, versions))

    async def _release_of(self, policy: DeploymentKey, versions: list[VersionKey]) -> None:
        async with self._sealing_of(policy):
            await self._state.drop_versions([v for v in versions if v.policy == policy])

    def _note_sealed(self, command: SealState) -> None:
        wpg = self._wpgs.get(command.deployment)
        if wpg is not None and wpg.incarnation == command.incarnation:
            wpg.note_sealed(command.seq)

    async def _write_seal(self, command: SealState) -> None:
        key = command.deployment
        committed = await self._records.newest(key)
        sealed = await self._state.write_seal(
            key,
            command.incarnation,
            command.seq,
            command.versions,
            committed=committed,
            durability=command.durability,
            replicas=command.replicas,
            ticket=command.ticket,
        )
        log.info("sealed %s at %d in %s", key, command.seq, sealed.file or "host memory")
        copies = list(command.replicas)
        event = SealCommitted(key, command.seq, command.node, command.versions, copies)
        await self._records.commit(event, command.num_parts)
        await self._append(event, f"sealed:{key}:{command.seq}:{command.node}")


def _life_of(request: NodeRequest) -> tuple[DeploymentKey, int]:
    if isinstance(request, CancelPart):
        return request.operation.deployment_key, request.incarnation
    return request.deployment, request.incarnation


def _over(key: DeploymentKey, incarnation: int) -> ErrorInfo:
    return ErrorInfo(Code.UNAVAILABLE, f"incarnation {incarnation} of {key} is over")


def _state_of(command: StartWpg) -> BringState:
    return BringState(
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
    """What a rank may ask for, once it has proved who it is."""

    async def answer(body: RankMessage, fds: list[int]) -> tuple[RankMessage, list[int]]:
        close_fds(fds)
        if not wpg.is_leader(peer):
            raise CallerError("only a leader has other ranks", code=Code.PERMISSION_DENIED)
        match body:
            case RunShare():
                return await wpg.share(body), []
            case RunsApart():
                wpg.are_apart(body.first)
                return Done(), []
            case RollCall():
                await wpg.roll_call()
                return Done(), []
        raise CallerError(f"an agent does not answer {type(body).__name__}", field="type")

    return answer
