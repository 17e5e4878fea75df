"""The safetensors format: an 8-byte length, a JSON header, then the tensors' bytes without gaps.

The header is padded with spaces so that the data starts at a multiple of 4096. The format allows
this, and it makes direct I/O possible. Pure; independent of any tensor library.

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

ALIGNMENT_BYTES = 4096
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format's reference readers accept."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"

_ITEMS = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
}
_NAMES = {code: name for name, (code, _) in _ITEMS.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in a file."""

    name: str
    dtype: str
    """The dtype in numpy's spelling."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element. Raises: ValueError: the format does not have this dtype."""
    try:
        return _ITEMS[dtype][1]
    except KeyError:
        raise ValueError(f"safetensors has no dtype {dtype!r}") from None


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    return math.prod(shape) * item_bytes(dtype)


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorEntry]]:
    """Return the bytes of a file before the data, and the position of each tensor.

    Args:   tensors: the name, dtype and shape of each tensor, in the order of their bytes.
    Raises: ValueError: the format does not have a dtype.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    listed = list(tensors)
    end = 0
    for name, dtype, shape in listed:
        begin, end = end, end + tensor_bytes(dtype, shape)
        header[name] = {
            "dtype": _ITEMS[dtype][0],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = msgspec.json.encode(header)
    # Pad the header so that the data starts aligned.
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    start = LENGTH_BYTES + len(text)
    entries = [
        TensorEntry(name, dtype, shape, start + header[name]["data_offsets"][0])
        for name, dtype, shape in listed
    ]
    return _LENGTH.pack(len(text)) + text, entries


def header_bytes(prefix: bytes) -> int:
    """Return the length of the JSON that follows the first 8 bytes of a file.

    Raises: ValueError: the file is truncated, or the length exceeds the limit.
    """
    if len(prefix) < LENGTH_BYTES:
        raise ValueError("the file is truncated")
    length: int = _LENGTH.unpack(prefix[:LENGTH_BYTES])[0]
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header must have at most {MAX_HEADER_BYTES} bytes, got {length}")
    return length


class _TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def decode_header(text: bytes, file_bytes: int) -> list[TensorEntry]:
    """Return the tensors of a file, in the order of their bytes.

    Args:   text: the JSON.
            file_bytes: size of the whole file.
    Raises: ValueError: the text is not a header, or tensors overlap, leave gaps or exceed the file.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        described = {
            name: msgspec.json.decode(value, type=_TensorHeader) for name, value in raw.items()
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"cannot decode the header: {error}") from None
    start = LENGTH_BYTES + len(text)
    end = start
    entries = []
    for name, tensor in sorted(described.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in _NAMES or any(size < 0 for size in tensor.shape):
            raise ValueError(f"{name} has an invalid type: {tensor.dtype} {tensor.shape}")
        entry = TensorEntry(
            name, _NAMES[tensor.dtype], tuple(tensor.shape), start + tensor.data_offsets[0]
        )
        # Gaps and overlaps are errors: every byte of the data must belong to exactly one tensor.
        if entry.offset != end or entry.end != start + tensor.data_offsets[1]:
            raise ValueError(f"{name} has an invalid offset or size")
        end = entry.end
        entries.append(entry)
    if end != file_bytes:
        raise ValueError(f"the tensors end at {end}, but the file has {file_bytes} bytes")
    return entries


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of `count` files in Hugging Face's shard naming. A single file has no
    number."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_name(stem: str) -> str:
    """Return the name of the index file, which maps each tensor to its shard."""
    return f"{stem}.safetensors.index.json"


class Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def split(sizes: Iterable[int], max_bytes: int) -> list[int]:
    """Return the number of tensors in each file, in order: as many as fit, but at least one."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if not counts or size > room:
            counts.append(0)
            room = max_bytes
        counts[-1] += 1
        room -= size
    return counts
