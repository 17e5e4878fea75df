"""Whether an operation is sound, and how much work it is at most.

All functions are pure, of the operation alone. The backend refuses what depends on the model (token
range, context length). Cost: linear in the payload, at the speed of C loops: about 10 ms for a
batch of the largest size.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from phaseloom.common.contract.arrays import float32s, int32s, length
from phaseloom.common.contract.base import Float32s, Int32s
from phaseloom.common.contract.codec import JSON, MSGPACK, decode
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    InternalError,
    ResourceError,
    session_over,
)
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import DeploymentKey, OperationKey, VersionKey, check_name
from phaseloom.common.contract.operations import (
    MUTATING_KINDS,
    READING_KINDS,
    AdamParams,
    Args,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    LoadState,
    Loss,
    Operation,
    OptimStep,
    SamplingParams,
    SaveState,
    SyncWeights,
    kind_of,
)
from phaseloom.common.contract.streams import MAX_PAYLOAD_BYTES

MAX_SAMPLES = 65_536
MAX_NEW_TOKENS = 1 << 20
MAX_ID_LENGTH = 128
MAX_AFTER = 256
MAX_TIMEOUT_S = 30 * 86400.0
MAX_BLOB_BYTES = 2**20
MAX_CHECKPOINTS = 64
MAX_KEPT = 100_000
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 1024

_INT32_END = 1 << 31
_SEED_END = 1 << 63
_SEQ_END = 10**18
_FLOAT32_MAX = 3.4028235e38
_MAX_TEXT_CHARS = 1000
_TOKEN_BYTES = {MSGPACK: 4, JSON: 11}
"""The most bytes of a token in a result: int32, or ten digits and a comma."""
_FLOAT_BYTES = {MSGPACK: 4, JSON: 24}
"""The most bytes of a log-probability: float32, or 17 digits, sign, point, exponent and comma."""
_SEQUENCE_BYTES = 64
_ARRAY_BYTES = 8
_RESULT_MARGIN_BYTES = 64 * 1024

_KINDS = MUTATING_KINDS | READING_KINDS
_LOSS_ARRAYS = {
    Loss.CROSS_ENTROPY: ("weights",),
    Loss.IMPORTANCE_SAMPLING: ("logprobs", "advantages"),
    Loss.PPO: ("logprobs", "advantages"),
    Loss.CISPO: ("logprobs", "advantages"),
}


class _Tagged(msgspec.Struct, frozen=True):
    type: str = ""


class _Identity(msgspec.Struct, frozen=True):
    id: str = ""
    args: _Tagged = _Tagged()


class SessionOver(ResourceError):
    """Another session has attached to the job since."""

    def __init__(self, session: int, newest: int) -> None:
        info = session_over(session, newest)
        super().__init__(info.message, code=info.code, field=info.field, remedy=info.remedy)


def read(key: OperationKey, payload: bytes, content_type: str) -> Operation:
    """The operation, decoded and found sound.

    Raises: CallerError: it is not sound; names the field. InternalError: the check itself failed.
    """
    try:
        operation: Operation = decode(payload, Operation, content_type)
        validate(key, operation, content_type)
    except CallerError:
        raise
    except Exception as error:
        # A payload that trips the check would come back for ever and take down every replica.
        raise InternalError(f"the operation could not be checked: {error!r}") from error
    return operation


def validate(key: OperationKey, operation: Operation, content_type: str = MSGPACK) -> None:
    """Refuse an operation that no deployment could run, or whose result could not be sent.

    Args:   content_type: the encoding of the operation, and of its result.
    Raises: CallerError: the operation is refused; names the field and the remedy.
    """
    if not 0 < len(operation.id) <= MAX_ID_LENGTH:
        raise CallerError(
            f"the id has {len(operation.id)} characters",
            field="id",
            remedy=f"use a unique id of 1 to {MAX_ID_LENGTH} characters",
        )
    kind = kind_of(operation.args)
    if key.seq is None and kind not in READING_KINDS:
        raise CallerError(
            f"{kind} changes state, so it needs a place in the order",
            field="subject.seq",
            remedy="publish it under the deployment's next sequence number",
        )
    timeout_s = operation.timeout_s
    if not 0.0 <= timeout_s <= MAX_TIMEOUT_S:
        raise CallerError(
            f"a timeout of {timeout_s} s is out of range",
            field="timeout_s",
            remedy=f"use 0 (none) to {MAX_TIMEOUT_S:.0f} seconds",
        )
    _check_after(key, operation)
    _check_args(key, operation.args, content_type)


def _check_after(key: OperationKey, operation: Operation) -> None:
    if len(operation.after) > MAX_AFTER:
        raise CallerError(
            f"{len(operation.after)} operations to wait for",
            field="after",
            remedy=f"name at most {MAX_AFTER}; the last of a chain is enough",
        )
    for i, after in enumerate(operation.after):
        check_name(after.deployment, f"after[{i}].deployment")
        _check_range(after.seq, 1, _SEQ_END - 1, f"after[{i}].seq", "a sequence number")
        own = after.deployment == key.deployment and key.seq is not None
        if own and after.seq >= (key.seq or 0):
            raise CallerError(
                f"operation {key.seq} cannot wait for {after.seq} of its own deployment",
                field=f"after[{i}].seq",
                remedy="name an earlier operation",
            )


def _check_args(key: OperationKey, args: Args, content_type: str) -> None:
    match args:
        case Generate():
            _check_generate(args)
            _check_generated_size(args, content_type)
        case Forward():
            _check_batch(args.batch, ())
            _check_scored_size(args.batch, content_type)
        case ForwardBackward():
            _check_batch(args.batch, _LOSS_ARRAYS[args.loss])
            _check_unused(args)
            _check_clip(args)
        case OptimStep():
            _check_adam(args.adam)
        case SaveState():
            check_name(args.name, "args.name")
            _check_range(args.keep, 0, MAX_KEPT, "args.keep", "checkpoints")
            _check_job_checkpoint(key, args)
        case LoadState():
            check_name(args.name, "args.name")
        case SyncWeights():
            check_name(args.policy, "args.policy")
            _check_range(args.version, 1, _SEQ_END - 1, "args.version", "a publish's seq")


def _check_generate(args: Generate) -> None:
    if not args.prompts:
        raise CallerError("there is no prompt", field="args.prompts", remedy="give at least one")
    for i, prompt in enumerate(args.prompts):
        _check_ints(prompt.tokens, f"args.prompts[{i}].tokens")
        _check_range(prompt.seed, -_SEED_END, _SEED_END - 1, f"args.prompts[{i}].seed", "an int64")
    _check_range(args.num_samples, 1, MAX_SAMPLES, "args.num_samples", "samples a prompt")
    _check_sampling(args.sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    _check_range(sampling.max_tokens, 1, MAX_NEW_TOKENS, "args.sampling.max_tokens", "new tokens")
    _check_finite(sampling.temperature, "args.sampling.temperature")
    tokens, strings = sampling.stop_token_ids, sampling.stop_strings
    field = "args.sampling.stop_token_ids"
    _check_range(len(tokens), 0, MAX_STOP_TOKENS, field, "stop tokens")
    for i, token in enumerate(tokens):
        _check_range(token, 0, _INT32_END - 1, f"{field}[{i}]", "a token id")
    field = "args.sampling.stop_strings"
    _check_range(len(strings), 0, MAX_STOP_STRINGS, field, "stop strings")
    for i, text in enumerate(strings):
        _check_range(len(text), 1, MAX_STOP_CHARS, f"{field}[{i}]", "characters")


def _check_generated_size(args: Generate, content_type: str) -> None:
    _check_result_size(generated_bytes(args, content_type), content_type, "args.prompts", "prompts")


def generated_bytes(args: Generate, content_type: str) -> int:
    """The most bytes of a result, without its envelope."""
    token, number = _TOKEN_BYTES[content_type], _FLOAT_BYTES[content_type]
    sequence = args.sampling.max_tokens * (token + number) + _SEQUENCE_BYTES
    num_bytes = len(args.prompts) * args.num_samples * sequence
    if args.prompt_logprobs:
        num_bytes += sum(length(p.tokens) * number + _ARRAY_BYTES for p in args.prompts)
    return num_bytes


def _check_scored_size(batch: list[Datum], content_type: str) -> None:
    number = _FLOAT_BYTES[content_type]
    num_bytes = sum(length(datum.tokens) * number + _ARRAY_BYTES for datum in batch)
    _check_result_size(num_bytes, content_type, "args.batch", "batch")


def _check_result_size(num_bytes: int, content_type: str, field: str, what: str) -> None:
    if num_bytes <= MAX_PAYLOAD_BYTES - _RESULT_MARGIN_BYTES:
        return
    packed = ", or send MessagePack, whose results are smaller" if content_type == JSON else ""
    raise CallerError(
        f"the result may have {num_bytes} bytes, more than one message can carry",
        field=field,
        remedy=f"split the {what} over several operations{packed}",
    )


def _check_job_checkpoint(key: OperationKey, args: SaveState) -> None:
    _check_range(len(args.controller_blob), 0, MAX_BLOB_BYTES, "args.controller_blob", "bytes")
    _check_range(len(args.checkpoints), 0, MAX_CHECKPOINTS, "args.checkpoints", "checkpoints")
    for deployment, name in args.checkpoints.items():
        check_name(deployment, "args.checkpoints")
        check_name(name, f"args.checkpoints[{deployment}]")
    if key.deployment in args.checkpoints:
        raise CallerError(
            f"{key.deployment} is the deployment that this operation saves",
            field=f"args.checkpoints[{key.deployment}]",
            remedy="name the other deployments' checkpoints only",
        )
    if args.checkpoints and not args.controller_blob:
        raise CallerError(
            "checkpoints of other deployments belong to a controller's blob",
            field="args.checkpoints",
            remedy="give a `controller_blob`, or save each deployment by itself",
        )


def _check_batch(batch: list[Datum], needed: tuple[str, ...]) -> None:
    if not batch:
        raise CallerError("the batch is empty", field="args.batch", remedy="give at least one")
    for i, datum in enumerate(batch):
        _check_datum(datum, needed, f"args.batch[{i}]")


def _check_unused(args: ForwardBackward) -> None:
    """Refuse a factor that the loss does not use: it was meant to do something."""
    unused, used = ("weights", "advantages")
    if args.loss is Loss.CROSS_ENTROPY:
        unused, used = used, unused
    for i, datum in enumerate(args.batch):
        if getattr(datum, unused) is not None:
            raise CallerError(
                f"the loss {args.loss} does not use {unused}",
                field=f"args.batch[{i}].{unused}",
                remedy=f"leave it out, or multiply it into {used}",
            )


def _check_datum(datum: Datum, needed: tuple[str, ...], field: str) -> None:
    _check_ints(datum.tokens, f"{field}.tokens")
    num_tokens = length(datum.tokens)
    _check_ints(datum.targets, f"{field}.targets")
    _check_length(datum.targets, num_tokens, f"{field}.targets")
    for name in ("weights", "logprobs", "advantages"):
        values: Float32s | None = getattr(datum, name)
        if values is not None:
            _check_floats(values, f"{field}.{name}")
            _check_length(values, num_tokens, f"{field}.{name}")
        elif name in needed:
            raise CallerError(
                f"the loss needs {name}",
                field=f"{field}.{name}",
                remedy="give one number a token",
            )


def _check_ints(values: Int32s, field: str) -> None:
    _check_whole(values, field, "int32")
    numbers = int32s(values)
    if not numbers:
        raise CallerError("there are no tokens", field=field, remedy="give at least one")
    if min(numbers) < 0 or max(numbers) >= _INT32_END:
        raise CallerError("not every token is an id", field=field, remedy="use 0 to 2^31 - 1")


def _check_floats(values: Float32s, field: str) -> None:
    _check_whole(values, field, "float32")
    numbers = float32s(values)
    # This runs in C: a sum of float32 in float64 is finite if and only if every term is.
    if not math.isfinite(sum(numbers)):
        raise CallerError("not every number is finite", field=field, remedy="send no inf or nan")
    if isinstance(values, list) and numbers and max(map(abs, numbers)) > _FLOAT32_MAX:
        raise CallerError(
            "not every number is a float32", field=field, remedy="use -3.4e38 to 3.4e38"
        )


def _check_whole(values: Int32s | Float32s, field: str, kind: str) -> None:
    if isinstance(values, bytes) and len(values) % 4:
        raise CallerError(
            f"{len(values)} bytes are no whole number of {kind}",
            field=field,
            remedy=f"send little-endian {kind}, 4 bytes each",
        )


def _check_length(values: Int32s | Float32s, num_tokens: int, field: str) -> None:
    if length(values) != num_tokens:
        raise CallerError(
            f"{length(values)} values for {num_tokens} tokens",
            field=field,
            remedy="every array of a datum has the length of tokens",
        )


def _check_clip(args: ForwardBackward) -> None:
    _check_finite(args.clip_low, "args.clip_low")
    _check_finite(args.clip_high, "args.clip_high")
    if args.clip_low > args.clip_high:
        raise CallerError(
            f"clip_low {args.clip_low} is above clip_high {args.clip_high}",
            field="args.clip_low",
            remedy="they bound the probability ratio, e.g. 0.8 and 1.2",
        )


def _check_adam(adam: AdamParams) -> None:
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        _check_finite(getattr(adam, name), f"args.adam.{name}")
    for name in ("beta1", "beta2"):
        value = getattr(adam, name)
        if not 0.0 <= value < 1.0:
            raise CallerError(
                f"{value} is no decay rate", field=f"args.adam.{name}", remedy="use 0 to below 1"
            )


def _check_finite(value: float, field: str) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise CallerError(f"{value} is out of range", field=field, remedy="use a number of 0 or up")


def _check_range(value: int, low: int, high: int, field: str, what: str) -> None:
    if not low <= value <= high:
        raise CallerError(
            f"{value} is out of range", field=field, remedy=f"use {low} to {high} {what}"
        )


def check_session(session: int, newest: int) -> None:
    """Refuse an operation of any but the newest session of a job.

    Args:   newest: the number that the last `session.attach` gave out; 0: there was none.
    Raises: CallerError: the session was never given out. SessionOver: a newer one has attached.
    """
    if session == newest and newest > 0:
        return
    if newest == 0 or session > newest:
        raise CallerError(
            f"session {session} was never given out",
            code=Code.FAILED_PRECONDITION,
            field="session",
            remedy="attach to the job and use the session number of the answer",
        )
    raise SessionOver(session, newest)


def estimate_size(args: Args) -> int:
    """The most tokens of an operation: of all its samples, or of its batch; 0 without either."""
    match args:
        case Generate():
            prompts = sum(length(prompt.tokens) for prompt in args.prompts)
            new = len(args.prompts) * args.sampling.max_tokens
            return (prompts + new) * args.num_samples
        case Forward() | ForwardBackward():
            return sum(length(datum.tokens) for datum in args.batch)
    return 0


def queued(key: OperationKey, operation: Operation) -> QueuedOperation:
    """The header of a sound operation."""
    args = operation.args
    version = None
    if isinstance(args, SyncWeights):
        policy = DeploymentKey(key.tenant, key.job, args.policy)
        version = VersionKey(policy, args.version)
    return QueuedOperation(
        key=key,
        id=operation.id,
        kind=kind_of(args),
        after=operation.after,
        version=version,
        size=estimate_size(args),
        session=operation.session,
        timeout_s=operation.timeout_s,
    )


def refused(
    key: OperationKey, payload: bytes, content_type: str, error: ErrorInfo
) -> QueuedOperation:
    """The header of a bad operation, with as much of its identity as can be read.

    It is small, whatever the payload: an error may quote the value that it complains about.
    """
    identity = identify(payload, content_type)
    return QueuedOperation(
        key=key,
        id=identity.id,
        kind=identity.args.type if identity.args.type in _KINDS else "",
        error=replace(
            error,
            message=_short(error.message),
            field=_short(error.field),
            remedy=_short(error.remedy),
        ),
    )


def identify(payload: bytes, content_type: str) -> _Identity:
    """The id and kind in a payload that may be no Operation; empty where they cannot be read."""
    try:
        identity: _Identity = decode(payload, _Identity, content_type)
    except CallerError:
        return _Identity()
    return identity if len(identity.id) <= MAX_ID_LENGTH else _Identity(args=identity.args)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"
