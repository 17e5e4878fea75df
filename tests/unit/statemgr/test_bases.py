"""Seals that leave out what the one before has on disk."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import msgspec
import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, digest_of
from phaseloom.statemgr.disk.files import StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import Section, seal_header

KEY = DeploymentKey("acme", "sums", "policy")
TAIL = 4096 + 5
SIZE = 3 * BLOCK_BYTES + TAIL
"""Four blocks, the last of them short."""


class Seals:
    """Seals of a deployment with one rank, or with several of this size."""

    def __init__(self, root: Path, sizes: tuple[int, ...] = (SIZE,)) -> None:
        self.directory = StateDirectory(root)
        self.memories = [memoryview(mmap.mmap(-1, size)) for size in sizes]
        self.contents: dict[int, list[bytes]] = {}
        self.newest: Path | None = None

    def change(self, block: int, rank: int = 0) -> None:
        start = block * BLOCK_BYTES
        self.memories[rank][start : start + 64] = os.urandom(64)

    def write(self, seq: int, *, is_digest_known: bool = False) -> int:
        """Bytes that were written of the state."""
        sections = [
            Section(len(m), [slot(len(m))], digest_of(m) if is_digest_known else "")
            for m in self.memories
        ]
        path = self.directory.seal(KEY, seq)
        header = seal_header(KEY, seq, sections)
        _, num_bytes = self.directory.write_seal(path, header, self.memories, self.newest)
        self.newest = path
        self.contents[seq] = [bytes(memory) for memory in self.memories]
        return num_bytes

    def remove(self, seq: int) -> None:
        self.directory.remove(self.directory.seal(KEY, seq))
        del self.contents[seq]

    def check(self) -> None:
        """Every seal that is kept reads as what it was made of."""
        for seq, contents in self.contents.items():
            places = find_parts(self.directory.seal(KEY, seq))
            for place, content in zip(places, contents, strict=True):
                memory = memoryview(bytearray(len(content)))
                self.directory.read(place, memory)
                assert memory == content
                block = memoryview(bytearray(BLOCK_BYTES))
                last = (len(content) - 1) // BLOCK_BYTES
                size = self.directory.read_block(place, last, block)
                assert block[:size] == content[last * BLOCK_BYTES :]

    def disk_bytes(self) -> int:
        """What its files take, links to one counted once."""
        files = [path.stat() for path in self.directory.seal(KEY, 1).parent.iterdir()]
        return sum({status.st_ino: status.st_blocks * 512 for status in files}.values())

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.seal(KEY, 1).parent.iterdir())


def slot(num_bytes: int) -> TensorSlot:
    return TensorSlot("w", Role.WEIGHT, "uint8", [num_bytes], 0, num_bytes)


@pytest.fixture
def seals(tmp_path: Path) -> Seals:
    made = Seals(tmp_path)
    for block in range(4):
        made.change(block)
    assert made.write(1) == SIZE
    return made


@pytest.mark.parametrize("is_digest_known", [True, False])
def test_state_that_did_not_change_is_not_written_again(
    seals: Seals, is_digest_known: bool
) -> None:
    before = seals.disk_bytes()
    assert seals.write(2, is_digest_known=is_digest_known) == 0
    assert seals.disk_bytes() - before < 64 * 1024
    seals.remove(1)
    seals.check()
    assert seals.write(3) == 0
    seals.remove(2)
    seals.check()


def test_only_blocks_that_changed_are_written(seals: Seals) -> None:
    seals.change(1)
    assert seals.write(2) == BLOCK_BYTES
    seals.change(3)
    assert seals.write(3) == TAIL
    seals.remove(1)
    seals.check()


def test_state_that_changed_everywhere_refers_to_nothing(seals: Seals) -> None:
    for block in range(4):
        seals.change(block)
    assert seals.write(2) == SIZE
    assert seals.names() == ["seal-1.state", "seal-2.state"]
    header = find_parts(seals.directory.seal(KEY, 2))[0].header
    assert (header.bases, header.parts[0].sources) == ([], b"")


def test_every_rank_refers_for_itself(tmp_path: Path) -> None:
    seals = Seals(tmp_path, (SIZE, 100, BLOCK_BYTES))
    seals.write(1)
    seals.change(0, rank=2)
    seals.change(2, rank=0)
    assert seals.write(2) == 2 * BLOCK_BYTES
    seals.remove(1)
    seals.check()


def test_another_layout_refers_to_nothing(seals: Seals) -> None:
    other = Seals(seals.directory.seal(KEY, 1).parents[3], (SIZE, SIZE))
    other.newest = seals.newest
    assert other.write(2) == 2 * SIZE
    other.check()


def test_seals_of_any_course_of_events_are_whole_and_take_bounded_room(tmp_path: Path) -> None:
    """Kept are the newest, the one before and now and then an old one."""
    draw = random.Random(5)
    seals = Seals(tmp_path, (2 * BLOCK_BYTES + TAIL,))
    for seq in range(1, 13):
        for block in range(3):
            if draw.random() < 0.4:
                seals.change(block)
        seals.write(seq)
        kept = {seq, seq - 1, draw.randrange(1, seq + 1)}
        for old in set(seals.contents) - kept:
            seals.remove(old)
        seals.check()
        assert seals.disk_bytes() <= 2 * len(seals.contents) * len(seals.memories[0]) + 2**20
    names = {path.name for path in (tmp_path / "acme" / "sums" / "policy").iterdir()}
    named = {
        name
        for seq in seals.contents
        for name in find_parts(seals.directory.seal(KEY, seq))[0].header.bases
    }
    assert names - {f"seal-{seq}.state" for seq in seals.contents} <= named


def test_file_of_which_little_is_needed_is_let_go(seals: Seals) -> None:
    for seq, block in enumerate((0, 1), start=2):
        seals.change(block)
        assert seals.write(seq) == BLOCK_BYTES
        seals.remove(seq - 1)
    # The first file is needed for a block and the last one: they are written once more.
    assert seals.write(4) == BLOCK_BYTES + TAIL
    seals.remove(3)
    seals.check()
    assert seals.disk_bytes() < SIZE + 2**20


def test_seal_that_is_written_again_refers_to_what_it_was(seals: Seals) -> None:
    seals.write(2)
    seals.change(0)
    assert seals.write(2) == BLOCK_BYTES
    seals.remove(1)
    seals.check()


def test_links_go_with_their_seal_and_with_the_deployment(seals: Seals) -> None:
    seals.write(2)
    assert len(seals.names()) == 3
    seals.remove(2)
    assert seals.names() == ["seal-1.state"]
    seals.write(3)
    seals.directory.clear(KEY)
    assert seals.names() == []


def test_links_that_a_crash_left_are_removed_and_others_stay(seals: Seals) -> None:
    seals.write(2)
    folder = seals.directory.seal(KEY, 1).parent
    (link,) = folder.glob("seal-2.*.base")
    for stale in ("seal-9.0a.base", "seal-2.0b.base"):
        os.link(link, folder / stale)
    assert [header.seq for _, header in seals.directory.scan()] == [1, 2]
    assert seals.names() == sorted(["seal-1.state", "seal-2.state", link.name])
    seals.check()


def test_damage_in_what_is_referred_to_is_found_and_named(seals: Seals) -> None:
    seals.change(0)
    seals.write(2)
    seals.remove(1)
    path = seals.directory.seal(KEY, 2)
    (place,) = find_parts(path)
    (link,) = path.parent.glob("*.base")
    (base,) = find_parts(link)
    with link.open("r+b") as file:
        where = base.offset + BLOCK_BYTES + 9
        file.seek(where)
        (byte,) = file.read(1)
        file.seek(where)
        file.write(bytes([byte ^ 1]))
    memory = memoryview(bytearray(SIZE))
    with pytest.raises(ResourceError, match=r"acme\.sums\.policy rank 0.*checksum") as caught:
        seals.directory.read(place, memory)
    assert caught.value.info.code is Code.DATA_LOSS
    link.unlink()
    with pytest.raises(ResourceError) as caught:
        seals.directory.read(place, memory)
    assert caught.value.info.code is Code.DATA_LOSS


def test_seal_before_that_cannot_be_read_is_not_referred_to(seals: Seals) -> None:
    path = seals.directory.seal(KEY, 1)
    path.write_bytes(b"nothing")
    assert seals.write(2) == SIZE
    seals.remove(1)
    seals.check()


def test_state_is_written_whole_where_there_are_no_hard_links(
    seals: Seals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert seals.write(2) == SIZE
    monkeypatch.undo()
    seals.remove(1)
    seals.check()


def test_header_of_a_file_of_its_own_refers_to_nothing(seals: Seals) -> None:
    seals.write(2)
    (place,) = find_parts(seals.directory.seal(KEY, 2))
    assert place.header.bases
    (first,) = find_parts(seals.directory.seal(KEY, 1))
    assert place.header.alone() == msgspec.structs.replace(first.header, seq=2)
