"""The ranks of a WPG on this node, in one incarnation.

A rank's process is forked from a server that has already imported its backend's runtime
(`processes`). The rank authenticates with the token of its spawn and ends when its connection to
the agent does, so a killed agent leaves no ranks behind. A WPG lives and dies as a whole: if one
rank dies or cannot start, the agent kills the others on this node, and the scheduler has those on
other nodes killed.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry.trace import SpanContext

from phaseloom.common.contract.agents import NodeReply, TakePart
from phaseloom.common.contract.commands import StartWpg
from phaseloom.common.contract.errors import (
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import DeploymentKey, OperationKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.agent.nodes import IncarnationEnded, LeaderShares, PeerAgents, Work
from phaseloom.worker.agent.processes import Processes, StartedRank
from phaseloom.worker.config import WorkerConfig
from phaseloom.worker.rank.wire import (
    AdjustShare,
    CancelRun,
    MeetAt,
    PrefetchWeights,
    RankConfig,
    RankFailed,
    RankMessage,
    RankUp,
    RollCall,
    RunPermits,
    RunShare,
    ShareDone,
    SharesDone,
    StopShare,
    TailReached,
    TokensDrawn,
)

T = TypeVar("T")
Remote = TypeVar("Remote")

_DIED = ErrorInfo(Code.UNAVAILABLE, "the worker process died")


class _Rank:
    """One rank, identified by its token before it has started and by its connection afterwards."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.peer: Peer[RankMessage] | None = None
        self.process: StartedRank | None = None
        self.up: RankUp | None = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


