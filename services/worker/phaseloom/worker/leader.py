"""The leader of a WPG: from a permit to a stored outcome.

Normal order of an operation: check (incarnation, `prev`, DONE absent) → read the payload from the
operation stream → run → write DONE, first writer wins → append OperationFinished. DONE is the
outcome; everything after it may be done again. Dedup of effects is by (incarnation, seq): in one
life a mutating operation runs once, because the scheduler permits it once and `prev` must match.

Reading operations are permitted side by side and wait in the `DeviceQueue`; a mutating one comes
alone. What the bus does not answer is asked again: a restart of its server costs time only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import nats.errors
from msgspec.structs import replace
from opentelemetry.context import Context

from phaseloom.common import streams, telemetry
from phaseloom.common.arrays import as_lists
from phaseloom.common.bus import AlreadyStored, Bus, Stored
from phaseloom.common.codec import (
    CONTENT_TYPE,
    JSON,
    MSGPACK,
    content_type_of,
    decode,
    encode,
)
from phaseloom.common.errors import (
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
    to_exception,
    unforeseen,
)
from phaseloom.common.gathering import Gathering
from phaseloom.common.ids import DeploymentKey, OperationKey, VersionKey
from phaseloom.common.messages import (
    MUTATING_KINDS,
    Checkpoint,
    CommandId,
    Completion,
    Event,
    LoadState,
    LoadStateResult,
    Operation,
    OperationFinished,
    OperationsFinished,
    OptimStep,
    Outcome,
    Permit,
    PermitReturned,
    Progress,
    PublishWeights,
    PublishWeightsResult,
    Result,
    SaveState,
    SaveStateResult,
    StateCut,
    SyncWeights,
    SyncWeightsResult,
    checkpoints_of,
)
from phaseloom.common.statewire import Failed, VersionPart, VersionParts
from phaseloom.common.streams import Bucket
from phaseloom.worker.core.tokens import num_tokens
from phaseloom.worker.device import Call, DeviceQueue
from phaseloom.worker.executor import Executor, Refused
from phaseloom.worker.patience import until_answered
from phaseloom.worker.ranks import Broken, GroupLost, Ranks
from phaseloom.worker.rankwire import (
    PartWritten,
    Payload,
    RankConfig,
    RunPermits,
    RunsApart,
    RunShare,
    ShareResult,
)
from phaseloom.worker.stateclient import RankStateClient, VersionCopy
from phaseloom.worker.weightsync import Brought, RankWeights, or_failed

log = logging.getLogger(__name__)

T = TypeVar("T")

PROGRESS_S = 0.5
"""Between two words on how far a `generate` is."""

GATHER_S = 0.005
"""So long at most the word of an operation's end waits for that of others that run beside it."""

_AWAY = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})
"""How a weights version's source fails that is restarted, or that the network hides."""

MAX_OUTCOME_BYTES = streams.MAX_PAYLOAD_BYTES - 65_536
"""Room is left for headers."""
_TOO_LARGE = ErrorInfo(
    Code.RESOURCE_EXHAUSTED,
    "the result is too large for one message",
    remedy="send fewer samples at once; as MessagePack it is smaller than as JSON",
)
_CANCELLED = ErrorInfo(Code.ABORTED, "it was cancelled")
_PARTIAL = ErrorInfo(
    Code.FAILED_PRECONDITION,
    "a forward_backward since the last optim_step was not completed: the gradients, which were of "
    "a part of the batch, are dropped",
    remedy="send the batch again, or step with allow_partial",
)


@dataclass(slots=True)
class _Ran:
    completion: Completion
    started_unix_s: float
    duration_s: float
    is_dirty: bool = False
    """The state is now one that no operation made."""
    broken: Broken | None = None
    """The ranks cannot go on together."""
    num_tokens: int = 0
    saved: SaveState | None = None
    """Where it is durable now."""


@dataclass(frozen=True, slots=True)
class _Finished:
    event: OperationFinished
    msg_id: str


@dataclass(slots=True)
class _Company:
    """Permits that came together."""

    first: CommandId
    here: set[OperationKey]
    """They need devices or state still."""
    has_saves: bool


