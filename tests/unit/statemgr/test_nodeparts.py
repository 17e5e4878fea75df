"""What other nodes' ranks have of a checkpoint, as files under a root that all share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from phaseloom.common.blockhash import BLOCK_BYTES, checksum
from phaseloom.common.errors import Code, PhaseloomError
from phaseloom.common.ids import DeploymentKey, NodeId
from phaseloom.common.statewire import Role, TensorSlot
from phaseloom.common.tensortable import TensorTable
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.held import Held
from phaseloom.statemgr.checkpoints.nodeparts import NodeParts
from phaseloom.statemgr.core.cuts import Cut, CutPart
from phaseloom.statemgr.disk.files import NEVER, StateDirectory

SIZE = 4096
KEY = DeploymentKey("acme", "job", "policy")
SLOTS = [TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)]


def parts_of(root: Path, node: str) -> NodeParts:
    return NodeParts(Checkpoints(root, NodeId(node)), StateDirectory(root))


def cut(rank: int, *, seq: int = 1, num_ranks: int = 2) -> Cut:
    """Of one rank a node."""
    part = CutPart(1, SIZE, TensorTable.of(SLOTS))
    return Cut(KEY, 1, "save", "step-1", seq, [part], rank_offset=rank, num_ranks=num_ranks)


def held(rank: int, byte: int) -> Held:
    memory = memoryview(bytearray([byte]) * SIZE)
    assert SIZE <= BLOCK_BYTES
    return Held(rank, SLOTS, memory, checksum(memory))


def test_newest_is_taken_where_the_ranks_were_on_two_nodes(tmp_path: Path) -> None:
    """The life that came after is the one that rank 0 is of."""
    for age, (node, byte) in enumerate([("z", 1), ("a", 2), ("m", 3)]):
        parts_of(tmp_path, node).write(cut(1), [held(1, byte)], NEVER)
        (written,) = tmp_path.rglob(f".*.{node}.part")
        os.utime(written, (age, age))
    found = parts_of(tmp_path, "first")
    (place,) = found.find(cut(0))
    memory = memoryview(bytearray(SIZE))
    found.read(place, memory)
    assert bytes(memory) == bytes([3]) * SIZE
    found.discard(cut(0))
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("other", [cut(1, seq=2), cut(1, num_ranks=4)])
def test_part_of_another_cut_is_not_taken(tmp_path: Path, other: Cut) -> None:
    parts_of(tmp_path, "second").write(other, [held(1, 1)], NEVER)
    with pytest.raises(PhaseloomError, match="another") as refused:
        parts_of(tmp_path, "first").find(cut(0))
    assert refused.value.info.code is Code.DATA_LOSS


def test_part_that_nobody_wants_any_more_is_not_written_to_its_end(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(PhaseloomError) as refused:
        parts_of(tmp_path, "second").write(cut(1), [held(1, 1)], cancelled)
    assert refused.value.info.code is Code.ABORTED
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_part_whose_memory_has_changed_is_left_to_nobody(tmp_path: Path) -> None:
    changed = held(1, 1)
    changed.memory[7] ^= 1
    with pytest.raises(PhaseloomError, match=rf"{KEY} rank .*\(w\)") as refused:
        parts_of(tmp_path, "second").write(cut(1), [changed], NEVER)
    assert refused.value.info.code is Code.DATA_LOSS
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
