"""What a delta makes of its base is exact, and what is no delta of it is refused."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.statemgr.transfer.delta import DeltaError, apply, encode

BLOCK_BYTES = 512


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Bytes and the same with some others in it; the size is odd now and then."""
    base = draw(st.binary(max_size=3 * BLOCK_BYTES + 5))
    content = bytearray(base)
    if content:
        places = st.integers(0, len(content) - 1)
        for place, byte in draw(st.lists(st.tuples(places, st.integers(0, 255)))):
            content[place] = byte
    return base, bytes(content)


def _delta(base: bytes, content: bytes) -> bytes:
    delta = encode(memoryview(base), memoryview(content), 4 * len(content) + 64)
    assert delta is not None
    return delta


@given(_pairs())
def test_a_delta_makes_the_new_bytes_of_the_old_ones(pair: tuple[bytes, bytes]) -> None:
    base, content = pair
    assert apply(memoryview(base), memoryview(_delta(base, content))) == content


@given(st.binary(max_size=1500), st.binary(max_size=1500))
def test_bytes_that_share_nothing_are_exact_too(base: bytes, content: bytes) -> None:
    size = min(len(base), len(content))
    base, content = base[:size], content[:size]
    assert apply(memoryview(base), memoryview(_delta(base, content))) == content


@given(_pairs())
def test_base_stays_as_it_is(pair: tuple[bytes, bytes]) -> None:
    base, content = pair
    kept = bytearray(base)
    apply(memoryview(kept), memoryview(_delta(base, content)))
    assert kept == base


@given(_pairs(), st.binary(max_size=200))
def test_garbage_is_refused_or_makes_as_many_bytes(pair: tuple[bytes, bytes], noise: bytes) -> None:
    """What it makes then is not what the checksum beside it is of."""
    base, _ = pair
    for garbage in (noise, zlib.compress(noise), zlib.compress(noise) + noise):
        try:
            made = apply(memoryview(base), memoryview(garbage))
        except DeltaError:
            continue
        assert len(made) == len(base)


@given(_pairs(), st.data())
def test_a_delta_that_was_cut_or_grew_is_refused(
    pair: tuple[bytes, bytes], data: st.DataObject
) -> None:
    base, content = pair
    delta = _delta(base, content)
    cut = delta[: data.draw(st.integers(0, len(delta) - 1))]
    for bad in (cut, delta + b"x"):
        with pytest.raises(DeltaError):
            apply(memoryview(base), memoryview(bad))


def test_a_delta_of_another_size_is_refused() -> None:
    delta = _delta(bytes(4 * BLOCK_BYTES), bytes(2 * BLOCK_BYTES) + b"\1" * 2 * BLOCK_BYTES)
    for size in (0, BLOCK_BYTES, 4 * BLOCK_BYTES - 2, 4 * BLOCK_BYTES + 1):
        with pytest.raises(DeltaError):
            apply(memoryview(bytes(size)), memoryview(delta))


def test_an_element_behind_the_end_is_refused() -> None:
    """A block that is not full has places for more than there are."""
    delta = zlib.compress(b"\1\0" + b"\1\0") + b"\xff"
    with pytest.raises(DeltaError, match="element 255 is beyond the last of 3"):
        apply(memoryview(bytes(6)), memoryview(delta))


def test_a_bomb_is_not_inflated() -> None:
    with pytest.raises(DeltaError):
        apply(memoryview(bytes(1024)), memoryview(zlib.compress(bytes(2**24))))


def test_a_delta_above_the_limit_is_not_made() -> None:
    base, content = bytes(8192), bytes(range(256)) * 32
    size = len(_delta(base, content))
    assert encode(memoryview(base), memoryview(content), size) is not None
    assert encode(memoryview(base), memoryview(content), size - 1) is None
    assert encode(memoryview(base), memoryview(content), 0) is None


def test_few_changed_elements_take_few_bytes() -> None:
    """One element in fifty, each to the next value that its dtype has."""
    base = bytearray(zlib.compress(bytes(range(256)) * 4096, 0)[:1048576])
    content = bytearray(base)
    for place in range(0, len(content), 100):
        content[place] ^= 1
    assert len(_delta(bytes(base), bytes(content))) < 0.03 * len(content)


def test_a_sample_tells_what_no_delta_is_worth_and_lets_the_others_pass() -> None:
    """As weights in float32 and in bfloat16: of one most elements change, of the other some."""
    chance = random.Random(1)
    base = chance.randbytes(2**20)
    other, few = bytearray(base), bytearray(base)
    other[::2] = bytes(byte ^ 1 for byte in base[::2])
    for place in chance.sample(range(len(base)), len(base) // 100):
        few[place] ^= 1
    limit_bytes = len(base) // 4
    assert encode(memoryview(base), memoryview(other), limit_bytes) is None
    delta = encode(memoryview(base), memoryview(few), limit_bytes)
    assert delta is not None
    assert apply(memoryview(base), memoryview(delta)) == few


def test_a_sample_meets_all_columns_of_a_matrix() -> None:
    """One column in 64 has changed, in every row."""
    base = random.Random(1).randbytes(2**20)
    content = bytearray(base)
    content[::128] = bytes(byte ^ 1 for byte in base[::128])
    assert encode(memoryview(base), memoryview(content), len(base) // 4) is not None
