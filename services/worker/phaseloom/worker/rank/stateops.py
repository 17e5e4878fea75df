"""The operations that move state, and what the leader, its ranks and the state managers each do."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from phaseloom.common.contract.api import Checkpoint
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import (
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.operations import (
    DeleteCheckpoint,
    DeleteCheckpointResult,
    LoadState,
    LoadStateResult,
    PublishWeights,
    PublishWeightsResult,
    SaveState,
    SaveStateResult,
    SyncWeights,
    SyncWeightsResult,
)
from phaseloom.common.contract.specs import ModelDirectory, ModelSpec
from phaseloom.common.contract.state_layout import VersionPart, VersionParts
from phaseloom.common.contract.state_rank import Failed
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.tensors.modelfiles import is_companion
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.retry import until_done
from phaseloom.worker.rank.calls import DeviceCall
from phaseloom.worker.rank.executor import Executor, OperationRefused, unavailable_error
from phaseloom.worker.rank.group import GroupLost, WpgRanks
from phaseloom.worker.rank.outcomes import Outcomes
from phaseloom.worker.rank.weightsync import FetchedVersion, RankWeights, or_failed
from phaseloom.worker.rank.wire import PartWritten, RankConfig, RunShare, ShareResult
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.lastcheckpoint import last_checkpoint, needed_error
from phaseloom.worker.state.versions import VersionCopy

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class StateOperations:
    settings: RankConfig
    bus: Bus
    state: RankStateClient
    executor: Executor
    ranks: WpgRanks
    outcomes: Outcomes
    weights: RankWeights = field(init=False)
    _synced: SyncWeightsResult | None = None
    """The result of the last `sync_weights`."""
    _fallback: str = ""
    """This deployment's checkpoint in the job's last but one checkpoint. A controller that attached
    just before the last save may still load it."""

    def __post_init__(self) -> None:
        self.weights = RankWeights(self.settings, self.state.versions, self.executor)

    async def publish(self, call: DeviceCall, args: PublishWeights) -> PublishWeightsResult:
        """Run a `publish_weights`.

        Raises: OperationRefused: nothing was published. RanksDiverged: only some of the ranks have
                 published.
        """
        seq = call.key.seq
        assert seq is not None
        version = VersionKey(self.settings.deployment, seq)
        try:
            copy = await self._write_version(call, args, version)
        except PhaseloomError as error:
            raise OperationRefused(error.info) from error
        return PublishWeightsResult(seq, copy.digest, copy.num_bytes)

    async def _write_version(
        self, call: DeviceCall, args: PublishWeights, version: VersionKey
    ) -> VersionCopy:
        """Write this deployment's weights as a version.

        Raises: PhaseloomError: nothing was written. RanksDiverged: only some of the ranks have
                 written.
        """
        weights = self.weights
        await self.ranks.on_device_thread(lambda: self.executor.check_publish(args))
        if self.ranks.is_alone:
            return await self.state.versions.create(version, self.executor.weight_slots)
        local_part, peer_results = await self._prepare_all(weights.write(version), call)
        parts = [
            local_part,
            *(result.part for result in peer_results if isinstance(result, PartWritten)),
        ]
        manifest = weights.manifest(parts) if weights.is_in_parts else None
        share = replace(state_share(call), manifest=manifest)
        copy, _ = await self.ranks.together(self._commit(version, local_part, manifest), share)
        return copy

    async def _commit(
        self, version: VersionKey, local_part: VersionPart | None, manifest: VersionParts | None
    ) -> VersionCopy:
        if manifest is not None:
            return await self.state.versions.commit_parts(version, manifest)
        assert local_part is not None
        return VersionCopy(local_part.digest, local_part.num_bytes, is_new=True)

    async def _prepare_all(
        self, local: Awaitable[T], call: DeviceCall
    ) -> tuple[T, list[ShareResult]]:
        """Run the first call, in which all ranks prepare and nothing changes; return their results.

        Raises: PhaseloomError: a rank could not prepare. RanksDiverged.
        """
        return await self._run_fallible(local, replace(state_share(call), prepares=True))

    async def _on_all_nodes(self, local: Awaitable[None], call: DeviceCall) -> None:
        """Have each node's state manager act for the ranks of its node.

        Raises: PhaseloomError: one of them failed. RanksDiverged.
        """
        if self.settings.is_over_nodes:
            await self._prepare_all(local, call)
        else:
            await local

    async def _run_fallible(
        self, local: Awaitable[T], share: RunShare
    ) -> tuple[T, list[ShareResult]]:
        """Run a call in which a rank may fail without harming the others; return their results.

        Raises: PhaseloomError: one of them failed. RanksDiverged.
        """
        local_result, shares = await self.ranks.together(or_failed(local), share)
        peer_results = [results[0] for results in shares]
        if isinstance(local_result, Failed):
            raise to_exception(local_result.error)
        for peer_result in peer_results:
            if isinstance(peer_result, Failed):
                raise to_exception(peer_result.error)
        return local_result, peer_results

    async def sync(self, call: DeviceCall, args: SyncWeights) -> SyncWeightsResult:
        """Run a `sync_weights`.

        Raises: OperationDeferred, OperationRefused: nothing was written. Any other error: it failed
                 half-way.
        """
        deployment = self.settings.deployment
        version = VersionKey(
            DeploymentKey(deployment.tenant, deployment.job, args.policy), args.version
        )
        try:
            with self.executor.syncing(args):
                fetched = await self._read_version(call, version)
        except PhaseloomError as error:
            raise unavailable_error(error.info) from error
        assert call.key.seq is not None
        # The weights are replaced now, so an error from here on invalidates the incarnation.
        if fetched.is_whole:
            await self.state.versions.hold(version, call.key.seq)
        previous, self._synced = self._synced, SyncWeightsResult(args.version, fetched.digest)
        if previous is not None and previous.digest == fetched.digest:
            reason = f"version {args.version} has the same weights as version {previous.version}"
            await self.outcomes.notice("sync changed nothing", reason, call.key)
        return self._synced

    async def _read_version(self, call: DeviceCall, version: VersionKey) -> FetchedVersion:
        """Fetch a version and replace all ranks' weights with it.

        Raises: PhaseloomError: nothing was written. Any other error: it failed half-way.
        """
        weights, permit = self.weights, call.permit
        if self.ranks.is_alone:
            return await weights.load(version, permit)
        fetched, _ = await self._prepare_all(weights.fetch(version, permit), call)
        await self.ranks.together(weights.apply(fetched), state_share(call))
        return fetched

    async def save(
        self, call: DeviceCall, args: SaveState, free_devices: Callable[[], Awaitable[None]]
    ) -> SaveStateResult:
        """Run a `save_state`: copy the state while the devices wait, then write it while they
        continue.

        If a WPG spans several nodes, each node's state manager copies its part, and rank 0's state
        manager combines them into one checkpoint.
        Args:   free_devices: called between the copy and the writing.
        Raises: OperationRefused: the state was read only. GroupLost: this incarnation is ending.
        """
        permit, operation = call.permit, call.operation.id
        clock_s = time.perf_counter()
        config = json.dumps(self.executor.backend.config, indent=2, sort_keys=True)
        try:
            if args.overwrite:
                # The job may fall back to this checkpoint and the blob that its controller saved.
                last = await self._last_checkpoint()
                is_own = last is not None and (last.deployment, str(last.seq)) == (
                    call.key.deployment,
                    call.key.slot,
                )
                if not is_own and args.name in await self._needed():
                    raise needed_error(args.name)
            await self._on_all_nodes(
                self.state.take_snapshot(
                    operation, args.name, self.executor.applied, overwrite=args.overwrite
                ),
                call,
            )
            call.duration_s = time.perf_counter() - clock_s
            await free_devices()
            if self.settings.is_over_nodes:
                await self._run_fallible(asyncio.sleep(0), state_share(call))
            sha256 = await self.state.write_checkpoint(
                operation,
                args.name,
                config,
                args.keep,
                _companions(self.settings.spec.model),
                ttl_s=args.ttl_s,
                overwrite=args.overwrite,
                model=self.settings.spec.model.registered,
                adapter=self.settings.spec.model.adapter,
            )
        except PhaseloomError as error:
            if error.info.code is Code.ABORTED:
                # The agent is gone, and with it the snapshot; this rank will end soon.
                raise GroupLost from error
            raise OperationRefused(error.info) from error
        deployment = self.settings.deployment
        result = SaveStateResult(f"{deployment.job}/{deployment.deployment}/{args.name}", sha256)
        if args.controller_blob:
            result = replace(result, checkpoints=await self._put_checkpoint(permit, args))
        return result

    async def prune(self, args: SaveState) -> None:
        """Remove old checkpoints that the job no longer needs. Failures are only logged."""
        try:
            needed = {args.name, *await self._needed()}
            await self.state.prune_checkpoints(args.keep, sorted(needed))
        except PhaseloomError as error:
            log.warning("old checkpoints of %s not removed: %s", self.settings.deployment, error)

    async def delete(self, args: DeleteCheckpoint) -> DeleteCheckpointResult:
        """Run a `delete_checkpoint`.

        Raises: OperationRefused: the checkpoint is needed, or cannot be removed.
        """
        try:
            if args.name in await self._needed():
                raise needed_error(args.name)
            return DeleteCheckpointResult(await self.state.remove_checkpoint(args.name))
        except PhaseloomError as error:
            raise OperationRefused(error.info) from error

    async def _needed(self) -> set[str]:
        """The names of this deployment's checkpoints that the job may fall back to."""
        last, deployment = await self._last_checkpoint(), self.settings.deployment
        needed = {self._fallback} - {""}
        if last is not None and deployment.deployment in last.checkpoints:
            needed.add(last.checkpoints[deployment.deployment])
        return needed

    async def _last_checkpoint(self) -> Checkpoint | None:
        return await last_checkpoint(self.bus, self.settings.deployment.job_key)

    async def load(self, call: DeviceCall, args: LoadState) -> LoadStateResult:
        """Run a `load_state`.

        Raises: OperationRefused: nothing was changed. Any other error: it failed half-way.
        """
        try:
            expected = await self.state.read_checkpoint(
                args.name,
                args.source,
                optimizer=args.optimizer,
                load=call.operation.id,
                adapter_config=self.executor.adapter_config,
                locate=self.executor.locate,
            )
        except PhaseloomError as error:
            raise OperationRefused(error.info) from error
        # This node's state is already replaced, so a failure on another node cannot be undone.
        await self._on_all_nodes(asyncio.sleep(0), call)
        loaded, _ = await self.ranks.on_all_ranks(
            lambda: self.executor.compute(args), state_share(call)
        )
        assert isinstance(loaded, LoadStateResult)
        if expected not in {"", loaded.weights_sha256}:
            raise ResourceError(
                f"checkpoint {args.name!r}: expected weights {expected}, loaded "
                f"{loaded.weights_sha256}",
                code=Code.DATA_LOSS,
            )
        return loaded

    async def _put_checkpoint(self, permit: Permit, args: SaveState) -> dict[str, str]:
        """Record the checkpoint as the job's last one, before DONE reports it."""
        key = permit.operation
        checkpoints = {**args.checkpoints, key.deployment: args.name}
        checkpoint = Checkpoint(key.deployment, key.seq or 0, checkpoints, args.controller_blob)
        value, kv_key = encode(checkpoint), str(key.job_key)
        previous = await self._last_checkpoint()
        if previous is not None and previous != checkpoint:
            self._fallback = previous.checkpoints.get(key.deployment, "")
        await until_done(
            lambda: self.bus.keys.put(Bucket.CHECKPOINTS, kv_key, value), "store the checkpoint"
        )
        return checkpoints


def _companions(model: ModelSpec) -> ModelDirectory | None:
    """The companion files that a registered model's checkpoints include, such as tokenizer and
    generation config; None: the model is not a registered one."""
    if model.pinned is None:
        return None
    files = [file for file in model.pinned.files if is_companion(file.name)]
    return replace(model.pinned, files=files)


def state_share(call: DeviceCall) -> RunShare:
    return RunShare([call.payload], call.permit, call.traceparent)
