"""Between the Tinker API's messages and the mesh's operations. Pure.

Positions, losses and sums are the same on both sides: position i predicts target i, a loss is a
plain sum over tokens, gradients add up until a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from phaseloom.common.contract.arrays import Float32s, int32s, pack_float32s, pack_int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    Loss,
    SamplingParams,
)
from phaseloom.gateway.core import wire

_SETTINGS = {
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
    "beta": "beta",
}
_ARRAYS = {"weights", "logprobs", "advantages"}
_OUTPUT = "ArrayRecord"


def read_request(content: bytes) -> Any:
    """A `ForwardBackwardRequest`. Raises: CallerError: it is none."""
    request = wire.ForwardBackwardRequest()
    try:
        request.ParseFromString(content)
    except DecodeError as error:
        raise CallerError(
            f"the body is no ForwardBackwardRequest: {error}",
            field="body",
            remedy="use an SDK from 0.25 on",
        ) from error
    return request


def trained(request: Any) -> Forward | ForwardBackward:
    """The operation that a `ForwardBackwardRequest` asks for.

    Raises: CallerError: naming what the mesh does not carry.
    """
    batch = [_datum(request, index) for index in range(len(request.data))]
    if request.forward_only:
        return Forward([Datum(datum.tokens, datum.targets) for datum in batch])
    try:
        loss = Loss(request.loss_fn)
    except ValueError:
        raise CallerError(
            f"there is no loss {request.loss_fn!r}",
            field="loss_fn",
            remedy=f"use one of {', '.join(Loss)}, or forward_backward_custom",
        ) from None
    settings = {_SETTINGS[name]: value for name, value in _config(request).items()}
    return ForwardBackward(batch, loss, logprobs=True, **settings)


def _config(request: Any) -> Mapping[str, float]:
    config = {name: value.number for name, value in request.loss_fn_config_values.items()}
    config = config or dict(request.loss_fn_config)
    if unknown := sorted(config.keys() - _SETTINGS):
        raise CallerError(
            f"the losses have no setting {unknown[0]!r}",
            field="loss_fn_config",
            remedy=f"use {', '.join(_SETTINGS)}",
        )
    return config


def _datum(request: Any, index: int) -> Datum:
    datum, field = request.data[index], f"data[{index}]"
    tokens = b"".join(_text(chunk, f"{field}.model_input") for chunk in datum.model_input)
    arrays = {
        name: _dense(tensor, f"{field}.loss_fn_inputs.{name}")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = arrays.pop("target_tokens", None)
    if targets is None:
        raise CallerError(
            "target_tokens are missing",
            field=f"{field}.loss_fn_inputs",
            remedy="give the token that each position predicts",
        )
    if request.forward_only:
        arrays = {}
    elif request.loss_fn == Loss.CROSS_ENTROPY:
        arrays.setdefault("weights", np.ones(len(targets)))
    if unknown := sorted(arrays.keys() - _ARRAYS):
        raise CallerError(
            f"the losses do not use {unknown[0]!r}",
            field=f"{field}.loss_fn_inputs",
            remedy=f"leave it out; losses use {', '.join(sorted(_ARRAYS))}",
        )
    floats = {name: array.astype("<f4").tobytes() for name, array in arrays.items()}
    return Datum(tokens, targets.astype("<i4").tobytes(), **floats)


def _text(chunk: Any, field: str) -> bytes:
    if chunk.WhichOneof("kind") != "encoded_text":
        raise CallerError("only text can be given", field=field, remedy="leave images out")
    content: bytes = chunk.encoded_text.tokens
    return content


def _dense(tensor: Any, field: str) -> npt.NDArray[Any]:
    if tensor.WhichOneof("kind") != "dense" or tensor.dtype not in wire.DTYPES:
        raise CallerError(
            "only dense float32, int32 and int64 tensors can be given",
            field=field,
            remedy="convert it",
        )
    if len(tensor.shape) > 1:
        raise CallerError(
            f"a tensor of shape {list(tensor.shape)} cannot be given",
            field=field,
            remedy="give one number for each token",
        )
    try:
        return np.frombuffer(tensor.dense, wire.DTYPES[tensor.dtype])
    except ValueError as error:
        raise CallerError(
            f"the tensor's bytes are no array: {error}",
            field=field,
            remedy="give as many bytes as the dtype and the shape say",
        ) from error


def trained_output(
    result: ForwardResult | ForwardBackwardResult, metrics: Mapping[str, float]
) -> bytes:
    """A `ForwardBackwardOutput` with each datum's log-probabilities."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT)
    arrays = [_packed(each) for each in result.logprobs]
    record = output.loss_fn_outputs.add(num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.data = b"".join(arrays)
    field.offsets = np.cumsum([0, *map(len, arrays)], dtype="<i8").tobytes()
    field.dtype = wire.FLOAT32
    for name, value in metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())


