"""Conversions between the Tinker API's messages and the mesh's operations. Pure.

Positions, losses and sums are the same on both sides: position i predicts target i, a loss is a
plain sum over tokens, gradients add up until a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from msgspec.structs import replace

from phaseloom.client.batches import pack_prompt, split_batch
from phaseloom.common.contract.arrays import (
    Float32s,
    Int32s,
    int32s,
    pack_float32s,
    pack_int32s,
)
from phaseloom.common.contract.checks import MAX_NEW_TOKENS, MAX_TARGETS
from phaseloom.common.contract.codec import decode, encode
from phaseloom.common.contract.errors import CallerError, ErrorInfo
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    Loss,
    Prompt,
    SamplingParams,
)
from phaseloom.gateway.core import wire

_CLIP = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
_SETTINGS = {Loss.PPO: _CLIP, Loss.CISPO: _CLIP, Loss.DRO: {"beta": "beta"}}
"""For each loss with settings: the SDK's name of a setting → the mesh's name."""
_ARRAYS = {"weights", "logprobs", "advantages"}
_OUTPUT = "ArrayRecord"
_MASKED = -99_999.0
"""The SDK's log-probability for a position that has none."""
MAX_DATUMS = 8192
"""Maximum datums of a call. The SDK sends at most 1,024."""
MAX_DENSE_BYTES = 64 * 2**20
"""Maximum bytes of a call's tensors on the mesh, where sparse ones become dense."""
_MAX_HEAD_FIELDS = 4096


class Converted(msgspec.Struct, frozen=True):
    """A `ForwardBackwardRequest` as operations of the mesh."""

    parts: list[bytes] = []
    """The arguments of the operations in MessagePack: more than one if the batch does not fit in
    one message."""
    num_targets: int = 1
    weights: list[bytes] | None = None
    """Each datum's weights (float32), if a `forward` reports its loss. Empty: all are 1."""
    refusal: ErrorInfo | None = None
    """Why the mesh does not support the request."""

    @property
    def args(self) -> list[Forward | ForwardBackward]:
        return [decode(part, Forward | ForwardBackward) for part in self.parts]


def converted(content: bytes, context: int) -> Converted:
    """Convert the body of a request, and split its batch if necessary.

    Args:   context: maximum tokens of a datum.
    Raises: CallerError: it cannot be read, or one datum is too large for a message.
    """
    request = read_request(content)
    try:
        args = trained(request, context)
    except CallerError as error:
        return Converted(refusal=error.info)
    has_loss = request.forward_only and request.loss_fn == Loss.CROSS_ENTROPY
    return Converted(
        [encode(replace(args, batch=part)) for part in split_batch(args.batch)],
        args.batch[0].num_targets if args.batch else 1,
        [_weights(datum) for datum in request.data] if has_loss else None,
    )


def _weights(datum: Any) -> bytes:
    inputs = datum.loss_fn_inputs
    if "weights" not in inputs:
        return b""
    return bytes(_array(inputs["weights"], "weights").astype("<f4").tobytes())


def head(content: bytes) -> tuple[str, int]:
    """Return the model and the number of a call from the first fields of its body, so that a call
    that cannot be read or converted still uses up its number.

    Raises: CallerError: the body does not begin with them.
    """
    model, seq, position = "", 0, 0
    try:
        for _ in range(_MAX_HEAD_FIELDS):
            tag, position = _varint(content, position)
            if tag & 7 == 2:
                length, position = _varint(content, position)
                if tag == 10:
                    model = content[position : position + length].decode()
                position += length
            elif tag & 7 == 0:
                value, position = _varint(content, position)
                seq = value if tag == 16 else seq
            else:
                break
            if model and seq:
                return model, seq - (seq >> 63 << 64)
    except (IndexError, UnicodeDecodeError):
        pass
    raise CallerError(
        "expected a ForwardBackwardRequest that begins with model_id and seq_id",
        field="body",
        remedy="use version 0.25 or newer of the SDK",
    )


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return a number and the position after it. Raises: IndexError: there is none."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError


def read_request(content: bytes) -> Any:
    """Parse a body as a `ForwardBackwardRequest`. Raises: CallerError: it is not one."""
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(content)
    except DecodeError as error:
        raise CallerError(
            f"expected a ForwardBackwardRequest: {error}",
            field="body",
            remedy="use version 0.25 or newer of the SDK",
        ) from error
    return request


