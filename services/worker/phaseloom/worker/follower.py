"""A rank that is not the leader: does its part of each call that the leader makes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from phaseloom.common import telemetry
from phaseloom.common.codec import decode
from phaseloom.common.ids import DeploymentKey, OperationKey, VersionKey
from phaseloom.common.messages import (
    MUTATING_KINDS,
    Args,
    Generate,
    Operation,
    Permit,
    PublishWeights,
    Result,
    SyncWeights,
)
from phaseloom.worker.core.permits import Cancelled
from phaseloom.worker.executor import Executor
from phaseloom.worker.ranks import Ranks
from phaseloom.worker.rankwire import RankConfig, RunShare, ShareDone
from phaseloom.worker.stateclient import RankStateClient


@dataclass(slots=True)
class Follower:
    settings: RankConfig
    state: RankStateClient
    executor: Executor
    ranks: Ranks
    _cancelled: Cancelled = field(default_factory=Cancelled)

    def cancel(self, operation: OperationKey) -> None:
        self._cancelled.add(operation)

    async def run(self, share: RunShare) -> ShareDone:
        """Raises: what its part failed with; the WPG cannot go on then."""
        started_s = time.time()
        args = [decode(o.payload, Operation, o.content_type).args for o in share.operations]
        results = await self._results(share, args)
        permit, key = share.permit, share.permit.operation
        if permit.kind in MUTATING_KINDS and not share.zero_gradients:
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

    async def _results(self, share: RunShare, args: list[Args]) -> list[Result | None]:
        backend, (first, *_) = self.executor.backend, args
        if share.zero_gradients:
            await self.ranks.here(backend.zero_gradients)
            return [None]
        match first:
            case Generate():
                requests = [a for a in args if isinstance(a, Generate)]
                watch = _Watch(self._cancelled, [o.operation for o in share.operations])
                return list(await self.ranks.here(lambda: self.executor.generate(requests, watch)))
            case PublishWeights():
                await self.ranks.here(lambda: backend.write_weights(None))
                return [None]
            case SyncWeights():
                await self._sync(first, share.permit)
                return [None]
            case _:
                return [await self.ranks.here(lambda: self.executor.compute(first))]

    async def _sync(self, args: SyncWeights, permit: Permit) -> None:
        own, backend = self.settings.deployment, self.executor.backend
        version = VersionKey(DeploymentKey(own.tenant, own.job, args.policy), args.version)
        buffer, _ = await self.state.open_version(
            version, permit.sources, backend.version_slots, permit.ticket
        )
        await self.ranks.here(lambda: backend.read_weights(buffer))
        assert permit.operation.seq is not None
        await self.state.hold_version(version, permit.operation.seq)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Progress is told by the leader alone, of its own share."""

    cancelled: Cancelled
    operations: list[OperationKey]

    def is_cancelled(self, i: int) -> bool:
        return self.operations[i] in self.cancelled

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        """The leader tells its own."""
