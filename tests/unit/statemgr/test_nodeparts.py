"""What other nodes' ranks have of a checkpoint, as files under a root that all share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, PhaseloomError
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.checkpoints.exporting import NodeParts
from phaseloom.statemgr.checkpoints.files import Checkpoints
from phaseloom.statemgr.checkpoints.staging import StagedState
from phaseloom.statemgr.disk.files import NEVER
from phaseloom.statemgr.records.snapshots import Snapshot, SnapshotPart
from tests.support.statefiles import state_directory

SIZE = 4096
KEY = DeploymentKey("acme", "job", "policy")
SLOTS = [TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)]


def parts_of(root: Path, node: str) -> NodeParts:
    return NodeParts(Checkpoints(root, NodeId(node)), state_directory(root))


def snapshot(rank: int, *, incarnation: int = 1) -> Snapshot:
    """Of one rank a node."""
    part = SnapshotPart(1, SIZE, TensorTable.of(SLOTS))
    return Snapshot(KEY, incarnation, "save", "step-1", 1, [part], rank_offset=rank, num_ranks=2)


def held(rank: int, byte: int) -> StagedState:
    memory = memoryview(bytearray([byte]) * SIZE)
    assert SIZE <= BLOCK_BYTES
    return StagedState(rank, SLOTS, memory, checksum(memory))


@pytest.mark.parametrize("incarnation", [1, 2, 3])
def test_part_of_the_same_incarnation_is_taken_where_the_ranks_were_on_several_nodes(
    tmp_path: Path, incarnation: int
) -> None:
    """Two incarnations' states at one seq may differ."""
    for node, number in [("z", 1), ("a", 3), ("m", 2)]:
        parts_of(tmp_path, node).write(snapshot(1, incarnation=number), [held(1, number)], NEVER)
    found = parts_of(tmp_path, "first")
    (place,) = found.find(snapshot(0, incarnation=incarnation))
    memory = memoryview(bytearray(SIZE))
    state_directory(tmp_path).read(place, memory)
    assert bytes(memory) == bytes([incarnation]) * SIZE
    found.discard(snapshot(0))
    assert not list(tmp_path.rglob("*.part"))


def test_what_an_earlier_incarnation_left_is_not_this_one_s(tmp_path: Path) -> None:
    node = parts_of(tmp_path, "second")
    assert not node.is_written(snapshot(1))
    node.write(snapshot(1), [held(1, 1)], NEVER)
    assert node.is_written(snapshot(1))
    assert not node.is_written(snapshot(1, incarnation=2))


def test_part_of_another_incarnation_is_not_taken(tmp_path: Path) -> None:
    parts_of(tmp_path, "second").write(snapshot(1, incarnation=2), [held(1, 1)], NEVER)
    with pytest.raises(PhaseloomError, match="from ranks 1 and up") as refused:
        parts_of(tmp_path, "first").find(snapshot(0))
    assert refused.value.info.code is Code.FAILED_PRECONDITION


def test_part_that_nobody_wants_any_more_is_not_written_to_its_end(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(PhaseloomError) as refused:
        parts_of(tmp_path, "second").write(snapshot(1), [held(1, 1)], cancelled)
    assert refused.value.info.code is Code.ABORTED
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_part_whose_memory_has_changed_is_left_to_nobody(tmp_path: Path) -> None:
    changed = held(1, 1)
    changed.memory[7] ^= 1
    with pytest.raises(PhaseloomError, match=rf"{KEY} rank .*\(w\)") as refused:
        parts_of(tmp_path, "second").write(snapshot(1), [changed], NEVER)
    assert refused.value.info.code is Code.DATA_LOSS
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