def trained(request: Any, context: int) -> Forward | ForwardBackward:
    """Convert a `ForwardBackwardRequest` to an operation.

    Args:   context: maximum tokens of a datum.
    Raises: CallerError: names the part that the mesh does not support.
    """
    _check_size(request)
    batch = [_datum(request, index) for index in range(len(request.data))]
    for index, datum in enumerate(batch):
        num_tokens = len(datum.tokens) // 4
        if num_tokens > context:
            raise CallerError(
                f"a datum of {num_tokens} tokens is longer than the model's context, {context}",
                field=f"data[{index}].model_input",
                remedy="shorten it, or cut it in two",
            )
    _check_same_shape(batch)
    try:
        loss = Loss(request.loss_fn)
    except ValueError:
        raise CallerError(
            f"unknown loss {request.loss_fn!r}",
            field="loss_fn",
            remedy=f"use one of {', '.join(Loss)}, or forward_backward_custom",
        ) from None
    if request.forward_only:
        return Forward([Datum(d.tokens, d.targets, num_targets=d.num_targets) for d in batch])
    return ForwardBackward(batch, loss, logprobs=True, entropy=False, **_settings(request, loss))


def _check_size(request: Any) -> None:
    """Check how large the tensors are once they are dense, before any of them is.

    Raises: CallerError: they are too large.
    """
    if len(request.data) > MAX_DATUMS:
        raise CallerError(
            f"a call must have at most {MAX_DATUMS} datums, got {len(request.data)}",
            field="data",
            remedy="send fewer datums per call",
        )
    num_bytes = 0
    for datum in request.data:
        for tensor in datum.loss_fn_inputs.values():
            is_sparse = tensor.WhichOneof("kind") == "sparse_csr"
            num_bytes += 4 * math.prod(tensor.shape) if is_sparse else len(tensor.dense)
            if min(tensor.shape, default=0) < 0 or num_bytes > MAX_DENSE_BYTES:
                raise CallerError(
                    "the tensors of a call must have 0 or more rows and at most "
                    f"{MAX_DENSE_BYTES} bytes without sparsity",
                    field="data",
                    remedy="send fewer datums per call, or fewer targets per position",
                )


def _check_same_shape(batch: Sequence[Datum]) -> None:
    """Check that the targets of all datums have the same shape, because one array holds the answer.

    Raises: CallerError: a datum's targets have another shape.
    """
    for index, datum in enumerate(batch):
        if datum.num_targets != batch[0].num_targets:
            raise CallerError(
                f"expected {batch[0].num_targets} targets per position as in data[0], "
                f"got {datum.num_targets}",
                field=f"data[{index}].loss_fn_inputs.target_tokens",
                remedy="give all datums of a call equally many columns; pad with weights of 0",
            )


def _settings(request: Any, loss: Loss) -> dict[str, float]:
    """Return the settings of a loss. Raises: CallerError: an unknown setting, or not a number."""
    values = request.loss_fn_config_values
    values_by_name = {name: value_field.number for name, value_field in values.items()} or {
        **request.loss_fn_config
    }
    allowed = _SETTINGS.get(loss, {})
    settings: dict[str, float] = {}
    for name, value in sorted(values_by_name.items()):
        if name not in allowed:
            raise CallerError(
                f"the loss {loss} has no setting {name!r}",
                field="loss_fn_config",
                remedy=f"use {', '.join(allowed)}" if allowed else "leave it out",
            )
        if name in values and values[name].WhichOneof("kind") == "text":
            raise CallerError(
                f"{name} must be a number, got {values[name].text!r}",
                field="loss_fn_config",
                remedy="use a number",
            )
        settings[allowed[name]] = value
    return settings