class LocalWpg:
    """This node's ranks of one incarnation. Call `start`; `ended` then waits for their death."""

    def __init__(
        self,
        command: StartWpg,
        settings: WorkerConfig,
        agent_socket: str,
        bus: Bus,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.deployment = command.deployment
        self.incarnation = command.incarnation
        self.devices = command.devices
        self.rank_offset = command.rank_offset
        self.epoch = 0
        """The epoch of the newest activation that was opened."""
        self.refused_epoch = 0
        self.last_span: SpanContext | None = None
        """The span of the newest permitted operation. A switch that displaces this WPG links to
        it."""
        self.reason = _DIED
        """The known reason for the end of the incarnation."""
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = loop.create_future()
        self._is_killed = False
        self._num_running = 0
        """Number of permit batches that the leader is running; for a dead WPG, when it died."""
        self.is_switching = False
        """Whether an activation is being opened, or opening the last one failed."""
        self._freed: dict[CommandId, asyncio.Future[None]] = {}
        self._dead: asyncio.Future[None] = loop.create_future()
        self._num_alive = len(command.devices)
        self._store = _store_directory(command, settings)
        self._ranks = [
            _Rank(config) for config in _rank_configs(command, settings, agent_socket, self._store)
        ]
        self._host = settings.rank_host
        self._listener: socket.socket | None = None
        """The socket of the store where the ranks of all nodes meet; only on rank 0's node."""
        self._nodes = command.nodes
        other_nodes = [node for node in command.nodes if node != settings.node]
        self._peer_agents = PeerAgents(
            bus, command.deployment, command.incarnation, other_nodes, lambda: self._is_killed
        )
        self._leader_shares = LeaderShares(tasks)
        self._sealed = 0
        """The newest seq up to which every requested seal has been prepared on this node or has
        failed."""
        self._has_sealed = asyncio.Event()

    @property
    def tokens(self) -> list[str]:
        """The tokens of this node's ranks, in rank order."""
        return [rank.config.token for rank in self._ranks]

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self._ranks[0].config.num_ranks

    @property
    def is_killed(self) -> bool:
        """Whether the incarnation is over, even if some of its processes are not reaped yet."""
        return self._is_killed

    @property
    def is_up(self) -> bool:
        return self._up.done() and self._up.exception() is None

    @property
    def is_at_work(self) -> bool:
        """Whether its ranks are starting, being switched in, or running an operation.

        For a dead WPG: whether they were when it died.
        """
        return not self.is_up or self.is_switching or self._num_running > 0

    @property
    def culprits(self) -> list[DeploymentKey]:
        """The deployments to blame for the death of the shared process, as in `WpgLost`."""
        return [key for rank in self._ranks if rank.process for key in rank.process.culprits]

    @property
    def state_bytes(self) -> int:
        """The bytes of managed state on each of its devices. Valid once the WPG is up."""
        return max(rank.up.state_bytes for rank in self._ranks if rank.up)

    @property
    def applied(self) -> int:
        """The seq of the last mutating operation in its state. Valid once the WPG is up."""
        assert self._ranks[0].up is not None
        return self._ranks[0].up.applied

    def open_store(self) -> None:
        """On rank 0's node, listen for the ranks of other nodes. Call it before `start`.

        Raises: ResourceError: the address does not belong to this node.
        """
        if len(self._nodes) < 2 or self.rank_offset:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server((self._host, 0), family=family)
        except OSError as error:
            raise ResourceError(
                f"cannot listen on {self._host!r} for ranks of other nodes: {error}",
                remedy="set the worker's rank_host to an address of this node",
            ) from error

    async def start(self, processes: Processes) -> None:
        """Start the ranks. If one cannot be started, the incarnation ends."""
        for rank in self._ranks:
            if not self._is_killed:
                try:
                    rank.process = await processes.start(rank.config, lambda: self.is_at_work)
                except PhaseloomError as error:
                    self.kill(error.info)
            if rank.process is None:
                self._count_death()
                continue
            rank.process.ended.add_done_callback(lambda _: self._on_death())
            if self._is_killed:
                rank.kill()

    def abandon(self) -> None:
        """End an incarnation that was not started. Call it instead of `start`."""
        self._is_killed = True
        for _ in self._ranks:
            self._count_death()

    def _on_death(self) -> None:
        names = " and ".join(f"{key.job}.{key.deployment}" for key in self.culprits)
        message = f"{_DIED.message}, in which {names} was at work"
        self.kill(ErrorInfo(_DIED.code, message) if names else None)
        self._count_death()

    def _count_death(self) -> None:
        self._num_alive -= 1
        if self._num_alive == 0:
            if self._store is not None:
                shutil.rmtree(self._store, ignore_errors=True)
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            self._dead.set_result(None)

    async def ended(self) -> None:
        """Wait until every rank is dead."""
        await asyncio.shield(self._dead)

    async def stop(self, timeout_s: float) -> None:
        """Close the ranks' connections, which makes them exit, and kill those that exit too
        late."""
        await asyncio.gather(*(rank.peer.close() for rank in self._ranks if rank.peer is not None))
        try:
            await asyncio.wait_for(self.ended(), timeout_s)
        except TimeoutError:
            self.kill()
            await self.ended()

    async def up(self, timeout_s: float) -> None:
        """Wait until all ranks are up. Raises: PhaseloomError: a rank did not come up."""
        try:
            await asyncio.wait_for(asyncio.shield(self._up), timeout_s)
        except TimeoutError:
            raise ResourceError(f"the ranks did not start within {timeout_s:.0f} s") from None

    def kill(self, reason: ErrorInfo | None = None) -> None:
        """Kill all ranks. The first reason given is kept."""
        if reason is not None and self.reason is _DIED:
            self.reason = reason
        self._is_killed = True
        if not self._up.done():
            self._up.set_exception(to_exception(self.reason))
            # Mark the exception as retrieved, because there may be no waiter yet.
            self._up.exception()
        for rank in self._ranks:
            rank.kill()

    # --- talking --------------------------------------------------------------------------------

    def connected(self, peer: Peer[RankMessage], message: RankUp | RankFailed) -> None:
        """Record a rank that has presented its token."""
        rank = next(r for r in self._ranks if r.config.token == message.token)
        rank.peer = peer
        if isinstance(message, RankFailed):
            self.kill(message.error)
            return
        rank.up = message
        if not all(r.up for r in self._ranks) or self._up.done():
            return
        if len({r.up.applied for r in self._ranks if r.up}) > 1:
            self.kill(
                ErrorInfo(
                    Code.DATA_LOSS, "the ranks have different states: their last operations differ"
                )
            )
        else:
            self._up.set_result(None)

    def is_leader(self, peer: Peer[RankMessage]) -> bool:
        return self._ranks[0].peer is peer and not self.rank_offset

    # --- over several nodes ---------------------------------------------------------------------

    @property
    def store_address(self) -> str:
        """The address of the store where the ranks meet; empty if it is on another node or not
        open."""
        if self._listener is None:
            return ""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    async def meet(self, token: str) -> tuple[MeetAt, list[int]]:
        """Return the store's address for the rank with this token, with the socket for rank 0."""
        if self._listener is None:
            return MeetAt(await self._peer_agents.find_store(self._nodes[0])), []
        is_first = self._ranks[0].config.token == token
        return MeetAt(self.store_address), [self._listener.fileno()] if is_first else []

    async def answer_share(
        self, request: TakePart, run: Callable[[RunShare], Work[SharesDone]]
    ) -> NodeReply:
        """Run a share that the leader, on another node, requests from this node's ranks."""
        return await self._leader_shares.answer(request, run)

    def record_sealed(self, seq: int) -> None:
        """Record that the seal at `seq` has been prepared here or has failed."""
        self._sealed = max(self._sealed, seq)
        self._has_sealed.set()

    async def until_sealed(self, seq: int) -> None:
        """Wait until this node's part of the seal at `seq` is copied and the ranks may continue.

        Raises: IncarnationEnded.
        """
        while self._sealed < seq:
            self._has_sealed.clear()
            has_sealed = asyncio.ensure_future(self._has_sealed.wait())
            either: list[asyncio.Future[Any]] = [has_sealed, self._dead]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                has_sealed.cancel()
            if self._dead.done():
                raise IncarnationEnded(self.reason.message)

    # --- one operation --------------------------------------------------------------------------

    async def run(self, permits: RunPermits) -> None:
        """Run permits; return when every outcome is stored.

        Raises: PhaseloomError: the WPG cannot continue.
        """
        leader = self._ranks[0].peer
        assert leader is not None
        self._num_running += 1
        await leader.call(permits)
        # not in a `finally`: after an error the WPG is over and counts as having died at work
        self._num_running -= 1

    async def until_devices_freed(self, permits: RunPermits, running: asyncio.Task[None]) -> None:
        """Wait until no permit needs devices or state: each has ended or is being saved.

        Args: running: the task of `run` for these permits, just started.
        """
        first = permits.permits[0].id
        freed = self._freed[first] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({running, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._freed[first]

    def devices_freed(self, first: CommandId) -> None:
        """Record the leader's report that the permits of this batch no longer need devices."""
        freed = self._freed.get(first)
        if freed is not None and not freed.done():
            freed.set_result(None)

    async def cancel(self, operation: OperationKey, *, keeps_partial: bool) -> None:
        """Stop a reading operation on all nodes. Raises: PhaseloomError: a rank is gone."""
        await self.cancel_locally(operation, keeps_partial=keeps_partial)
        await self._peer_agents.cancel(operation, keeps_partial=keeps_partial)

    async def adjust(self, units: list[int], command: CommandId) -> None:
        """Make the leader use these compute units; return when it does.

        Raises: PhaseloomError: the leader is gone.
        """
        peer = self._ranks[0].peer
        if peer is None:
            raise ResourceError("the leader of the WPG is not up")
        await peer.call(AdjustShare(units, command))

    async def prefetch_version(self, request: PrefetchWeights) -> None:
        """Make each rank on this node fetch its bytes of a weights version; return when all have
        ended.

        Raises: PhaseloomError: the version is unavailable to a rank, or a rank is gone.
        """
        peers = [rank.peer for rank in self._ranks if rank.peer is not None]
        calls = [peer.call(request) for peer in peers]
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

    async def cancel_locally(self, operation: OperationKey, *, keeps_partial: bool) -> None:
        """Stop a reading operation on this node. Raises: PhaseloomError: a rank is gone."""
        peers = [rank.peer for rank in self._ranks if rank.peer is not None]
        cancel = CancelRun(operation, keeps_partial)
        await asyncio.gather(*(peer.call(cancel) for peer in peers))

    async def share(self, share: RunShare) -> SharesDone:
        """Run a share on every rank except the leader. Raises: PhaseloomError: a rank failed."""
        local, remote = await self._with_peers(
            self.share_locally(share), self._peer_agents.run_share(share)
        )
        return SharesDone([*local.results, *remote])

    async def share_locally(self, share: RunShare) -> SharesDone:
        """Run a share on this node's ranks except the leader.

        Raises: IncarnationEnded: a rank has died. PhaseloomError: a rank failed.
        """
        answers = await self._call_ranks(share, share.replicas)
        return SharesDone([a.results for a in answers if isinstance(a, ShareDone)])

    async def forward_to_leader(self, message: TailReached | TokensDrawn) -> None:
        """Forward a message from another rank to the leader, which is on this node."""
        leader = self._ranks[0].peer
        assert leader is not None
        await leader.call(message)

    async def stop_share(self, share: StopShare) -> None:
        """Make every rank except the leader end its running share.

        Raises: IncarnationEnded: a rank has died. PhaseloomError: a rank failed.
        """
        await self._call_ranks(share)

    async def roll_call(self) -> None:
        """Wait until all ranks are known to be alive."""
        await self._with_peers(self.roll_call_locally(), self._peer_agents.call_roll())

    async def roll_call_locally(self) -> None:
        """Wait until this node's ranks are known to be alive. Raises: IncarnationEnded."""
        await self._call_ranks(RollCall())

    async def _with_peers(self, local: Work[T], remote: Work[Remote]) -> tuple[T, Remote]:
        """Return the results of this node and of the other nodes to the leader.

        Never returns a result if a rank has died, because the whole WPG, including the leader, then
        dies.
        """
        works = asyncio.ensure_future(local), asyncio.ensure_future(remote)
        try:
            return await asyncio.gather(*works)
        except IncarnationEnded as error:
            self.kill(error.info)
            await self.ended()
            raise
        finally:
            await lifecycle.end(works)

    async def _call_ranks(self, body: RankMessage, only: Sequence[int] = ()) -> list[RankMessage]:
        """Call every rank on this node except the leader.

        Args:   only: call only these ranks; empty: all.
        Raises: IncarnationEnded: a rank has died, and now all are dead. PhaseloomError: a rank
                 failed.
        """
        rank_numbers = only or range(self.num_ranks)
        ranks = [r for r in self._ranks if r.config.rank != 0 and r.config.rank in rank_numbers]
        peers = [rank.peer for rank in ranks if rank.peer is not None]
        calls = [asyncio.ensure_future(peer.call(body)) for peer in peers]
        try:
            answers = await asyncio.gather(*calls)
        except ResourceError:
            if any(peer.closed.done() for peer in peers):
                self.kill()
                await self.ended()
                raise IncarnationEnded(self.reason.message) from None
            raise
        finally:
            for call in calls:
                call.cancel()
        return [answer for answer, _ in answers]


def _rank_configs(
    command: StartWpg, settings: WorkerConfig, agent_socket: str, store: Path | None
) -> list[RankConfig]:
    return [
        RankConfig(
            token=secrets.token_hex(16),
            deployment=command.deployment,
            incarnation=command.incarnation,
            spec=command.spec,
            node=settings.node,
            device=device,
            device_kind=settings.device_kind,
            agent_socket=agent_socket,
            state_socket=settings.state_socket,
            rank=command.rank_offset + index,
            num_ranks=command.spec.layout.num_ranks if command.nodes else len(command.devices),
            nodes=command.nodes,
            store_path="" if store is None else str(store / "store"),
            interface=settings.rank_interface,
            checkpoint=command.checkpoint,
            applied=command.applied,
            num_units=settings.cores_per_device,
            device_bytes=settings.devices[device] if device < len(settings.devices) else 0,
        )
        for index, device in enumerate(command.devices)
    ]


def _store_directory(command: StartWpg, settings: WorkerConfig) -> Path | None:
    """Make a store directory for this incarnation, so that ranks of other incarnations never meet
    there."""
    if command.nodes or len(command.devices) == 1:
        return None
    return Path(
        tempfile.mkdtemp(prefix=f"{_store_prefix(settings)}-", dir=settings.runtime_directory)
    )


def _store_prefix(settings: WorkerConfig) -> str:
    return f"ranks-{settings.node}"


def remove_old_stores(settings: WorkerConfig) -> None:
    """Remove the stores left by a killed agent, whose ranks are dead."""
    for path in Path(settings.runtime_directory).glob(f"{_store_prefix(settings)}-*"):
        shutil.rmtree(path, ignore_errors=True)
