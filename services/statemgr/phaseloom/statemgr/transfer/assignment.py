"""Chunk assignment: which node of a site fetches which boxes of a part over the slow link.

Pure. A source has one `Assignment` for each part and each remote site. Peers request boxes, which
may overlap each other in any way. A peer is assigned the bytes that no peer has yet, and gets the
rest from the peers that they were assigned to. So each byte crosses the slow link once, and again
only if a peer does not deliver it. Fast peers fetch more than slow ones. A peer that comes late
gets everything from its peers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phaseloom.statemgr.transfer.tensorslices import Box, Fragment, overlap, subtract

_MAX_FRAGMENTS = 1024
"""Limit for the fragments of one box."""


class Peer(NamedTuple):
    """A state manager that fetches a version, identified for one of its fetches."""

    endpoint: str
    """The address at which the state manager serves the fetched bytes."""
    session: str
    """Names the fetched content: the same on all streams of the fetch and after a retry."""


@dataclass
class Shares:
    """The answer to a request: which fragments of its boxes come from where. Each byte comes
    once."""

    num_boxes: int = 0
    """How many boxes, from the first on, are answered. The client requests the others again."""
    own_boxes: list[Fragment] = field(default_factory=list)
    """Fragments that come from this source."""
    peer_boxes: dict[Peer, list[Fragment]] = field(default_factory=dict)
    """Fragments that come from peers, by the peer that they were assigned to."""


@dataclass
class Assignment:
    """Which bytes of one part were assigned to which peer of one site."""

    _assigned: dict[str, _Assigned] = field(default_factory=dict)
    """Assigned boxes by tensor."""

    def assign(
        self,
        boxes: Sequence[tuple[Box, int]],
        limit_bytes: int,
        failed: Collection[Peer],
        peer: Peer,
    ) -> Shares:
        """Divide as many boxes as needed to assign about `limit_bytes` to the peer.

        Args: boxes: boxes inside their tensors, each with its number of bytes.
              failed: peers that did not deliver; their boxes are assigned again.
        """
        shares = Shares()
        assigned_bytes = 0
        for number, (box, num_bytes) in enumerate(boxes):
            assigned = self._assigned.setdefault(box.name, _Assigned())
            granted, peer_boxes = _divide(assigned.near(box), box, failed, peer)
            if len(granted) + len(peer_boxes) > _MAX_FRAGMENTS:
                granted, peer_boxes = [box], []
            assigned_bytes += num_bytes if granted else 0
            if assigned_bytes > limit_bytes and shares.own_boxes:
                break
            if not peer_boxes:
                granted = [box]  # not split
            shares.num_boxes += 1
            shares.own_boxes += [(number, fragment) for fragment in granted]
            for fragment, holder in peer_boxes:
                shares.peer_boxes.setdefault(holder, []).append((number, fragment))
            for fragment in granted:
                assigned.add(fragment, peer)
        return shares


@dataclass
class _Assigned:
    """Disjoint boxes of one tensor and their peers, sorted by start along the first dim."""

    _starts: list[int] = field(default_factory=list)
    _boxes: list[tuple[Box, Peer]] = field(default_factory=list)
    _longest: int = 0
    """Length of the longest box along the first dim."""

    def near(self, box: Box) -> list[tuple[Box, Peer]]:
        """Assigned boxes that may overlap this one, and a few that do not."""
        return self._boxes[self._nearby(box)]

    def add(self, box: Box, peer: Peer) -> None:
        """Assign a box to a peer, replacing earlier assignments."""
        nearby = self._nearby(box)
        near = self._boxes[nearby]
        boxes = [
            (remaining, holder)
            for assigned_box, holder in near
            for remaining in subtract([assigned_box], box)
        ]
        boxes = sorted([*boxes, (box, peer)], key=_start)
        self._boxes[nearby] = boxes
        self._starts[nearby] = map(_start, boxes)
        self._longest = max(self._longest, _length(box))

    def _nearby(self, box: Box) -> slice:
        start = _start((box, None))
        first = bisect_right(self._starts, start - self._longest)
        return slice(first, bisect_left(self._starts, start + _length(box)))


def _divide(
    assigned: Iterable[tuple[Box, Peer]], box: Box, failed: Collection[Peer], peer: Peer
) -> tuple[list[Box], list[tuple[Box, Peer]]]:
    """Divide a box into fragments for this peer and fragments that other peers have."""
    unassigned = [box]
    own_boxes: list[Box] = []
    peer_boxes: list[tuple[Box, Peer]] = []
    for assigned_box, holder in assigned:
        common = overlap(box, assigned_box)
        if common is None:
            continue
        unassigned = subtract(unassigned, assigned_box)
        if holder == peer or holder in failed:
            own_boxes.append(common)
        else:
            peer_boxes.append((common, holder))
    return own_boxes + unassigned, peer_boxes


def _start(assigned: tuple[Box, object]) -> int:
    return assigned[0].start[0] if assigned[0].start else 0


def _length(box: Box) -> int:
    return box.size[0] if box.size else 1
