"""Validates operations and builds their headers for the decision log.

All functions are pure and depend on the operation alone. `contract.kinds` defines each kind's check
and maximum work. Cost: linear in the payload and in the number of its items, up to seconds for a
payload of maximum size. `is_small` tells which payloads cost an event loop at most 5 ms.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from phaseloom.common.contract.checks import check_range
from phaseloom.common.contract.codec import JSON, MSGPACK, decode
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    InternalError,
    ResourceError,
    session_superseded,
)
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import (
    SEQ_END,
    DeploymentKey,
    OperationKey,
    VersionKey,
    check_name,
)
from phaseloom.common.contract.kinds import KINDS, READING_KINDS
from phaseloom.common.contract.operations import (
    Args,
    Forward,
    Generate,
    NamedWeights,
    Operation,
    PublishWeights,
    SyncWeights,
    kind_of,
)
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES

MAX_ID_LENGTH = 128
MAX_AFTER = 256
MAX_TIMEOUT_S = 30 * 86400.0
MAX_ITEMS = 131_072
"""Maximum prompts or samples of one operation. The results of more would not fit in a message."""

_SMALL_BYTES = 32 * 1024
_SMALL_ITEMS = 512
_ITEM_NAME = b"tokens"
"""The name of a required field of every prompt and sample."""
_ITEM_MARKS = {JSON: b'"tokens"', MSGPACK: b"\xa6tokens"}
"""How that name is usually encoded. Other encodings are left to the limits of the decoder."""

_MAX_TEXT_CHARS = 1000
_RESULT_MARGIN_BYTES = 64 * 1024


class _Tagged(msgspec.Struct, frozen=True):
    type: str = ""


class _Identity(msgspec.Struct, frozen=True):
    id: str = ""
    args: _Tagged = _Tagged()


class SessionOver(ResourceError):
    """The operation's session is over, because a newer one has attached to the job."""

    def __init__(self, session: int, newest: int) -> None:
        info = session_superseded(session, newest)
        super().__init__(info.message, code=info.code, field=info.field, remedy=info.remedy)


def is_small(payload: bytes) -> bool:
    """Whether an event loop may call the functions of this module with the payload."""
    return len(payload) <= _SMALL_BYTES and payload.count(_ITEM_NAME) <= _SMALL_ITEMS


def header(key: OperationKey, payload: bytes, content_type: str) -> QueuedOperation:
    """Build the decision-log header of an operation that may be invalid.

    A header with an `error` is that of an operation to refuse.
    """
    try:
        operation = read(key, payload, content_type)
    except (CallerError, InternalError) as error:
        return refused(key, payload, content_type, error.info)
    return replace(queued(key, operation), num_bytes=len(payload))


def read(key: OperationKey, payload: bytes, content_type: str) -> Operation:
    """Decode and validate an operation.

    Raises: CallerError: it is invalid; names the field. InternalError: the check itself failed.
    """
    try:
        _check_count(payload, content_type)
        operation: Operation = decode(payload, Operation, content_type)
        validate(key, operation, content_type)
    except (CallerError, MemoryError):
        raise
    except Exception as error:
        # Otherwise a payload that crashes the check would be redelivered and crash every replica.
        raise InternalError(f"the operation could not be checked: {error!r}") from error
    return operation


def _check_count(payload: bytes, content_type: str) -> None:
    # A scan is a hundred times as fast as decoding, and needs no memory.
    mark = _ITEM_MARKS.get(content_type)
    num_items = payload.count(mark) if mark else 0
    if num_items > MAX_ITEMS:
        raise CallerError(
            f"an operation may have at most {MAX_ITEMS} prompts or samples, got {num_items}",
            field="args",
            remedy="split them over several operations",
        )


def validate(key: OperationKey, operation: Operation, content_type: str = MSGPACK) -> None:
    """Refuse an operation that no deployment could run, or whose result would be too large.

    Args:   content_type: encoding of the operation and of its result.
    Raises: CallerError: the operation is refused; names the field and the remedy.
    """
    if not 0 < len(operation.id) <= MAX_ID_LENGTH:
        raise CallerError(
            f"id must have 1 to {MAX_ID_LENGTH} characters, got {len(operation.id)}",
            field="id",
            remedy="use a shorter unique id, such as a UUID",
        )
    kind = kind_of(operation.args)
    if key.seq is None and kind not in READING_KINDS:
        raise CallerError(
            f"{kind} changes state, so it needs a sequence number",
            field="subject.seq",
            remedy="publish it under the deployment's next sequence number",
        )
    timeout_s = operation.timeout_s
    if not 0.0 <= timeout_s <= MAX_TIMEOUT_S:
        raise CallerError(
            f"timeout_s must be between 0 and {MAX_TIMEOUT_S:.0f}, got {timeout_s}",
            field="timeout_s",
            remedy="use a shorter timeout, or 0 for none",
        )
    _check_after(key, operation)
    KINDS[kind].check(key, operation.args)
    _check_result_size(operation.args, content_type)


