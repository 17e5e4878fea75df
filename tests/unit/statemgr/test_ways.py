"""The rule by which a heap goes through host memory or straight to NVMe."""

from __future__ import annotations

import pytest

from phaseloom.statemgr.records.ways import Room, Way


@pytest.mark.parametrize(
    ("room", "is_leaving", "needs_host", "way"),
    [
        (Room(10, 0, 100), True, False, Way.HOST),
        (Room(10, 0, 100), False, False, Way.HOST),
        # Room that must be made first counts for a heap that enters only.
        (Room(4, 6, 100), True, False, Way.STRAIGHT),
        (Room(4, 6, 100), False, False, Way.HOST),
        (Room(4, 5, 100), False, False, Way.STRAIGHT),
        # Host memory refuses with the numbers what has no room anywhere.
        (Room(4, 5, 9), False, False, Way.HOST),
        (Room(0, 0, 0), True, False, Way.HOST),
        (Room(4, 5, 10), True, False, Way.STRAIGHT),
        (Room(0, 0, 100), True, True, Way.HOST),
    ],
)
def test_way_follows_from_sizes_and_room(
    room: Room, is_leaving: bool, needs_host: bool, way: Way
) -> None:
    assert room.choose(10, is_leaving=is_leaving, needs_host=needs_host) is way
