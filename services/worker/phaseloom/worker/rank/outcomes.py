"""The end of an operation: store its outcome in DONE, first writer wins, and log its end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import nats.errors
from msgspec.structs import replace
from opentelemetry.context import Context

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import (
    CONTENT_TYPE,
    JSON,
    MSGPACK,
    content_type_of,
    decode,
    encode,
)
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    Event,
    OperationFinished,
    OperationsFinished,
    PermitReturned,
    StepRun,
)
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.kinds import MUTATING_KINDS, as_lists
from phaseloom.common.contract.operations import Completion, Outcome, SaveState, checkpoints_of
from phaseloom.common.observability import telemetry
from phaseloom.common.observability.substages import split_runs
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.groupcommit import GroupCommit
from phaseloom.common.transport.link import AlreadyStored
from phaseloom.common.transport.retry import until_done
from phaseloom.common.transport.stored import Stored
from phaseloom.worker.rank.group import RanksDiverged
from phaseloom.worker.rank.wire import RankConfig

log = logging.getLogger(__name__)

MAX_WAIT_S = 0.005
"""Maximum seconds that the end of an operation waits to be logged together with other ends."""

MAX_OUTCOME_BYTES = streams.MAX_PAYLOAD_BYTES - 65_536
"""Maximum bytes of an outcome; the remainder of a message is for headers."""
_TOO_LARGE = ErrorInfo(
    Code.RESOURCE_EXHAUSTED,
    "the result is too large for one message",
    remedy="send fewer samples at once, or use MessagePack, which is smaller than JSON",
)


@dataclass(slots=True)
class PermitRun:
    """The result of running a permit, with times and shares."""

    completion: Completion
    started_unix_s: float
    duration_s: float
    is_dirty: bool = False
    """Whether the state is one that no completed operation produced."""
    broken: RanksDiverged | None = None
    """The error after which the ranks cannot continue together; None: they can."""
    num_tokens: int = 0
    share: float = 1.0
    """As in `OperationFinished`."""
    steps: list[StepRun] = field(default_factory=list)
    """As in `OperationFinished`."""
    saved: SaveState | None = None
    """The `save_state` whose checkpoint is durable now."""
    outcome_bytes: int = 0
    """As in `OperationFinished`."""


@dataclass(frozen=True, slots=True)
class _Finished:
    event: OperationFinished
    msg_id: str


@dataclass(slots=True)
class Outcomes:
    settings: RankConfig
    bus: Bus
    unended: set[OperationKey] = field(default_factory=set)
    """Permitted operations that have not ended; ends wait for each other while there are any."""
    _finished: GroupCommit[_Finished, None] = field(init=False)

    def __post_init__(self) -> None:
        self._finished = GroupCommit(self._append, lambda: bool(self.unended), MAX_WAIT_S)

    async def return_permit(self, permit: Permit, error: ErrorInfo) -> None:
        """Return a permit under which nothing has changed, so that the scheduler issues it
        again."""
        log.warning("permit of %s returned: %s", permit.operation, error.message)
        returned = PermitReturned(permit.operation, permit.epoch, permit.incarnation, error)
        msg_id = f"returned:{permit.operation}:{permit.id}"
        await until_done(lambda: self.bus.log.append(returned, msg_id=msg_id), "append")

    async def store_and_log(
        self,
        permit: Permit,
        payload: Stored | None,
        done: Completion | None,
        ran: PermitRun,
        parent: Context,
    ) -> None:
        """Store the outcome, unless one is stored; then append the operation's end to the decision
        log.

        Args: done: the stored outcome if the operation ran again. `ran` becomes dirty if the two
                 outcomes
              differ.
        """
        completion = ran.completion
        if done is None:
            completion, done = await self._store(permit, ran, payload, parent)
        if done is not None:
            if (done.outcome, done.result) != (completion.outcome, completion.result):
                await self.notice(
                    "outcome differs",
                    "the stored outcome is authoritative, but the state may not match it",
                    permit.operation,
                )
            if completion.outcome is not done.outcome and permit.kind in MUTATING_KINDS:
                # The stored outcome is authoritative, but this incarnation's state does not match
                # it.
                ran.is_dirty = True
            if not ran.is_dirty:
                completion = done
            else:
                completion = replace(done, error=completion.error or done.error)
        end_s = ran.started_unix_s + ran.duration_s
        attributes = self._attributes(permit)
        span = telemetry.record("execute", ran.started_unix_s, end_s, parent, **attributes)
        self._record_sub_stages(ran, telemetry.child_context(span), attributes)
        await self.log_end(permit, completion, parent, ran)

    def _record_sub_stages(
        self, ran: PermitRun, parent: Context, attributes: dict[str, Any]
    ) -> None:
        stages = split_runs([run for run in ran.steps if run.replica == 0])
        start_s = ran.started_unix_s
        for stage in stages if len(stages) > 1 else ():
            end_s = start_s + stage.duration_s
            step = round(stage.tokens / stage.steps)
            stage_attributes = {**attributes, "steps": stage.steps, "tokens_per_step": step}
            telemetry.record("sub-stage", start_s, end_s, parent, **stage_attributes)
            start_s = end_s

    async def _store(
        self, permit: Permit, ran: PermitRun, payload: Stored | None, parent: Context
    ) -> tuple[Completion, Completion | None]:
        """Store an outcome. An outcome too large for a message is stored as a failure.

        Returns: this rank's outcome, and the authoritative outcome if another rank had stored one
                 before.
        """
        completion, content_type = ran.completion, content_type_for(payload)
        if content_type == JSON and completion.result is not None:
            completion = replace(completion, result=as_lists(completion.result))
        ran.outcome_bytes = len(encode(completion, content_type))
        if ran.outcome_bytes > MAX_OUTCOME_BYTES:
            completion = failed(permit, _TOO_LARGE)
        subject = streams.done_subject(permit.operation)
        try:
            await until_done(
                lambda: self.bus.publish(
                    subject,
                    completion,
                    headers=telemetry.inject({}, parent),
                    content_type=content_type,
                ),
                "store an outcome",
            )
        except AlreadyStored:
            (stored,) = await get_all(self.bus, streams.DONE, [subject], must_exist=True)
            first = decoded(stored)
            # An equal outcome is this rank's, whose acknowledgement was lost.
            return completion, None if first == completion else first
        return completion, None

    async def log_end(
        self, permit: Permit, completion: Completion, parent: Context, ran: PermitRun | None = None
    ) -> None:
        """Append to the decision log that an operation has ended.

        Args: ran: None if the operation ran under an earlier permit.
        """
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
            share=ran.share if ran else 1.0,
            checkpoints=checkpoints_of(completion),
            steps=ran.steps if ran else [],
            outcome_bytes=(ran.outcome_bytes if ran else 0) or len(encode(completion)),
        )
        msg_id = f"finished:{permit.operation}:{permit.incarnation}:{permit.id}"
        # From here on, other ends need not wait for this one.
        self.unended.discard(permit.operation)
        with telemetry.span("complete", parent=parent, **self._attributes(permit)):
            await self._finished.add(_Finished(finished, msg_id))

    async def _append(self, ended: list[_Finished]) -> None:
        """Append all ends since the last append, in one entry of the decision log."""
        event: Event = ended[0].event
        msg_id = ended[0].msg_id
        if len(ended) > 1:
            event = OperationsFinished([end.event for end in ended])
            msg_id = f"{msg_id}+{len(ended)}"
        await until_done(lambda: self.bus.log.append(event, msg_id=msg_id), "append")

    async def notice(self, label: str, reason: str, operation: OperationKey) -> None:
        """Publish a notice for people; no service depends on it."""
        try:
            await self.bus.notice("worker", label, reason, str(operation))
        except nats.errors.Error as error:
            log.warning("%s: %s (%s); notice not published: %r", operation, label, reason, error)

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


async def get_all(
    bus: Bus, stream: str, subjects: list[str], *, must_exist: bool = False
) -> list[Stored | None]:
    """The messages stored under these subjects, in order; None for a subject without one.

    Args: must_exist: as in `Bus.stored.get_all`.
    """
    read = partial(bus.stored.get_all, stream, subjects, must_exist=must_exist)
    stored = await until_done(read, f"read {stream}")
    return [stored.get(subject) for subject in subjects]


def content_type_for(payload: Stored | None) -> str:
    """The content type of an operation's outcome, which is that of its payload."""
    return content_type_of(payload.headers if payload else {CONTENT_TYPE: MSGPACK})


def decoded(stored: Stored | None) -> Completion | None:
    if stored is None:
        return None
    done: Completion = decode(stored.payload, Completion, content_type_of(stored.headers))
    return done


def failed(permit: Permit, error: ErrorInfo) -> Completion:
    return Completion(permit.operation_id, Outcome.FAILED, error=error)