def _check_after(key: OperationKey, operation: Operation) -> None:
    if len(operation.after) > MAX_AFTER:
        raise CallerError(
            f"`after` must name at most {MAX_AFTER} operations, got {len(operation.after)}",
            field="after",
            remedy="name only the last operation of each chain",
        )
    for i, after in enumerate(operation.after):
        check_name(after.deployment, f"after[{i}].deployment")
        check_range(after.seq, 1, SEQ_END - 1, f"after[{i}].seq", "a sequence number")
        is_same_deployment = after.deployment == key.deployment and key.seq is not None
        if is_same_deployment and after.seq >= (key.seq or 0):
            raise CallerError(
                f"operation {key.seq} cannot wait for operation {after.seq} of its own deployment",
                field=f"after[{i}].seq",
                remedy="name an earlier operation",
            )


def _check_result_size(args: Args, content_type: str) -> None:
    kind = KINDS[kind_of(args)]
    num_bytes = kind.result_bytes(args, content_type)
    if num_bytes <= MAX_PAYLOAD_BYTES - _RESULT_MARGIN_BYTES:
        return
    packed = ", or send MessagePack, whose results are smaller" if content_type == JSON else ""
    raise CallerError(
        f"the result may have {num_bytes} bytes, which exceeds the largest message",
        field=f"args.{kind.items}",
        remedy=f"split the {kind.items} over several operations{packed}",
    )


def check_session(session: int, newest: int) -> None:
    """Refuse an operation unless it belongs to the job's newest session.

    Args:   newest: number returned by the last `session.attach`, or 0 if there was none.
    Raises: CallerError: the session never existed. SessionOver: a newer one has attached.
    """
    if session == newest and newest > 0:
        return
    if newest == 0 or session > newest:
        raise CallerError(
            f"session {session} does not exist",
            code=Code.FAILED_PRECONDITION,
            field="session",
            remedy="attach to the job and use the session number that it returns",
        )
    raise SessionOver(session, newest)


def queued(key: OperationKey, operation: Operation) -> QueuedOperation:
    """Build the decision-log header of a valid operation."""
    args = operation.args
    return QueuedOperation(
        key=key,
        id=operation.id,
        kind=kind_of(args),
        after=operation.after,
        version=_version(key, args),
        payer=_payer(key, args),
        ttl_s=args.ttl_s if isinstance(args, PublishWeights) else 0.0,
        size=KINDS[kind_of(args)].max_num_tokens(args),
        session=operation.session,
        timeout_s=operation.timeout_s,
    )


def _version(key: OperationKey, args: Args) -> VersionKey | None:
    match args:
        case SyncWeights(policy=name, version=seq):
            return VersionKey(DeploymentKey(key.tenant, key.job, name), seq)
        case (
            Generate(weights=NamedWeights(checkpoint="") as named)
            | Forward(weights=NamedWeights(checkpoint="") as named)
        ):
            policy = DeploymentKey(key.tenant, named.job or key.job, named.policy)
            return VersionKey(policy, named.version)
    return None


def _payer(key: OperationKey, args: Args) -> str:
    """Return the other job whose weights an operation reads, or an empty string."""
    match args:
        case Generate(weights=NamedWeights(job=job)) | Forward(weights=NamedWeights(job=job)):
            return job if job != key.job else ""
    return ""


def refused(
    key: OperationKey, payload: bytes, content_type: str, error: ErrorInfo
) -> QueuedOperation:
    """Build the header of an invalid operation, with as much of its identity as can be read."""
    identity = identify(payload, content_type)
    kind = identity.args.type if identity.args.type in KINDS else ""
    return with_error(QueuedOperation(key=key, id=identity.id, kind=kind), error)


def with_error(header: QueuedOperation, error: ErrorInfo) -> QueuedOperation:
    """Return the header of a refused operation.

    Texts are shortened, because an error may quote a value of any size.
    """
    return QueuedOperation(
        key=header.key,
        id=header.id,
        kind=header.kind,
        error=replace(
            error,
            message=_short(error.message),
            field=_short(error.field),
            remedy=_short(error.remedy),
        ),
    )


def id_of(payload: bytes, content_type: str) -> str:
    """Return the id of an operation or of its completion; empty if it cannot be read."""
    return identify(payload, content_type).id


def identify(payload: bytes, content_type: str) -> _Identity:
    """Return id and kind from a payload that may be invalid; empty if they cannot be read."""
    try:
        identity: _Identity = decode(payload, _Identity, content_type)
    except CallerError:
        return _Identity()
    return identity if len(identity.id) <= MAX_ID_LENGTH else _Identity(args=identity.args)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"
