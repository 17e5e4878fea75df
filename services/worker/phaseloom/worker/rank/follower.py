"""A rank other than the leader: it runs its part of each call that the leader makes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, OperationKey, VersionKey
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.contract.operations import (
    Args,
    DrawnTokens,
    Generate,
    GenerateResult,
    LoadState,
    Operation,
    PublishWeights,
    SaveState,
    SyncWeights,
)
from phaseloom.common.contract.state_rank import Failed
from phaseloom.common.observability import telemetry
from phaseloom.common.observability.substages import StepRecord
from phaseloom.common.transport.framing import Peer
from phaseloom.worker.backends.base import Version
from phaseloom.worker.core.permits import CancelledOperations
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.group import WpgRanks
from phaseloom.worker.rank.namedweights import WeightsReader
from phaseloom.worker.rank.tails import TailMonitor
from phaseloom.worker.rank.watches import ShareWatch
from phaseloom.worker.rank.weightsync import FetchedVersion, RankWeights, or_failed
from phaseloom.worker.rank.wire import (
    CancelRun,
    Generated,
    PartWritten,
    RankConfig,
    RankMessage,
    RunShare,
    ShareDone,
    ShareResult,
    StopShare,
    TailReached,
    TokensDrawn,
)
from phaseloom.worker.state.client import RankStateClient


class TokenSender:
    """Sends a rank's new tokens to the leader, in order.

    Ranks on other nodes send none; the leader gets their tokens with the result.
    """

    def __init__(self, agent: Peer[RankMessage], *, is_near_leader: bool) -> None:
        self._agent = agent
        self._is_near_leader = is_near_leader
        self._loop = asyncio.get_running_loop()
        self._last_send: asyncio.Task[None] | None = None

    def send_threadsafe(self, key: OperationKey, tokens: list[DrawnTokens]) -> None:
        if self._is_near_leader:
            self._loop.call_soon_threadsafe(self._send, TokensDrawn(key, tokens))

    async def drain(self) -> None:
        """Wait until the leader has received all tokens."""
        if self._last_send is not None:
            await self._last_send

    def _send(self, message: TokensDrawn) -> None:
        previous = self._last_send

        async def send() -> None:
            if previous is not None:
                await previous
            with contextlib.suppress(PhaseloomError):  # the agent or the leader is gone
                await self._agent.call(message)

        self._last_send = asyncio.ensure_future(send())


@dataclass(slots=True)
class Follower:
    settings: RankConfig
    state: RankStateClient
    executor: Executor
    ranks: WpgRanks
    weights: RankWeights = field(init=False)
    named: WeightsReader = field(init=False)
    _version: Version | None = None
    """The weights read in advance for the next share, whose whole call reads with them."""
    _fetched: FetchedVersion | None = None
    """The version fetched for a `sync_weights`, kept until all ranks have fetched theirs."""
    _cancelled: CancelledOperations = field(default_factory=CancelledOperations)
    _generating: ShareWatch | None = None
    _tail_report: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.weights = RankWeights(self.settings, self.state.versions, self.executor)
        self.named = WeightsReader(self.state, self.executor)

    def cancel(self, cancel: CancelRun) -> None:
        self._cancelled.add(cancel.operation, keeps_partial=cancel.keeps_partial)

    async def run(self, share: RunShare) -> ShareDone:
        """Run this rank's part of a call.

        Raises: the error that it failed with; the WPG cannot continue then.
        """
        started_s = time.time()
        operations: list[Operation] = [
            decode(o.payload, Operation, o.content_type) for o in share.operations
        ]
        results = await self._results(share, operations)
        permit, key = share.permit, share.permit.operation
        if permit.kind in MUTATING_KINDS and not (share.zero_gradients or share.prepares):
            assert key.seq is not None
            self.executor.applied = key.seq
        telemetry.record(
            "execute",
            started_s,
            time.time(),
            telemetry.extract({"traceparent": share.traceparent} if share.traceparent else {}),
            tenant=key.tenant,
            job=key.job,
            deployment=key.deployment,
            seq=key.slot,
            kind=permit.kind,
            node=self.settings.node,
            device=self.settings.device,
            epoch=permit.epoch,
        )
        return ShareDone(results)

    async def _results(self, share: RunShare, operations: list[Operation]) -> list[ShareResult]:
        backend, args = self.executor.backend, [operation.args for operation in operations]
        first = args[0]
        if share.zero_gradients:
            await self.ranks.on_device_thread(backend.zero_gradients)
            return [None]
        match first:
            case Generate() if not share.prepares:
                requests = [a for a in args if isinstance(a, Generate)]
                return await self._generate(requests, share)
            case SaveState():
                return [await or_failed(self._save(operations[0].id, first, share))]
            case PublishWeights() | SyncWeights():
                return [await self._move_state(first, share)]
            case LoadState() if share.prepares:
                return [await or_failed(self._load(operations[0].id, first))]
            case _:
                compute = self._prepare_named if share.prepares else self._compute
                return [await compute(first, share)]

    async def _compute(self, args: Args, share: RunShare) -> ShareResult:
        (named,) = await self._named_weights([args], share)
        if isinstance(named, Failed):
            return named
        return await self.ranks.on_device_thread(lambda: self.executor.compute(args, named))

    async def _named_weights(
        self, args: list[Args], share: RunShare
    ) -> list[Version | Failed | None]:
        """The weights that each operation of a share names, or the reason why they are
        unavailable."""
        prepared, self._version = self._version, None
        if prepared is not None and {*share.weights} == {prepared.name}:
            return [prepared] * len(args)
        return await self._read(args, share)

    async def _prepare_named(self, args: Args, share: RunShare) -> ShareResult:
        """Read the weights that the next share names, or drop those that were read."""
        self._version = None
        if share.gives_up:
            return None
        (read,) = await self._read([args], share)
        if isinstance(read, Failed):
            return read
        self._version = read
        return None

    async def _read(self, args: list[Args], share: RunShare) -> list[Version | Failed | None]:
        permits = share.naming or (None,) * len(args)
        names = share.weights or ("",) * len(args)

        async def read(args: Args, permit: Permit | None, name: str) -> Version | None:
            version = await self.named.read(args, permit)
            if version is not None and version.name != name:
                raise ResourceError(
                    f"checkpoint {name} was overwritten while the ranks read it",
                    remedy="the operation is retried automatically",
                )
            return version

        arguments = zip(args, permits, names, strict=True)
        return [await or_failed(read(*argument)) for argument in arguments]

    async def _generate(self, requests: list[Generate], share: RunShare) -> list[ShareResult]:
        named = await self._named_weights([*requests], share)
        results: list[ShareResult] = [
            version if isinstance(version, Failed) else None for version in named
        ]
        runs = [i for i, version in enumerate(named) if not isinstance(version, Failed)]
        if runs:
            ran = await self._generate_some(runs, requests, named, share)
            for i, (result, record) in zip(runs, ran, strict=True):
                results[i] = None if result is None else Generated(result, record.runs)
        return results

    async def _generate_some(
        self,
        runs: list[int],
        requests: list[Generate],
        named: list[Version | Failed | None],
        share: RunShare,
    ) -> list[tuple[GenerateResult | None, StepRecord]]:
        """Run this rank's part of some of the share's operations. Args: runs: their indices."""
        parts = self.executor.part(requests, share.replicas)
        firsts = self.executor.first_prompts(requests, share.replicas)
        part = [parts[i] for i in runs]
        sender = TokenSender(self.ranks.agent, is_near_leader=self.settings.is_near_leader)
        keys = [share.operations[i].operation for i in runs]
        watch = ShareWatch(self._cancelled, keys, sender.send_threadsafe)
        watch.first_prompts = [firsts[i] for i in runs]
        watch.versions = [
            version for version in (named[i] for i in runs) if not isinstance(version, Failed)
        ]
        if share.tail_share:
            loop = asyncio.get_running_loop()
            message = TailReached(share.operations[0].operation, self.settings.rank)

            def send_report() -> None:
                loop.call_soon_threadsafe(self._report_tail, message)

            watch.tail = TailMonitor(part, share.tail_share, send_report)
        self._generating = watch

        def generate() -> None:
            with self.executor.reading(watch.call_version):
                self.executor.backend.generate(part, watch)

        try:
            await self.ranks.on_device_thread(generate)
        finally:
            self._generating = None
            await sender.drain()
        return [*zip(watch.results, watch.records, strict=True)]

    def _report_tail(self, message: TailReached) -> None:
        async def send_report() -> None:
            with contextlib.suppress(PhaseloomError):  # the agent or the leader is gone
                await self.ranks.agent.call(message)

        self._tail_report = asyncio.ensure_future(send_report())

    def stop(self, share: StopShare) -> None:
        """Stop a running share, which ends with the tokens that it has."""
        if self._generating is not None and self._generating.first_operation == share.operation:
            self._generating.stop()

    async def _move_state(self, args: PublishWeights | SyncWeights, share: RunShare) -> ShareResult:
        match args:
            case _ if share.prepares:
                return await or_failed(self._prepare(args, share.permit))
            case PublishWeights() if share.manifest is not None and self.settings.is_first_here:
                # One rank per node commits; on the leader's node, the leader does it.
                version = self._published(share.permit)
                await self.state.versions.commit_parts(version, share.manifest)
            case SyncWeights():
                fetched, self._fetched = self._fetched, None
                seq = share.permit.operation.seq
                assert fetched is not None
                assert seq is not None
                with self.executor.syncing(args):
                    await self.weights.apply(fetched)
                    if fetched.is_whole:
                        await self.state.versions.hold(fetched.version, seq)
        return None

    async def _save(self, operation: str, args: SaveState, share: RunShare) -> None:
        """Have this node's state manager copy its ranks' state, or write the copy.

        Raises: PhaseloomError: it failed.
        """
        if not self.settings.is_first_here:
            return
        if share.prepares:
            await self.state.take_snapshot(
                operation, args.name, self.executor.applied, overwrite=args.overwrite
            )
        else:
            await self.state.write_checkpoint(
                operation, args.name, "", args.keep, overwrite=args.overwrite
            )

    async def _load(self, operation: str, args: LoadState) -> None:
        """Have this node's state manager read the checkpoint. Raises: PhaseloomError: it failed."""
        if self.settings.is_first_here:
            await self.state.read_checkpoint(
                args.name,
                args.source,
                optimizer=args.optimizer,
                load=operation,
                adapter_config=self.executor.adapter_config,
                locate=self.executor.locate,
            )

    async def _prepare(
        self, args: PublishWeights | SyncWeights, permit: Permit
    ) -> PartWritten | None:
        """Run this rank's part of the first call, which changes nothing. Raises: PhaseloomError."""
        self._fetched = None
        if isinstance(args, PublishWeights):
            await self.ranks.on_device_thread(lambda: self.executor.check_publish(args))
            return PartWritten(await self.weights.write(self._published(permit)))
        deployment = self.settings.deployment
        version = VersionKey(
            DeploymentKey(deployment.tenant, deployment.job, args.policy), args.version
        )
        self._fetched = await self.weights.fetch(version, permit)
        return None

    def _published(self, permit: Permit) -> VersionKey:
        assert permit.operation.seq is not None
        return VersionKey(self.settings.deployment, permit.operation.seq)
