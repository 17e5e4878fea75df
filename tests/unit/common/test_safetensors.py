"""The format against its own library, and headers that claim what cannot be."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from phaseloom.common.tensors.safetensors import (
    ALIGNMENT_BYTES,
    LENGTH_BYTES,
    decode_header,
    file_names,
    header_bytes,
    lay_out,
    split,
)

DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"]
tensors = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(
        st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.binary()
    ),
    max_size=5,
)


def array(dtype: str, shape: tuple[int, ...], seed: bytes) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    values = np.resize(np.frombuffer(seed or b"\1", np.uint8), size)
    return values.astype(dtype).reshape(shape)


@given(tensors)
def test_what_is_laid_out_here_is_read_by_the_library(
    drawn: dict[str, tuple[str, tuple[int, ...], bytes]],
) -> None:
    arrays = {name: array(*drawn[name]) for name in drawn}
    described = [(name, a.dtype.name, a.shape) for name, a in arrays.items()]
    header, entries = lay_out(described, {"format": "pt"})
    assert len(header) % ALIGNMENT_BYTES == 0
    content = header + b"".join(a.tobytes() for a in arrays.values())
    loaded = load(content)
    assert loaded.keys() == arrays.keys()
    for entry, (name, expected) in zip(entries, arrays.items(), strict=True):
        assert np.array_equal(loaded[name], expected)
        assert content[entry.offset : entry.end] == expected.tobytes()
    again = decode_header(header[LENGTH_BYTES:], len(content))
    assert sorted(again, key=lambda e: e.name) == sorted(entries, key=lambda e: e.name)


@given(tensors)
def test_what_the_library_writes_is_read_here(
    drawn: dict[str, tuple[str, tuple[int, ...], bytes]],
) -> None:
    arrays = {name: array(*drawn[name]) for name in drawn}
    content = save(arrays)
    length = header_bytes(content[:LENGTH_BYTES])
    entries = decode_header(content[LENGTH_BYTES : LENGTH_BYTES + length], len(content))
    assert {entry.name for entry in entries} == arrays.keys()
    for entry in entries:
        assert (entry.dtype, entry.shape) == (
            arrays[entry.name].dtype.name,
            arrays[entry.name].shape,
        )
        assert content[entry.offset : entry.end] == arrays[entry.name].tobytes()


def header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


def one(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        header(a=one(dtype="F31")),
        header(a=one(shape=[-1])),
        header(a=one(offsets=[0, 4])),
        header(a=one(offsets=[4, 12])),
        header(a=one(), b=one()),
        header(a=one(), b=one(offsets=[12, 20])),
        header(a={"dtype": "F32"}),
        header(a=one(shape=[2**62], offsets=[0, 8])),
    ],
)
def test_header_that_contradicts_itself_or_its_file_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_header(text, LENGTH_BYTES + len(text) + 8)


def test_header_that_claims_to_be_endless_is_refused() -> None:
    with pytest.raises(ValueError, match="must have at most"):
        header_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(ValueError, match="truncated"):
        header_bytes(b"\0\0")


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_files_are_as_full_as_they_may_be_and_no_fuller(sizes: list[int], max_bytes: int) -> None:
    counts = split(sizes, max_bytes)
    assert sum(counts) == len(sizes)
    start = 0
    for count in counts:
        group = sizes[start : start + count]
        start += count
        assert group
        assert len(group) == 1 or sum(group) <= max_bytes
        if start < len(sizes):
            assert sum(group) + sizes[start] > max_bytes


def test_shards_are_named_as_hugging_face_does() -> None:
    assert file_names("model", 1) == ["model.safetensors"]
    assert file_names("model", 2) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_name_of_a_file_is_no_path() -> None:
    assert all(Path(name).name == name for name in file_names("training", 3))