def _datum(request: Any, index: int) -> Datum:
    datum, field = request.data[index], f"data[{index}]"
    tokens = b"".join(_text(chunk, f"{field}.model_input") for chunk in datum.model_input)
    arrays = {
        name: _array(tensor, f"{field}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = arrays.pop("target_tokens", None)
    if targets is None:
        raise CallerError(
            "target_tokens are missing",
            field=f"{field}.loss_fn_inputs",
            remedy="give the token that each position should predict",
        )
    if request.forward_only:  # the gateway computes the loss from these weights
        arrays = {name: array for name, array in arrays.items() if name == "weights"}
    elif request.loss_fn == Loss.CROSS_ENTROPY:
        arrays.setdefault("weights", np.ones(targets.shape, "<f4"))
    if unknown := sorted(arrays.keys() - _ARRAYS):
        raise CallerError(
            f"no loss has an input {unknown[0]!r}",
            field=f"{field}.loss_fn_inputs",
            remedy=f"omit it; losses use {', '.join(sorted(_ARRAYS))}",
        )
    for name, array in arrays.items():
        if array.shape != targets.shape:
            raise CallerError(
                f"expected the shape of target_tokens, {list(targets.shape)}, "
                f"got {list(array.shape)}",
                field=f"{field}.loss_fn_inputs.{name}",
                remedy="give one number for each target",
            )
    with np.errstate(invalid="ignore"):
        ids = targets.astype("<i4")
    if (ids != targets).any():
        raise CallerError(
            "target_tokens must be token ids",
            field=f"{field}.loss_fn_inputs.target_tokens",
            remedy="give integers within the model's vocabulary",
        )
    num_targets = targets.shape[1] if targets.ndim > 1 else 1
    floats: dict[str, Any] = {n: array.astype("<f4").tobytes() for n, array in arrays.items()}
    return Datum(tokens, ids.tobytes(), **floats, num_targets=num_targets)


def _text(chunk: Any, field: str) -> bytes:
    if chunk.WhichOneof("kind") != "encoded_text":
        raise CallerError("only text is supported", field=field, remedy="remove images")
    content: bytes = chunk.encoded_text.tokens
    return content


def _array(tensor: Any, field: str) -> npt.NDArray[Any]:
    """Return the values of a tensor: (T,) for one target per position, or (T, K) for K targets."""
    if tensor.dtype not in wire.DTYPES:
        raise CallerError(
            "only float32, int32 and int64 tensors are supported",
            field=field,
            remedy="convert the tensor",
        )
    shape = [*tensor.shape]
    if len(shape) > 2 or (len(shape) == 2 and not 0 < shape[1] <= MAX_TARGETS):
        raise CallerError(
            f"a tensor of shape {shape} is not supported",
            field=field,
            remedy=f"give a number for each token, or for each of 1 to {MAX_TARGETS} targets of it",
        )
    dtype = wire.DTYPES[tensor.dtype]
    try:
        if tensor.WhichOneof("kind") == "sparse_csr":
            return _densified(tensor.sparse_csr, shape, dtype)
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if len(shape) == 2 else values
    except (ValueError, IndexError) as error:
        raise CallerError(
            f"the tensor's bytes do not match its dtype and shape: {error}",
            field=field,
            remedy="give as many bytes as the dtype and the shape say",
        ) from error


def _densified(sparse: Any, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
    """Expand a matrix in compressed sparse rows. Raises: ValueError, IndexError: it is invalid."""
    rows, columns = shape
    values = np.frombuffer(sparse.values, dtype)
    ends = np.frombuffer(sparse.crow_indices, "<i8")
    at = np.frombuffer(sparse.col_indices, "<i8")
    counts = np.diff(ends)
    is_sound = ends.size == rows + 1 and not ends[0] and ends[-1] == values.size == at.size
    if not is_sound or (counts < 0).any() or ((at < 0) | (at >= columns)).any():
        raise ValueError("the indices of rows and columns contradict each other")
    dense = np.zeros((rows, columns), dtype)
    dense[np.repeat(np.arange(rows), counts), at] = values
    return dense


def trained_output(
    result: ForwardResult | ForwardBackwardResult,
    metrics: Mapping[str, float],
    num_targets: int = 1,
) -> bytes:
    """Build a `ForwardBackwardOutput` with each datum's log-probabilities."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT)
    arrays = [_packed(array_of_datum) for array_of_datum in result.logprobs]
    record = output.loss_fn_outputs.add(num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.data = b"".join(arrays)
    field.offsets = np.cumsum([0, *map(len, arrays)], dtype="<i8").tobytes()
    field.dtype = wire.FLOAT32
    if num_targets > 1:
        field.trailing_shape.append(num_targets)
    for name, value in metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())


def forward_loss(weights: list[bytes] | None, result: ForwardResult) -> dict[str, float]:
    """Compute the loss that the SDK's `forward` returns: the weighted sum of log-probabilities.

    The mesh's `forward` has no loss.

    Returns: `loss:sum`, or nothing for any loss except cross entropy, which has no weights.
    """
    if weights is None:
        return {}
    total = 0.0
    for logprobs, packed_weights in zip(result.logprobs, weights, strict=True):
        values = np.frombuffer(_packed(logprobs), "<f4")
        factors = np.frombuffer(packed_weights, "<f4") if packed_weights else np.ones(1, "<f4")
        total -= float((values * factors).sum(dtype=np.float64))
    return {"loss:sum": total}


def _packed(values: Float32s) -> bytes:
    return pack_float32s(values) if isinstance(values, list) else bytes(values)


def sampled_output(
    result: GenerateResult, num_top: int = 0, num_prompt_top: int = 0, last_n: int = MAX_NEW_TOKENS
) -> bytes:
    """Build a `SampleResponse`. Log-probabilities are the model's own, at temperature 1.

    Args: num_top: number of likeliest tokens to return for each drawn token.
          num_prompt_top: number of likeliest tokens to return for each prompt token.
          last_n: return log-probabilities only for this many last tokens of the prompt.
    """
    output = wire.SampleResponse()
    for sequence in result.sequences[0]:
        output.sequences.add(
            stop_reason=wire.STOP if sequence.stop_reason == "stop" else wire.LENGTH,
            tokens=pack_int32s(int32s(sequence.tokens)),
            logprobs=_packed(sequence.logprobs),
            topk_sampled_logprobs=_topk(sequence.top_tokens, sequence.top_logprobs, num_top),
        )
    if result.prompt_logprobs:
        values = np.frombuffer(_packed(result.prompt_logprobs[0]), "<f4").copy()
        values[: max(1, values.size - last_n)] = np.nan  # nothing precedes the first token
        output.prompt_logprobs = values.tobytes()
    if num_prompt_top and result.prompt_top_tokens:
        tokens, logprobs = result.prompt_top_tokens[0], result.prompt_top_logprobs[0]
        topk = _topk(tokens, logprobs, num_prompt_top)
        assert topk is not None
        lp_TK = np.frombuffer(topk.logprobs, "<f4").reshape(-1, num_prompt_top).copy()
        ids_TK = np.frombuffer(topk.token_ids, "<i4").reshape(-1, num_prompt_top).copy()
        masked = slice(max(1, len(lp_TK) - last_n))
        lp_TK[masked], ids_TK[masked] = _MASKED, 0
        topk.logprobs, topk.token_ids = lp_TK.tobytes(), ids_TK.tobytes()
        output.topk_prompt_logprobs.CopyFrom(topk)
    return bytes(output.SerializeToString())


def _topk(tokens: Int32s, logprobs: Float32s, num_top: int) -> Any:
    """Build the `TopkLogprobs` of some positions, or return None if `num_top` is 0."""
    if not num_top:
        return None
    ids = pack_int32s(int32s(tokens))
    return wire.TopkLogprobs(
        token_ids=ids,
        logprobs=_packed(logprobs),
        k=num_top,
        length=len(ids) // (4 * num_top),
    )


def adam(
    params: Mapping[str, float | None] | None, other_params: Mapping[str, Any] | None
) -> AdamParams:
    """Build the AdamW parameters of an `optim_step`, using the SDK's defaults for missing ones.

    Args:   other_params: parameters of another optimizer.
    Raises: CallerError: an unknown parameter, or parameters of another optimizer.
    """
    if params is None or other_params is not None:
        raise CallerError(
            "adam_params is missing",
            field="adam_params" if other_params is None else "optimizer_params",
            remedy="pass AdamParams; models are trained with AdamW",
        )
    values = {name: value for name, value in params.items() if value is not None}
    allowed = AdamParams.__struct_fields__
    if unknown := sorted(values.keys() - set(allowed)):
        raise CallerError(
            f"AdamW has no parameter {unknown[0]!r}",
            field="adam_params",
            remedy=f"use {', '.join(allowed)}",
        )
    defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    return AdamParams(**{**defaults, **values})


class Chunk(msgspec.Struct, frozen=True):
    """One part of the SDK's `ModelInput`."""

    type: str = ""
    tokens: list[int] = []


class ModelInput(msgspec.Struct, frozen=True):
    chunks: list[Chunk] = []


class SampleParams(msgspec.Struct, frozen=True):
    """The SDK's `SamplingParams`."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | int | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


def sampling(params: SampleParams, prompt_tokens: int, context: int) -> SamplingParams:
    """Convert the SDK's `SamplingParams` to the mesh's.

    If `stop` is an empty list, a sample continues past end-of-sequence tokens.

    Args:   context: maximum tokens of prompt and sample together.
    Raises: CallerError: the prompt fills the context.
    """
    room = context - prompt_tokens
    if room < 1 or not prompt_tokens:
        raise CallerError(
            f"a prompt must have 1 to {context - 1} tokens, got {prompt_tokens}",
            field="prompt",
            remedy=f"use 1 to {context - 1}",
        )
    stop = params.stop or []
    stops: Sequence[str | int] = [stop] if isinstance(stop, str | int) else stop
    return SamplingParams(
        room if params.max_tokens is None else min(params.max_tokens, room),
        temperature=params.temperature,
        top_k=0 if params.top_k == -1 else params.top_k,
        top_p=params.top_p,
        ignore_eos=params.stop == [],
        stop_token_ids=[stop_item for stop_item in stops if isinstance(stop_item, int)],
        stop_strings=[stop_item for stop_item in stops if isinstance(stop_item, str)],
    )


def prompt_tokens(prompt: ModelInput) -> bytes:
    """Return the packed tokens of an SDK's `ModelInput`. Raises: CallerError: it has chunks that
    are not text, or a token is not an int32."""
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise CallerError(
                "only text is supported",
                field=f"prompt.chunks[{index}]",
                remedy="remove images",
            )
        tokens += chunk.tokens
    return bytes(pack_prompt(Prompt(tokens), "prompt").tokens)
