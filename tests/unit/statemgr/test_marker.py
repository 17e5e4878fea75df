"""What says of a checkpoint who wrote it: every flipped bit of it is noticed or means nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.operations import SaveStateResult
from phaseloom.statemgr.checkpoints.marker import FileSums, Marker, decode_marker, superseded

MARKER = Marker(
    "op", SaveStateResult("job/policy/c", "f" * 64), 7, 3, 2, {"m": FileSums(5, 2**20, "0" * 16)}
)


def test_marker_comes_back() -> None:
    assert decode_marker(MARKER.encode()) == MARKER
    assert json.loads(MARKER.encode())["operation_id"] == "op"


@given(st.integers(0, len(MARKER.encode()) - 1), st.integers(0, 7))
def test_flipped_bit_never_changes_what_it_says(at: int, bit: int) -> None:
    text = bytearray(MARKER.encode())
    text[at] ^= 1 << bit
    with pytest.raises(ValueError, match=r".*"):
        decode_marker(bytes(text))


def test_marker_without_a_checksum_for_each_block_is_refused() -> None:
    for sums in (FileSums(2**20 + 1, 2**20, "0" * 16), FileSums(5, 0, ""), FileSums(-1, 1, "")):
        text = Marker("op", MARKER.result, 7, 3, 2, {"m": sums}).encode()
        with pytest.raises(ValueError, match="checksums of some blocks"):
            decode_marker(text)


def marker(number: int, keep: int) -> Marker:
    return Marker("op", MARKER.result, 7, number, keep, {})


def test_newest_stay_and_what_was_saved_to_stay() -> None:
    markers = [(f"c{n}", marker(n, keep=0 if n == 2 else 3)) for n in range(1, 7)]
    assert superseded(markers, 2, set()) == ["c4", "c3", "c1"]
    assert superseded(markers, 2, {"c3", "c6"}) == ["c4", "c1"]
    assert superseded(markers, 9, set()) == []
