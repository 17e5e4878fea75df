"""The protobuf messages of the Tinker API, built from a table of their fields.

Byte arrays are packed little-endian. The field numbers are facts of the public SDK, 0.25 to 0.38.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "phaseloom.gateway.tinker"
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE = 11
_OPTIONAL, _REPEATED = 1, 3

_FIELDS: dict[str, list[tuple[int, str, str, str]]] = {
    "EncodedTextChunk": [(1, "tokens", "bytes", "")],
    "OtherChunk": [],
    "Chunk": [
        (1, "encoded_text", "EncodedTextChunk", "one of"),
        (2, "image", "OtherChunk", "one of"),
        (3, "dmel", "OtherChunk", "one of"),
    ],
    "SparseCsr": [
        (1, "values", "bytes", ""),
        (2, "crow_indices", "bytes", ""),
        (3, "col_indices", "bytes", ""),
    ],
    "Tensor": [
        (1, "dense", "bytes", "one of"),
        (2, "sparse_csr", "SparseCsr", "one of"),
        (3, "dtype", "int32", ""),
        (4, "shape", "int64", "repeated"),
    ],
    "Datum": [(1, "model_input", "Chunk", "repeated"), (2, "loss_fn_inputs", "Tensor", "map")],
    "LossConfigValue": [(1, "number", "double", "one of"), (2, "text", "string", "one of")],
    "ForwardBackwardRequest": [
        (1, "model_id", "string", ""),
        (2, "seq_id", "int32", ""),
        (3, "data", "Datum", "repeated"),
        (4, "loss_fn", "string", ""),
        (5, "loss_fn_config", "double", "map"),
        (6, "forward_only", "bool", ""),
        (7, "loss_fn_config_values", "LossConfigValue", "map"),
    ],
    "BatchedTensor": [
        (1, "data", "bytes", ""),
        (2, "offsets", "bytes", ""),
        (3, "dtype", "int32", ""),
        (4, "trailing_shape", "int64", "repeated"),
    ],
    "ArrayRecord": [
        (1, "type_tag", "string", ""),
        (2, "fields", "BatchedTensor", "map"),
        (3, "num_datums", "int64", ""),
    ],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", "string", ""),
        (2, "loss_fn_outputs", "ArrayRecord", "repeated"),
        (3, "metrics", "double", "map"),
    ],
    "TopkLogprobs": [
        (1, "token_ids", "bytes", ""),
        (2, "logprobs", "bytes", ""),
        (3, "k", "int32", ""),
        (4, "length", "int32", ""),
    ],
    "SampledSequence": [
        (1, "stop_reason", "int32", ""),
        (2, "tokens", "bytes", ""),
        (3, "logprobs", "bytes", ""),
        (4, "topk_sampled_logprobs", "TopkLogprobs", ""),
    ],
    "SampleResponse": [
        (1, "sequences", "SampledSequence", "repeated"),
        (2, "prompt_logprobs", "bytes", ""),
        (3, "topk_prompt_logprobs", "TopkLogprobs", ""),
    ],
}
"""Message → (number, name, type, label) of each field. Keys of maps are strings."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="phaseloom/gateway/tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if any(label == "one of" for *_, label in fields):
            message.oneof_decl.add(name="kind")
        for number, field_name, kind, label in fields:
            is_many = label in ("repeated", "map")
            field = message.field.add(
                name=field_name, number=number, label=_REPEATED if is_many else _OPTIONAL
            )
            if label == "map":
                words = field_name.split("_")
                entry = message.nested_type.add(name="".join(map(str.capitalize, words)) + "Entry")
                entry.options.map_entry = True
                _set_type(entry.field.add(name="key", number=1, label=_OPTIONAL), "string")
                _set_type(entry.field.add(name="value", number=2, label=_OPTIONAL), kind)
                _set_type(field, f"{name}.{entry.name}")
                continue
            _set_type(field, kind)
            if label == "one of":
                field.oneof_index = 0
    return file


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{kind}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
TopkLogprobs = _class("TopkLogprobs")
Datum = _class("Datum")
Tensor = _class("Tensor")

DTYPES = {0: "<f4", 1: "<f4", 2: "<i8", 3: "<i4"}
"""Tensor dtypes that are supported, by number; bfloat16 (4) is not."""
FLOAT32 = 1
STOP, LENGTH = 0, 1
"""Reasons why a sequence ended."""