class _NotNow(Exception):
    """What the operation needs cannot be reached; nothing was changed."""

    def __init__(self, error: ErrorInfo) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class Leader:
    settings: RankConfig
    bus: Bus
    state: RankStateClient
    executor: Executor
    ranks: Ranks
    queue: DeviceQueue
    _reading: set[OperationKey] = field(default_factory=set)
    """Reading operations that run on the devices."""
    _unended: set[OperationKey] = field(default_factory=set)
    """Permitted, and about to end or to run for long."""
    weights: RankWeights = field(init=False)
    _finished: Gathering[_Finished, None] = field(init=False)
    _synced: SyncWeightsResult | None = None
    """Of the last `sync_weights`."""
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One `save_state` at a time: each takes as much host memory as the state, and what the job
    falls back to must be the last."""
    _fallback: str = ""
    """This deployment's in what the job fell back to before its last checkpoint: a controller that
    attached just then may load it yet."""
    _loaded: set[str] = field(default_factory=set)
    """Checkpoints that this life's state came from: a rebuild may have to load them again."""

    def __post_init__(self) -> None:
        if self.settings.checkpoint:
            self._loaded.add(self.settings.checkpoint)
        self.weights = RankWeights(self.settings, self.state, self.executor)
        self._finished = Gathering(self._append, lambda: bool(self._unended), GATHER_S)

    async def run(self, given: RunPermits) -> None:
        """Returns once every outcome is stored and in the decision log, or its permit's return is.

        Raises: ResourceError: a permit is not for this rank's state, nothing happened; or the ranks
                cannot go on, whatever is stored.
        """
        operations = [permit.operation for permit in given.permits]
        self._unended.update(operations)
        dones, payloads = await asyncio.gather(
            self._get_all(streams.DONE, [streams.done_subject(key) for key in operations]),
            self._get_all(
                streams.ops_stream(self.settings.deployment.tenant),
                [streams.op_subject(key) for key in operations],
            ),
        )
        traceparents = given.traceparents or [""] * len(operations)
        has_saves = any(permit.kind == "save_state" for permit in given.permits)
        company = _Company(given.permits[0].id, set(operations), has_saves)
        runs = [
            self._run_one(permit, traceparent, done, payload, company)
            for permit, traceparent, done, payload in zip(
                given.permits, traceparents, dones, payloads, strict=True
            )
        ]
        try:
            if len(runs) == 1:
                await runs[0]
            else:
                await asyncio.gather(*runs)
        except GroupLost as lost:
            raise ResourceError(f"the ranks have lost one another: {lost.__cause__}") from lost

    async def _run_one(
        self,
        permit: Permit,
        traceparent: str,
        stored: Stored | None,
        payload: Stored | None,
        company: _Company,
    ) -> None:
        parent = telemetry.extract({"traceparent": traceparent} if traceparent else {})
        # What is logged on the way belongs to the operation's trace.
        with telemetry.within(parent):
            try:
                is_save = permit.kind == "save_state"
                async with self._saving if is_save else contextlib.nullcontext():
                    await self._run_permit(
                        permit, traceparent, parent, stored, payload, company=company
                    )
                await self._is_apart(permit.operation, company)
            finally:
                self._unended.discard(permit.operation)

    async def _run_permit(
        self,
        permit: Permit,
        traceparent: str,
        parent: Context,
        stored: Stored | None,
        payload: Stored | None,
        *,
        company: _Company,
    ) -> None:
        done = _decoded(stored)
        if done is not None and not _is_to_run_again(permit, done):
            await self._append_finished(permit, done, parent)
            return
        self._check_order(permit)
        is_reading = permit.kind not in MUTATING_KINDS
        if is_reading:
            self._reading.add(permit.operation)
        try:
            ran = await self._execute(permit, payload, traceparent, company)
        except _NotNow as later:
            await self._return(permit, later.error)
            return
        finally:
            self._reading.discard(permit.operation)
        if not is_reading and self.queue.is_cancelled(permit.operation):
            await self._notice("cancel ignored", "it mutates, and ran", permit.operation)
        await self._tell(permit, payload, done, ran, parent)
        if ran.saved is not None and ran.saved.keep:
            await self._prune(ran.saved)
        if ran.broken is not None:
            raise ResourceError(f"the ranks cannot go on together: {ran.broken.__cause__!r}")

    def cancel(self, operation: OperationKey) -> None:
        self.queue.cancel(operation)

    def _check_order(self, permit: Permit) -> None:
        if permit.kind not in MUTATING_KINDS:
            return
        if permit.prev != self.executor.applied:
            raise ResourceError(
                f"{permit.operation} comes after {permit.prev}, this state is at "
                f"{self.executor.applied}",
                code=Code.FAILED_PRECONDITION,
            )
        if self._reading:
            raise ResourceError(
                f"{permit.operation} would change what {len(self._reading)} operations read",
                code=Code.FAILED_PRECONDITION,
            )

    async def _get_all(self, stream: str, subjects: list[str]) -> list[Stored | None]:
        stored = await until_answered(lambda: self.bus.get_all_stored(stream, subjects))
        return [stored.get(subject) for subject in subjects]

    # --- running --------------------------------------------------------------------------------

    async def _execute(
        self, permit: Permit, payload: Stored | None, traceparent: str, company: _Company
    ) -> _Ran:
        started_s, clock_s = time.time(), time.perf_counter()
        try:
            call = self._call(permit, payload, traceparent)
        except PhaseloomError as error:
            return _Ran(_failed(permit, error.info), started_s, time.perf_counter() - clock_s)
        ran = await self._outcome(call, company)
        if not ran.duration_s:
            ran.started_unix_s, ran.duration_s = started_s, time.perf_counter() - clock_s
        return ran

    async def _outcome(self, call: Call, company: _Company) -> _Ran:
        permit, args = call.permit, call.operation.args
        is_mutating = permit.kind in MUTATING_KINDS

        def ended(completion: Completion, **more: Any) -> _Ran:
            return _Ran(completion, call.started_unix_s, call.duration_s, **more)

        try:
            if isinstance(args, OptimStep) and permit.partial and not args.allow_partial:
                self.executor.check(args)
                await self._zero_gradients(call)
                return ended(_failed(permit, _PARTIAL))
            result = await self._run(call, company)
        except (_NotNow, GroupLost):
            raise
        except Refused as refused:
            return ended(_failed(permit, refused.error))
        except Broken as broken:
            error = _info(permit, broken.__cause__ or broken)
            return ended(_failed(permit, error), is_dirty=is_mutating, broken=broken)
        except Exception as error:
            return ended(_failed(permit, _info(permit, error)), is_dirty=is_mutating)
        if result is None:
            cancelled = Completion(call.operation.id, Outcome.CANCELLED, error=_CANCELLED)
            return ended(cancelled)
        if is_mutating:
            assert permit.operation.seq is not None
            self.executor.applied = permit.operation.seq
        return ended(
            Completion(call.operation.id, Outcome.COMPLETED, result=result),
            num_tokens=num_tokens(args, result),
            saved=args if isinstance(args, SaveState) else None,
        )

    def _call(self, permit: Permit, payload: Stored | None, traceparent: str) -> Call:
        if payload is None:
            raise ResourceError(
                f"the payload of {permit.operation} is not in its stream", code=Code.DATA_LOSS
            )
        content_type = _content_type(payload)
        operation: Operation = decode(payload.payload, Operation, content_type)
        raw = Payload(permit.operation, payload.payload, content_type)
        return Call(permit, operation, raw, traceparent)

    async def _run(self, call: Call, company: _Company) -> Result | None:
        match call.operation.args:
            case PublishWeights() as args:
                self.executor.check(args)
                return await self._publish(call)
            case SyncWeights() as args:
                self.executor.check(args)
                return await self._sync(call, args)
            case SaveState() as args:
                self.executor.check(args)
                return await self._save(call, args, company)
            case LoadState() as args:
                self.executor.check(args)
                return await self._load(call, args)
            case _:
                return await self.queue.run(call)

    async def _zero_gradients(self, call: Call) -> None:
        share = replace(_share(call), zero_gradients=True)
        await self.ranks.everywhere(self.executor.backend.zero_gradients, share)

    async def _publish(self, call: Call) -> PublishWeightsResult:
        seq = call.key.seq
        assert seq is not None
        version = VersionKey(self.settings.deployment, seq)
        try:
            copy = await self._write_version(call, version)
        except PhaseloomError as error:
            # The weights were read only.
            raise Refused(error.info) from error
        return PublishWeightsResult(seq, copy.digest, copy.num_bytes)

    async def _write_version(self, call: Call, version: VersionKey) -> VersionCopy:
        """Raises: PhaseloomError: nothing was written. Broken: only a part of the ranks know."""
        weights = self.weights
        if self.ranks.is_alone:
            return await self.state.create_version(version, self.executor.weight_slots)
        mine, others = await self._prepared(weights.write(version), call)
        parts = [mine, *(each.part for each in others if isinstance(each, PartWritten))]
        manifest = weights.manifest(parts) if weights.is_in_parts else None
        share = replace(_share(call), manifest=manifest)
        copy, _ = await self.ranks.together(self._committed(version, mine, manifest), share)
        return copy

    async def _committed(
        self, version: VersionKey, mine: VersionPart | None, manifest: VersionParts | None
    ) -> VersionCopy:
        if manifest is not None:
            return await self.state.commit_parts(version, manifest)
        assert mine is not None
        return VersionCopy(mine.digest, mine.num_bytes, is_new=True)

    async def _prepared(self, own: Awaitable[T], call: Call) -> tuple[T, list[ShareResult]]:
        """What the leader, and the others, have done before anything changes.

        Raises: PhaseloomError: one of them could not, and nothing has changed. Broken.
        """
        return await self._answered(own, replace(_share(call), prepares=True))

    async def _on_all_nodes(self, own: Awaitable[None], call: Call) -> None:
        """What each node's state manager does for its ranks.

        Raises: PhaseloomError: one of them could not. Broken.
        """
        if self.settings.is_over_nodes:
            await self._prepared(own, call)
        else:
            await own

    async def _answered(self, own: Awaitable[T], share: RunShare) -> tuple[T, list[ShareResult]]:
        """Raises: PhaseloomError: one of them could not. Broken."""
        mine, shares = await self.ranks.together(or_failed(own), share)
        others = [results[0] for results in shares]
        if isinstance(mine, Failed):
            raise to_exception(mine.error)
        for each in others:
            if isinstance(each, Failed):
                raise to_exception(each.error)
        return mine, others

    async def _sync(self, call: Call, args: SyncWeights) -> SyncWeightsResult:
        own = self.settings.deployment
        version = VersionKey(DeploymentKey(own.tenant, own.job, args.policy), args.version)
        try:
            brought = await self._read_version(call, version)
        except PhaseloomError as error:
            if error.info.code in _AWAY:
                raise _NotNow(error.info) from error
            raise Refused(error.info) from error
        assert call.key.seq is not None
        # The weights are others now: where this fails, the life is not what it was before either.
        if brought.is_whole:
            await self.state.hold_version(version, call.key.seq)
        before, self._synced = self._synced, SyncWeightsResult(args.version, brought.digest)
        if before is not None and before.digest == brought.digest:
            why = f"version {args.version} has the weights of version {before.version}"
            await self._notice("sync changed nothing", why, call.key)
        return self._synced

    async def _read_version(self, call: Call, version: VersionKey) -> Brought:
        """Raises: PhaseloomError: nothing was written. Anything else: it failed half-way."""
        weights, permit = self.weights, call.permit
        if self.ranks.is_alone:
            return await weights.load(version, permit)
        brought, _ = await self._prepared(weights.bring(version, permit), call)
        await self.ranks.together(weights.take(brought), _share(call))
        return brought

    async def _save(self, call: Call, args: SaveState, company: _Company) -> SaveStateResult | None:
        """The state is cut while the devices wait; it is written while they go on. Of a WPG over
        several nodes each node's state manager does so, and this one's makes a whole of it."""
        if self.queue.is_cancelled(call.key):
            return None
        permit, operation = call.permit, call.operation.id
        clock_s = time.perf_counter()
        config = json.dumps(self.executor.backend.config, indent=2, sort_keys=True)
        try:
            await self._on_all_nodes(
                self.state.cut_state(operation, args.name, self.executor.applied), call
            )
            call.duration_s = time.perf_counter() - clock_s
            await self._let_go(permit, company)
            if self.settings.is_over_nodes:
                await self._answered(asyncio.sleep(0), _share(call))
            sha256 = await self.state.write_checkpoint(operation, args.name, config, args.keep)
        except PhaseloomError as error:
            # The state was read only.
            raise Refused(error.info) from error
        own = self.settings.deployment
        result = SaveStateResult(f"{own.job}/{own.deployment}/{args.name}", sha256)
        if args.controller_blob:
            result = replace(result, checkpoints=await self._put_checkpoint(permit, args))
        return result

    async def _let_go(self, permit: Permit, company: _Company) -> None:
        """What is saved is apart from the devices now."""
        if permit.replay:
            return  # what follows is run again in order
        self._reading.discard(permit.operation)
        self._unended.discard(permit.operation)
        cut = StateCut(permit.operation, permit.epoch, permit.incarnation)
        msg_id = f"cut:{permit.operation}:{permit.incarnation}:{permit.id}"
        # First, so that whoever is permitted next finds the turn free.
        await self._is_apart(permit.operation, company)
        await until_answered(lambda: self.bus.append(cut, msg_id=msg_id))

    async def _is_apart(self, operation: OperationKey, company: _Company) -> None:
        """It needs neither devices nor state any more; the last one of those together says so."""
        if operation in company.here:
            company.here.remove(operation)
            if company.has_saves and not company.here:
                await self.ranks.agent.call(RunsApart(company.first))

    async def _prune(self, args: SaveState) -> None:
        """What is not needed any more, once nobody can believe otherwise."""
        own = self.settings.deployment
        try:
            last = await self._last_checkpoint()
            needed = {args.name, self._fallback, *self._loaded} - {""}
            if last is not None and own.deployment in last.checkpoints:
                needed.add(last.checkpoints[own.deployment])
            await self.state.prune_checkpoints(args.keep, sorted(needed))
        except PhaseloomError as error:
            log.warning("old checkpoints of %s stay: %s", own, error)

    async def _last_checkpoint(self) -> Checkpoint | None:
        """Of the job."""
        key = str(self.settings.deployment.job_key)
        stored = await until_answered(lambda: self.bus.kv_get(Bucket.CHECKPOINTS, key))
        last: Checkpoint | None = decode(stored.payload, Checkpoint) if stored else None
        return last

    async def _load(self, call: Call, args: LoadState) -> LoadStateResult:
        try:
            expected = await self.state.read_checkpoint(args.name)
        except PhaseloomError as error:
            raise Refused(error.info) from error
        self._loaded.add(args.name)
        # Here it is replaced already: where another node fails, nobody has a state any more.
        await self._on_all_nodes(asyncio.sleep(0), call)
        loaded, _ = await self.ranks.everywhere(lambda: self.executor.compute(args), _share(call))
        assert isinstance(loaded, LoadStateResult)
        if expected not in {"", loaded.weights_sha256}:
            raise ResourceError(
                f"checkpoint {args.name!r} has weights {expected}, loaded were "
                f"{loaded.weights_sha256}",
                code=Code.DATA_LOSS,
            )
        return loaded

    async def _put_checkpoint(self, permit: Permit, args: SaveState) -> dict[str, str]:
        """Make it the job's last one, before DONE says that it is."""
        key = permit.operation
        checkpoints = {**args.checkpoints, key.deployment: args.name}
        checkpoint = Checkpoint(key.deployment, key.seq or 0, checkpoints, args.controller_blob)
        value, kv_key = encode(checkpoint), str(key.job_key)
        before = await self._last_checkpoint()
        if before is not None and before != checkpoint:
            self._fallback = before.checkpoints.get(key.deployment, "")
        await until_answered(lambda: self.bus.kv_put(Bucket.CHECKPOINTS, kv_key, value))
        return checkpoints

    async def _return(self, permit: Permit, error: ErrorInfo) -> None:
        log.warning("permit of %s returned: %s", permit.operation, error.message)
        returned = PermitReturned(permit.operation, permit.epoch, permit.incarnation, error)
        msg_id = f"returned:{permit.operation}:{permit.id}"
        await until_answered(lambda: self.bus.append(returned, msg_id=msg_id))

    # --- telling --------------------------------------------------------------------------------

    async def _tell(
        self,
        permit: Permit,
        payload: Stored | None,
        done: Completion | None,
        ran: _Ran,
        parent: Context,
    ) -> None:
        """Store the outcome, unless there is one; then append it to the decision log."""
        completion = ran.completion
        if done is None:
            completion, done = await self._store(permit, completion, payload, parent)
        if done is not None:
            await self._compare(permit, done, completion)
            if completion.outcome is not done.outcome and permit.kind in MUTATING_KINDS:
                # The stored outcome stands, but it is not what this incarnation did.
                ran.is_dirty = True
            if not ran.is_dirty:
                completion = done
            else:
                completion = replace(done, error=completion.error or done.error)
        end_s = ran.started_unix_s + ran.duration_s
        attributes = self._attributes(permit)
        telemetry.record("execute", ran.started_unix_s, end_s, parent, **attributes)
        await self._append_finished(permit, completion, parent, ran)

    async def _store(
        self, permit: Permit, completion: Completion, payload: Stored | None, parent: Context
    ) -> tuple[Completion, Completion | None]:
        """Returns what was to be written (it may be too large for its form), and another's outcome
        where that was stored first."""
        content_type = _content_type(payload)
        if content_type == JSON and completion.result is not None:
            completion = replace(completion, result=as_lists(completion.result))
        if len(encode(completion, content_type)) > MAX_OUTCOME_BYTES:
            completion = _failed(permit, _TOO_LARGE)
        subject = streams.done_subject(permit.operation)
        try:
            await until_answered(
                lambda: self.bus.publish(
                    subject,
                    completion,
                    headers=telemetry.inject({}, parent),
                    content_type=content_type,
                )
            )
        except AlreadyStored:
            (stored,) = await self._get_all(streams.DONE, [subject])
            first = _decoded(stored)
            # Our own, where only the acknowledgement was lost.
            return completion, None if first == completion else first
        return completion, None

    async def _compare(self, permit: Permit, done: Completion, again: Completion) -> None:
        if (done.outcome, done.result) != (again.outcome, again.result):
            await self._notice(
                "outcome differs",
                "the stored one stands; the state may not be the one that made it",
                permit.operation,
            )

    async def _append_finished(
        self, permit: Permit, completion: Completion, parent: Context, ran: _Ran | None = None
    ) -> None:
        finished = OperationFinished(
            key=permit.operation,
            kind=permit.kind,
            outcome=completion.outcome,
            epoch=permit.epoch,
            incarnation=permit.incarnation,
            started_unix_s=ran.started_unix_s if ran else time.time(),
            duration_s=ran.duration_s if ran else 0.0,
            replay=permit.replay,
            dirty=ran.is_dirty if ran else False,
            error=completion.error,
            num_tokens=ran.num_tokens if ran else 0,
            checkpoints=checkpoints_of(completion),
        )
        msg_id = f"finished:{permit.operation}:{permit.incarnation}:{permit.id}"
        self._unended.discard(permit.operation)
        with telemetry.span("complete", parent=parent, **self._attributes(permit)):
            await self._finished.add(_Finished(finished, msg_id))

    async def _append(self, ended: list[_Finished]) -> None:
        """What has ended since the last append, in one entry of the decision log."""
        event: Event = ended[0].event
        msg_id = ended[0].msg_id
        if len(ended) > 1:
            event = OperationsFinished([one.event for one in ended])
            msg_id = f"{msg_id}+{len(ended)}"
        await until_answered(lambda: self.bus.append(event, msg_id=msg_id))

    async def report_progress(self) -> None:
        """Tell how far each `generate` is, for ever; nothing is decided on it."""
        told: dict[OperationKey, int] = {}
        while True:
            await asyncio.sleep(PROGRESS_S)
            calls = [call for call in self.queue.running if call.num_total]
            for call in calls:
                if told.get(call.key) != call.num_done:
                    await self._publish_progress(call)
            told = {call.key: call.num_done for call in calls}

    async def _publish_progress(self, call: Call) -> None:
        progress = Progress(call.key, call.num_done, call.num_total)
        try:
            await self.bus.client.publish(
                streams.progress_subject(call.key),
                encode(progress),
                headers={CONTENT_TYPE: MSGPACK},
            )
        except nats.errors.Error as error:
            log.debug("no progress of %s is told: %r", call.key, error)

    async def _notice(self, what: str, why: str, operation: OperationKey) -> None:
        try:
            await self.bus.notice("worker", what, why, str(operation))
        except nats.errors.Error as error:
            log.warning("%s: %s (%s); nobody was told: %r", operation, what, why, error)

    def _attributes(self, permit: Permit) -> dict[str, Any]:
        key = permit.operation
        return {
            "tenant": key.tenant,
            "job": key.job,
            "deployment": key.deployment,
            "seq": key.slot,
            "kind": permit.kind,
            "node": self.settings.node,
            "device": self.settings.device,
            "epoch": permit.epoch,
        }


def _is_to_run_again(permit: Permit, done: Completion) -> bool:
    """Rebuilding: what took effect, and what dropped gradients, must do so again."""
    return permit.replay and (done.outcome is Outcome.COMPLETED or permit.partial)


def _share(call: Call) -> RunShare:
    return RunShare([call.payload], call.permit, call.traceparent)


def _content_type(payload: Stored | None) -> str:
    """As the operation came, so is its outcome written."""
    return content_type_of(payload.headers if payload else {CONTENT_TYPE: MSGPACK})


def _decoded(stored: Stored | None) -> Completion | None:
    if stored is None:
        return None
    done: Completion = decode(stored.payload, Completion, content_type_of(stored.headers))
    return done


def _failed(permit: Permit, error: ErrorInfo) -> Completion:
    return Completion(permit.operation_id, Outcome.FAILED, error=error)


def _info(permit: Permit, error: BaseException) -> ErrorInfo:
    if isinstance(error, PhaseloomError):
        return error.info
    log.error("%s failed", permit.operation, exc_info=error)
    return unforeseen(error)
