"""Slices on their way: given to peers as soon as they are there, and never before."""

from __future__ import annotations

import asyncio

import pytest

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.state_layout import Slice
from phaseloom.statemgr.transfer.served import Fetched, Incoming
from phaseloom.statemgr.transfer.tensorslices import Batch, Box, Piece

ROWS = Slice("0of2", "w", "uint8", [2, 0], [4, 8], 64, 32)
"""Rows 2 to 5 of eight columns, behind 64 bytes of something else."""
OTHER = Slice("1of2", "w", "uint8", [0, 0], [1, 64], 0, 64)


def _batch(of: Slice, start: list[int], size: list[int]) -> Batch:
    return Batch(of.part, [Piece(of, Box("w", start, size))])


async def test_a_box_is_there_when_all_of_it_came() -> None:
    incoming = Incoming([OTHER, ROWS], {})
    memory = memoryview(bytearray(range(96)))
    fetched = Fetched(incoming, memory)
    box = Box("w", [3, 2], [2, 4])
    waiting = asyncio.ensure_future(fetched.until_arrived("0of2", [box]))
    for start, size in (([2, 0], [2, 8]), ([4, 0], [1, 3])):
        incoming.add(_batch(ROWS, start, size))
        await asyncio.sleep(0)
        assert not waiting.done()
    incoming.add(_batch(OTHER, [0, 0], [1, 64]))
    incoming.add(_batch(ROWS, [4, 3], [1, 5]))
    await waiting
    found = b"".join(fetched.find("0of2", box).read())
    # Row 3 is the second one here, and column 2 the third.
    assert found == bytes([74, 75, 76, 77, 82, 83, 84, 85])
    assert not incoming.is_whole
    incoming.add(_batch(ROWS, [5, 0], [1, 8]))
    assert incoming.is_whole


async def test_what_is_forgotten_must_come_again() -> None:
    incoming = Incoming([ROWS], {})
    incoming.add(_batch(ROWS, [2, 0], [4, 8]))
    row = _batch(ROWS, [3, 0], [1, 8])
    incoming.forget(row)
    await incoming.until_arrived(ROWS, Box("w", [2, 0], [1, 8]))
    waiting = asyncio.ensure_future(incoming.until_arrived(ROWS, Box("w", [2, 0], [2, 8])))
    await asyncio.sleep(0)
    assert not waiting.done()
    incoming.add(row)
    await waiting
    assert incoming.is_whole


async def test_who_waits_for_what_is_given_up_is_told() -> None:
    incoming = Incoming([ROWS], {})
    came = _batch(ROWS, [2, 0], [1, 8])
    incoming.add(came)
    waiting = asyncio.ensure_future(incoming.until_arrived(ROWS, Box("w", [5, 0], [1, 1])))
    await asyncio.sleep(0)
    incoming.give_up()
    with pytest.raises(ResourceError, match="will not arrive here"):
        await waiting
    await incoming.until_arrived(ROWS, came.boxes[0])


@pytest.mark.parametrize(
    ("part", "box"),
    [
        ("1of2", Box("w", [3, 0], [1, 1])),
        ("2of2", Box("w", [3, 0], [1, 1])),
        ("0of2", Box("v", [3, 0], [1, 1])),
        ("0of2", Box("w", [1, 0], [2, 1])),
        ("0of2", Box("w", [5, 0], [2, 1])),
        ("0of2", Box("w", [3], [1])),
    ],
)
def test_what_is_in_no_slice_is_not_here(part: str, box: Box) -> None:
    fetched = Fetched(Incoming([ROWS, OTHER], {}), memoryview(bytes(96)))
    with pytest.raises(CallerError) as caught:
        fetched.find(part, box)
    assert caught.value.info.code is Code.NOT_FOUND