def forward_loss(request: Any, result: ForwardResult) -> dict[str, float]:
    """The loss of a batch whose log-probabilities are known, where it is a sum of weights times
    these; the SDK's `forward` has it, the mesh's has not."""
    if request.loss_fn != Loss.CROSS_ENTROPY:
        return {}
    total = 0.0
    for index, logprobs in enumerate(result.logprobs):
        given = request.data[index].loss_fn_inputs
        values = np.frombuffer(_packed(logprobs), "<f4")
        weights = _dense(given["weights"], "weights") if "weights" in given else np.ones(1)
        total -= float((values * weights).sum())
    return {"loss:sum": total}


def _packed(values: Float32s) -> bytes:
    return pack_float32s(values) if isinstance(values, list) else bytes(values)


def sampled_output(result: GenerateResult) -> bytes:
    """A `SampleResponse`; the log-probabilities are the model's own, at temperature 1."""
    output = wire.SampleResponse()
    for sequence in result.sequences[0]:
        output.sequences.add(
            stop_reason=wire.STOP if sequence.stop_reason == "stop" else wire.LENGTH,
            tokens=pack_int32s(int32s(sequence.tokens)),
            logprobs=_packed(sequence.logprobs),
        )
    if result.prompt_logprobs:
        values = np.frombuffer(_packed(result.prompt_logprobs[0]), "<f4").copy()
        values[0] = np.nan  # nothing precedes the first token
        output.prompt_logprobs = values.tobytes()
    return bytes(output.SerializeToString())


def adam(params: Mapping[str, float]) -> AdamParams:
    """The SDK's defaults where it leaves something out."""
    params = {name: value for name, value in params.items() if value is not None}
    known = AdamParams.__struct_fields__
    if unknown := sorted(params.keys() - set(known)):
        raise CallerError(
            f"AdamW has no {unknown[0]!r}",
            field="adam_params",
            remedy=f"use {', '.join(known)}",
        )
    defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    return AdamParams(**{**defaults, **params})


def sampling(params: Mapping[str, Any], prompt_tokens: int, context: int) -> SamplingParams:
    """How to sample, from the SDK's `SamplingParams`.

    Args:   context: the most tokens of prompt and sample together.
    Raises: CallerError: the prompt leaves no room.
    """
    room = context - prompt_tokens
    if room < 1:
        raise CallerError(
            f"a prompt of {prompt_tokens} tokens leaves no room in {context}",
            field="prompt",
            remedy="shorten it",
        )
    stop = params.get("stop") or []
    stops: Sequence[Any] = [stop] if isinstance(stop, str | int) else stop
    return SamplingParams(
        min(params.get("max_tokens") or room, room),
        temperature=params.get("temperature", 1.0),
        top_k=max(params.get("top_k") or 0, 0),
        top_p=params.get("top_p") or 1.0,
        stop_token_ids=[each for each in stops if isinstance(each, int)],
        stop_strings=[each for each in stops if isinstance(each, str)],
    )


def prompt_tokens(prompt: Mapping[str, Any]) -> list[int]:
    """The tokens of an SDK's `ModelInput`. Raises: CallerError: it has other than text."""
    tokens: list[int] = []
    for index, chunk in enumerate(prompt.get("chunks", [])):
        if chunk.get("type") != "encoded_text":
            raise CallerError(
                "only text can be given",
                field=f"prompt.chunks[{index}]",
                remedy="leave images out",
            )
        tokens += chunk["tokens"]
    if not tokens:
        raise CallerError("the prompt is empty", field="prompt", remedy="give a token")
    return tokens
