"""The daemon's sessions with the node's agent and ranks: authentication and dispatch.

An agent proves that it knows the mesh's secret, a rank its token; nothing else is trusted. Requests
of one connection run concurrently; device locks order the switches. Before an answer leaves, the
manifest has everything that the answer promises. After a kill of the previous daemon, only requests
of the handover are answered until everything that it held is taken over or given up.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from phaseloom.common.contract import checkpoints, state_agent, state_rank
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.state_rank import Done, StateMessage
from phaseloom.common.observability import metrics
from phaseloom.common.process.error_boundary import error_boundary
from phaseloom.common.transport.framing import MAX_FDS, Peer, close_fds
from phaseloom.statemgr.checkpoints.catalogue import Archives, Catalogue
from phaseloom.statemgr.checkpoints.exporting import Exporter
from phaseloom.statemgr.checkpoints.loading import Loader
from phaseloom.statemgr.handover.handover import Handover
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import DeviceCopies, VersionStore
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.versions import not_here
from phaseloom.statemgr.seals.replicating import Replicator
from phaseloom.statemgr.seals.sealing import Sealer
from phaseloom.statemgr.tiering.rankmemory import RankMemory
from phaseloom.statemgr.tiering.sharing import FrozenCopies
from phaseloom.statemgr.tiering.switching import Switcher
from phaseloom.statemgr.tiering.tiering import Tiering
from phaseloom.statemgr.transfer.fetching import Home
from phaseloom.statemgr.versions.weights import Publishing, Weights

log = logging.getLogger(__name__)

T = TypeVar("T")

HELLO_TIMEOUT_S = 10.0
"""Time allowed for a peer to prove its identity, and for the first agent to connect."""

Answer = tuple[StateMessage, Sequence[int]]
"""An answer and its descriptors."""


class Session:
    """One connection, and the identity that its peer has proved."""

    def __init__(self, peer: Peer[StateMessage]) -> None:
        self.peer = peer
        self.is_agent = False
        self.is_handing_over = False
        self.rank: Rank | None = None
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def greet(self) -> None:
        if not self.greeted.done():
            self.greeted.set_result(None)


@dataclass(frozen=True)
class Parts:
    """The parts of the daemon that answer requests."""

    ledger: Ledger
    records: Records
    memory: HostMemory
    background: Background
    ranks: Ranks
    versions: VersionStore
    device_copies: DeviceCopies
    tiering: Tiering
    frozen: FrozenCopies
    switcher: Switcher
    rank_memory: RankMemory
    publishing: Publishing
    weights: Weights
    sealer: Sealer
    replicator: Replicator
    exporter: Exporter
    loader: Loader
    catalogue: Catalogue
    archives: Archives
    begin_handover: Callable[[str], Handover]
    """Starts to take over the handles of this name, which the agent kept."""
    home: Home
    disk: state_agent.DiskPath


class StateManager:
    """Answers the agent and the ranks. `session` serves one connection."""

    def __init__(
        self,
        parts: Parts,
        *,
        secret: str,
        resume_timeout_s: float,
        serve_versions_at: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._ledger = parts.ledger
        self._records = parts.records
        self._residency = parts.records.residency
        self._ranks = parts.ranks
        self._agent_calls = self._calls_of_agents()
        self._rank_calls = self._calls_of_ranks()
        self._secret = secret
        self._resume_timeout_s = resume_timeout_s
        self._serve_versions_at = serve_versions_at
        self._num_agents = 0
        self._handover: Handover | None = None
        self._handover_is_known = asyncio.Event()
        """Set once the first agent has said that there is nothing to take over, or the records are
        rebuilt from its handles."""

    async def session(self, peer: Peer[StateMessage]) -> None:
        """Serve one connection until it ends.

        Raises: ResourceError: the agent left during the handover. This ends the daemon, and the
                next one starts the handover again.
        """
        session = Session(peer)

        async def handle(body: StateMessage, fds: list[int]) -> Answer:
            duplicates: list[int] = []
            async with self._ledger.change():
                with error_boundary(metrics.UNFORESEEN, "request"):
                    reply, reply_fds = await self._handle(session, body, fds)
                # Duplicated now: while the manifest is written, the memory may be dropped, and
                # another file may get the number of its descriptor.
                duplicates += map(os.dup, reply_fds)
            # The caller duplicates them before the loop runs this.
            asyncio.get_running_loop().call_soon(close_fds, duplicates)
            return reply, duplicates

        peer.handler = handle
        peer.start()
        either: list[asyncio.Future[Any]] = [session.greeted, peer.closed]
        await asyncio.wait(either, timeout=HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not session.greeted.done():
            if not peer.closed.done():
                log.warning("a peer did not identify itself within %.0f s", HELLO_TIMEOUT_S)
            return
        await asyncio.wait([peer.closed])
        if session.rank is not None:
            self._ranks.retire(session.rank.wpg, peer.closed.result())
        if session.is_agent:
            self._ledger.detach(peer)
            if session.is_handing_over:
                raise ResourceError("the agent left during the handover")
            self._num_agents -= 1
            if not self._num_agents:
                self._parts.sealer.abandon()
                self._parts.exporter.abandon()
        await peer.finish()

    async def _handle(self, session: Session, body: StateMessage, fds: list[int]) -> Answer:
        if (
            isinstance(body, state_agent.HandOver)
            and session.is_handing_over
            and self._handover is not None
        ):
            self._handover.accept(body.handles, fds)
            return Done(), ()
        if isinstance(body, state_rank.ShareOnDevice) and session.rank is not None:
            return self._share_on_device(session.rank, body, fds), ()
        close_fds(fds)
        greeted = await self._greet(session, body)
        if greeted is not None:
            return greeted, ()
        rank = session.rank
        if not session.is_agent and rank is None:
            raise _denied("say hello first")
        await self._ledger.settled.wait()
        if rank is not None:
            if rank.index and _is_leader_only(body):
                raise _denied(
                    f"only the first rank on a node makes versions and checkpoints, not {rank}"
                )
            if type(body) not in self._rank_calls:
                raise _unexpected("a rank", body)
            answer = await self._rank_calls[type(body)](rank, body)
        else:
            if type(body) not in self._agent_calls:
                raise _unexpected("an agent", body)
            answer = await self._agent_calls[type(body)](body)
        if isinstance(answer, tuple):
            return answer
        return answer or Done(), ()

    async def _greet(self, session: Session, body: StateMessage) -> StateMessage | None:
        """Answer a hello or a part of the handover, which may come before the node is settled;
        None: it is another message."""
        match body:
            case state_agent.AgentHello():
                return self._greet_agent(session, body)
            case state_rank.RankHello():
                return await self._greet_rank(session, body)
            case state_rank.RankResume():
                return await self._resume_rank(session, body)
            case state_agent.FinishHandover() if (
                session.is_handing_over and self._handover is not None
            ):
                return await self._finish_handover(session, self._handover)
        return None

    def _greet_agent(self, session: Session, hello: state_agent.AgentHello) -> state_agent.Welcome:
        if session.greeted.done() or not hmac.compare_digest(
            hello.secret.encode(), self._secret.encode()
        ):
            log.warning("refused an agent's hello")
            raise _denied("the secret is wrong, or this is a second hello")
        session.is_agent = True
        self._num_agents += 1
        session.greet()
        is_first = self._handover is None and not self._handover_is_known.is_set()
        if hello.index and is_first:
            self._handover = self._parts.begin_handover(hello.index)
            session.is_handing_over = True
            session.peer.max_fds = MAX_FDS
            return state_agent.Welcome(needs_handles=True)
        self._ledger.attach(session.peer)
        if is_first:
            self._handover_is_known.set()
            self._parts.background.start(self._settle())
        return state_agent.Welcome(needs_handles=False)

    async def _finish_handover(
        self, session: Session, handover: Handover
    ) -> state_agent.HandoverFinished:
        endpoint = await handover.restore(session.peer)
        if endpoint not in {"", self._parts.home.endpoint}:
            # Other nodes know the previous daemon's endpoint.
            self._serve_versions_at(endpoint)
        self._handover_is_known.set()
        lost = await handover.finish(self._resume_timeout_s)
        session.is_handing_over = False
        session.peer.max_fds = 0
        await self._settle()
        log.info("taken over from the previous daemon; lost: %s", lost or "nothing")
        return state_agent.HandoverFinished(lost)

    async def _settle(self) -> None:
        # Before anything can be demoted, because the sweep removes unknown files.
        await self._parts.tiering.sweep()
        self._ledger.settled.set()

    async def _greet_rank(self, session: Session, hello: state_rank.RankHello) -> Done:
        await self._until_handover_known()
        if self._handover is not None:
            self._handover.begin_again(hello.token)
        self._enter(session, self._residency.authenticate(hello.token))
        return Done()

    async def _resume_rank(self, session: Session, message: state_rank.RankResume) -> Done:
        await self._until_handover_known()
        if self._handover is None or session.greeted.done():
            raise _denied("nothing was taken over, or this is a second hello")
        # Verifying a large host copy may take longer than the hello timeout.
        session.greet()
        self._enter(session, await self._handover.resume(message))
        return Done()

    async def _until_handover_known(self) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._handover_is_known.wait()
        except TimeoutError:
            raise ResourceError("no agent has connected", remedy="connect again") from None

    def _enter(self, session: Session, rank: Rank) -> None:
        if session.rank is not None or session.is_agent or rank in self._ranks.connected:
            raise _denied(f"{rank} is already here, or this is a second hello")
        if session.peer.closed.done():
            self._ranks.retire(rank.wpg, session.peer.closed.result())
            raise ResourceError(f"{rank} has left")
        session.rank = rank
        session.peer.max_fds = int(rank.pins)
        self._ranks.connected[rank] = session.peer
        session.greet()

    def _calls_of_agents(self) -> dict[type, Callable[[Any], Awaitable[StateMessage | None]]]:
        parts, catalogue = self._parts, self._parts.catalogue
        return {
            state_agent.RegisterWpg: self._register_wpg,
            state_agent.SwitchIn: parts.switcher.switch_in,
            state_agent.SwitchOut: parts.switcher.switch_out,
            state_agent.PrepareSeal: parts.sealer.prepare,
            state_agent.WriteSeal: self._write_seal,
            state_agent.FetchState: parts.replicator.fetch,
            state_agent.DropWpg: self._drop_wpg,
            state_agent.Prefetch: self._prefetch,
            state_agent.DropVersions: lambda body: parts.weights.drop(body.versions),
            checkpoints.FindCheckpoints: _in_thread(catalogue.find),
            checkpoints.DescribeCheckpoint: _in_thread(catalogue.describe),
            checkpoints.SetExpiry: _in_thread(catalogue.set_expiry),
            checkpoints.EraseCheckpoint: _in_thread(catalogue.erase),
            checkpoints.FindExpired: _in_thread(catalogue.find_expired),
            checkpoints.OpenArchive: parts.archives.open,
            checkpoints.ReadArchivePart: parts.archives.read,
            state_agent.StatusRequest: self._status,
        }

    def _calls_of_ranks(
        self,
    ) -> dict[type, Callable[[Rank, Any], Awaitable[Answer | StateMessage | None]]]:
        parts, memory = self._parts, self._parts.rank_memory
        publishing, exporter, catalogue = parts.publishing, parts.exporter, parts.catalogue
        return {
            state_rank.RegisterHeap: memory.register_heap,
            state_rank.CommitInitial: memory.commit_initial,
            state_rank.BorrowMemory: memory.borrow,
            state_rank.ReturnMemory: memory.take_back,
            state_rank.CreateVersion: lambda rank, body: publishing.create(rank.wpg, body),
            state_rank.CommitVersion: lambda rank, body: publishing.commit(rank.wpg, body),
            state_rank.CommitParts: lambda rank, body: publishing.commit_parts(rank.wpg, body),
            state_rank.OpenVersion: self._open_version,
            state_rank.OpenOnDevice: self._open_on_device,
            state_rank.OpenSlices: self._open_slices,
            state_rank.HoldVersion: self._hold_version,
            state_rank.TakeSnapshot: exporter.take_snapshot,
            state_rank.WriteCheckpoint: exporter.write,
            state_rank.ReadCheckpoint: parts.loader.read,
            state_rank.OpenSaved: parts.loader.open_saved,
            state_rank.ReadSaved: parts.loader.read_saved,
            state_rank.PruneCheckpoints: _in_thread(catalogue.prune),
            state_rank.RemoveCheckpoint: _in_thread(catalogue.remove),
        }

    # --- versions ---

    async def _open_on_device(self, rank: Rank, body: state_rank.OpenOnDevice) -> Answer:
        fd = self._parts.device_copies.find(rank, body.version)
        return state_rank.OnDevice(fd is not None), [] if fd is None else [fd]

    async def _open_slices(self, rank: Rank, body: state_rank.OpenSlices) -> Answer:
        if not body.is_ahead:
            await self._parts.frozen.make_room(rank)
        return await self._parts.weights.open_slices(rank.wpg, body)

    async def _hold_version(self, rank: Rank, body: state_rank.HoldVersion) -> None:
        self._parts.frozen.hold_version(rank, body.version, body.applied)

    def _share_on_device(self, rank: Rank, body: state_rank.ShareOnDevice, fds: list[int]) -> Done:
        version = self._records.versions.find(body.version)
        if version is None or not version.is_committed:
            close_fds(fds)
            metrics.count(metrics.NOT_ON_DEVICE)
            raise not_here(body.version)
        if not self._parts.device_copies.keep(rank, version.key, version.num_bytes, fds):
            metrics.count(metrics.NOT_ON_DEVICE)
        return Done()

    async def _open_version(self, rank: Rank, body: state_rank.OpenVersion) -> Answer:
        answer = await self._parts.weights.open(rank.wpg, body)
        if body.is_ahead:
            return answer
        version = self._records.versions.find(body.version)
        assert version is not None
        # A part cannot be a host copy, so its reader needs memory for its next copy.
        copied = None if version.key.part else version
        with self._parts.versions.using(version):
            await self._parts.frozen.make_room(rank, copied)
        version.check_kept()
        return answer

    # --- the agent ---

    async def _write_seal(self, body: state_agent.WriteSeal) -> state_agent.Sealed:
        with metrics.timed(metrics.SEAL_DURATION, node=self._ledger.node):
            sealed = await self._parts.sealer.write(body)
            await self._parts.replicator.replicate(body)
            return sealed

    async def _prefetch(self, body: state_agent.Prefetch) -> None:
        wpg = self._residency.current(body.deployment, body.incarnation)
        self._parts.tiering.hint(wpg, body)

    async def _register_wpg(self, request: state_agent.RegisterWpg) -> None:
        replaced = self._residency.register(request)
        if replaced is not None:
            self._ranks.retire(replaced, f"fenced by incarnation {request.incarnation}")

    async def _drop_wpg(self, request: state_agent.DropWpg) -> None:
        key = request.deployment
        wpg = self._residency.drop(key, request.incarnation)
        if wpg is not None:
            self._ranks.retire(wpg, "dropped by the agent")
            await self._ledger.until(lambda: not self._residency.holds_memory(wpg))
            self._parts.versions.leave_job(key.job_key)
        if request.forget and self._residency.find(key) is None:
            self._parts.replicator.forget(key)
            self._parts.versions.forget(key)
            await self._parts.exporter.forget(key)
            await self._parts.sealer.forget(key)
            self._residency.forget(key)
            await self._parts.weights.leave_job(key.job_key)

    async def _status(self, _: state_agent.StatusRequest) -> state_agent.StatusReport:
        records, memory, residency = self._records, self._parts.memory, self._residency
        records.validate()
        memory.validate()
        memory.check_holders(records.extents())
        budgets = residency.device_budget_bytes
        owned_bytes, held_bytes = records.owned_bytes()
        return state_agent.StatusReport(
            device_budget_bytes=budgets,
            device_used_bytes=[residency.device_used_bytes(d) for d in range(len(budgets))],
            host_budget_bytes=memory.budget_bytes,
            host_used_bytes=memory.used_bytes,
            deployments=[
                replace(state, way=self._parts.tiering.describe_way(wpg))
                for state, wpg in zip(residency.deployments(), residency.alive(), strict=True)
            ],
            versions=records.versions.committed(),
            endpoint=self._parts.home.endpoint,
            disk=self._parts.disk,
            nvme_budget_bytes=self._parts.tiering.nvme_budget_bytes,
            nvme_used_bytes=records.host_copies.nvme_used_bytes(),
            version_states=records.versions.states(),
            shared_copies=records.host_copies.states(),
            owned_bytes=owned_bytes,
            held_bytes=held_bytes,
        )


def _is_leader_only(body: StateMessage) -> bool:
    """Whether only the first rank of a deployment here may send the message."""
    if isinstance(body, state_rank.CreateVersion | state_rank.CommitVersion):
        return not body.version.part
    return isinstance(
        body,
        state_rank.TakeSnapshot
        | state_rank.WriteCheckpoint
        | state_rank.PruneCheckpoints
        | state_rank.RemoveCheckpoint,
    )


def _in_thread(work: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    return lambda *args: asyncio.to_thread(work, *args)


def _denied(reason: str) -> CallerError:
    return CallerError(reason, code=Code.PERMISSION_DENIED)


def _unexpected(sender: str, body: StateMessage) -> CallerError:
    return CallerError(f"{sender} does not send {type(body).__name__}", field="type")
