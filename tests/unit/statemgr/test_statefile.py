"""The file format of seals and versions, and writing it safely."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, checksum, digest_of
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.disk.disk import PROBE_PREFIX
from phaseloom.statemgr.disk.files import StateDirectory, find_parts, make_directory
from phaseloom.statemgr.disk.statefile import (
    DATA_ALIGNMENT_BYTES,
    PREFIX_BYTES,
    encode_header,
    parts_in,
)
from phaseloom.statemgr.records.incarnations import Rank, Wpg
from phaseloom.statemgr.records.seals import seal_header, section_of, superseded_seals
from phaseloom.statemgr.records.stateheader import (
    MAX_HEADER_BYTES,
    Section,
    SectionRef,
    StateHeader,
)
from tests.support.statefiles import state_directory

KEY = DeploymentKey("acme", "sums", "policy")
SLOT = TensorSlot("w", Role.WEIGHT, "float32", [2, 3], 0, 24)


def header(content: bytes, seq: int = 3, num_tensors: int = 1) -> StateHeader:
    tensors = [
        TensorSlot(f"w{i}", Role.WEIGHT, "float32", [6], 64 * i, 24) for i in range(num_tensors)
    ]
    section = Section(len(content), tensors, digest_of(memoryview(content)))
    return StateHeader("seal", KEY, seq, [section])


def reading(content: bytes) -> Callable[[int, int], bytes]:
    return lambda at, length: content[at : at + length]


@given(st.integers(0, 300))
def test_header_comes_back_and_memory_is_aligned(num_tensors: int) -> None:
    block = checksum(b"x")
    written = header(b"x", num_tensors=num_tensors).with_blocks(BLOCK_BYTES, [block])
    encoded = encode_header(written)
    assert len(encoded) % DATA_ALIGNMENT_BYTES == 0
    assert parts_in(reading(encoded), "f") == [SectionRef("f", written, 0, len(encoded))]


def test_file_whose_header_nobody_would_read_again_is_not_written(tmp_path: Path) -> None:
    """Many ranks of many tensors: what each may register, their seal need not take."""
    names = [f"{number:06}" for number in range(MAX_HEADER_BYTES // 1_000)]
    slots = [TensorSlot(name + "x" * 1_000, Role.WEIGHT, "float32", [0], 0, 0) for name in names]
    directory = state_directory(tmp_path)
    path = directory.seal(KEY, 1)
    with pytest.raises(ResourceError, match="tensors") as refused:
        directory.write(
            path, StateHeader("seal", KEY, 1, [Section(0, slots, "")]), [memoryview(b"")]
        )
    assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
    assert not path.parent.exists()


@given(st.data())
def test_one_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    encoded = bytearray(encode_header(header(b"x")))
    place = data.draw(st.integers(0, len(encoded.rstrip(b"\0")) - 1))
    encoded[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ResourceError) as caught:
        parts_in(reading(bytes(encoded)), "f")
    assert caught.value.info.code is Code.DATA_LOSS


@pytest.mark.parametrize(
    ("seqs", "written", "committed", "superseded"),
    [
        ([4], 4, 0, []),
        ([4, 8], 8, 0, []),
        ([12, 4, 8], 12, 0, [4]),
        ([4, 8, 12, 16], 16, 4, [8]),
        ([4, 8, 12, 16], 16, 16, [4, 8]),
        ([4, 50, 60], 4, 0, [50, 60]),
        ([4, 50, 60], 4, 50, [60]),
    ],
)
def test_the_seal_written_the_one_before_and_the_committed_one_stay(
    seqs: list[int], written: int, committed: int, superseded: list[int]
) -> None:
    assert superseded_seals(seqs, written, committed) == superseded


def a_rank(
    index: int,
    num_here: int,
    num_bytes: int,
    tensors: list[TensorSlot],
    offset: int = 0,
    of: int = 0,
) -> Rank:
    wpg = Wpg(KEY, 1, 1, rank_offset=offset, num_ranks=of)
    wpg.ranks += [Rank(wpg, each, 0, "") for each in range(num_here)]
    rank = wpg.ranks[index]
    rank.heap_bytes, rank.table = num_bytes, TensorTable.of(tensors)
    return rank


def test_seal_of_another_layout_is_refused_with_the_numbers() -> None:
    stored = StateHeader("seal", KEY, 1, [Section(64, [SLOT], "x")])
    part = section_of(a_rank(0, 1, 64, [SLOT]), SectionRef("f", stored, 0, 0))
    assert part == Section(64, [SLOT], "x")
    two = seal_header(KEY, 1, [Section(64, [SLOT], "x"), Section(128, [SLOT], "y")])
    assert section_of(a_rank(1, 2, 128, [SLOT]), SectionRef("f", two, 0, 0)).digest == "y"
    for sealed, rank, num_ranks, heap_bytes, tensors in (
        (stored, 0, 1, 128, [SLOT]),
        (stored, 0, 1, 64, []),
        (stored, 0, 2, 64, [SLOT]),
        (two, 0, 1, 64, [SLOT]),
        (two, 0, 2, 128, [SLOT]),
    ):
        with pytest.raises(CallerError, match="another layout") as caught:
            section_of(a_rank(rank, num_ranks, heap_bytes, tensors), SectionRef("f", sealed, 0, 0))
        info = caught.value.info
        assert info.code is Code.FAILED_PRECONDITION
        assert info.details["sealed_ranks"] == str(len(sealed.parts))
        assert info.details["ranks"] == str(num_ranks)
        assert info.details["sealed_bytes"] == str(sealed.num_bytes)
        assert info.details["heap_bytes"] == str(heap_bytes)


def test_seal_of_other_nodes_ranks_is_not_restored() -> None:
    """A node that had another part of the deployment may have that one's file, under the same
    name, with as many ranks and as much memory."""

    def restored(sealed: StateHeader, rank_offset: int, num_ranks: int) -> Section:
        rank = a_rank(0, 1, 64, [SLOT], rank_offset, num_ranks)
        return section_of(rank, SectionRef("f", sealed, 0, 0))

    own = seal_header(KEY, 1, [Section(64, [SLOT], "x")], rank_offset=1, num_ranks=2)
    older = seal_header(KEY, 1, [Section(64, [SLOT], "x")])
    assert restored(own, 1, 2) == restored(older, 1, 2) == Section(64, [SLOT], "x")
    for rank_offset, num_ranks in ((0, 2), (1, 3), (0, 1)):
        with pytest.raises(ResourceError, match=r"ranks 1 and up of 2; ") as caught:
            restored(own, rank_offset, num_ranks)
        assert caught.value.info.code is Code.DATA_LOSS


def test_every_rank_of_a_seal_has_its_aligned_part(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path = directory.seal(KEY, 3)
    contents = [b"first" * 1000, b"", b"third"]
    sections = [Section(len(c), [], digest_of(memoryview(c))) for c in contents]
    directory.write(path, seal_header(KEY, 3, sections), [memoryview(c) for c in contents])
    places = find_parts(path)
    assert places[0].header.num_bytes == 5005
    assert all(place.offset % DATA_ALIGNMENT_BYTES == 0 for place in places)
    for place, content in zip(places, contents, strict=True):
        memory = memoryview(bytearray(len(content)))
        directory.read(place, memory)
        assert bytes(memory) == content
    with pytest.raises(ResourceError, match="DATA_LOSS"):
        directory.write(path, places[0].header, [memoryview(c) for c in (*contents[:2], b"other")])


def test_file_appears_whole_and_replaces_the_one_before(tmp_path: Path) -> None:
    directory = state_directory(tmp_path / "not yet made")
    path = directory.seal(KEY, 3)
    for content in (b"first" * 1000, b"second"):
        directory.write(path, header(content), [memoryview(content)])
        (place,) = find_parts(path)
        memory = memoryview(bytearray(len(content)))
        directory.read(place, memory)
        assert bytes(memory) == content
    assert [p.name for p in path.parent.iterdir()] == ["seal-3.state"]


def test_memory_that_is_not_what_its_digest_says_is_never_put_in_place(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path = directory.seal(KEY, 3)
    directory.write(path, header(b"good"), [memoryview(b"good")])
    with pytest.raises(ResourceError, match="DATA_LOSS"):
        directory.write(path, header(b"good"), [memoryview(b"evil")])
    assert [p.name for p in path.parent.iterdir()] == ["seal-3.state"]
    _read(directory, path, 4)


def test_file_cut_short_is_data_loss(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path = directory.seal(KEY, 3)
    content = b"x" * 10_000
    directory.write(path, header(content), [memoryview(content)])
    whole = path.read_bytes()
    for length in (0, 10, PREFIX_BYTES, PREFIX_BYTES + 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ResourceError) as caught:
            _read(directory, path, len(content))
        assert caught.value.info.code is Code.DATA_LOSS


def _read(directory: StateDirectory, path: Path, num_bytes: int) -> None:
    (place,) = find_parts(path)
    directory.read(place, memoryview(bytearray(num_bytes)))


def test_scan_finds_what_is_whole_and_clears_what_a_crash_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = state_directory(tmp_path)
    path = directory.seal(KEY, 3)
    directory.write(path, header(b"x"), [memoryview(b"x")])
    bad = directory.seal(KEY, 5)
    bad.write_bytes(b"PLSTATE2 and then nothing")
    moved = directory.seal(KEY, 4)
    moved.write_bytes(path.read_bytes())
    half = path.with_suffix(".partial")
    half.write_bytes(b"half")
    (tmp_path / "gone" / "job" / "policy").mkdir(parents=True)
    (path.parent / "notes.txt").write_text("not ours")
    assert [(p, h.seq) for p, h in directory.scan()] == [(path, 3)]
    assert not half.exists()
    assert not (tmp_path / "gone").exists()
    assert bad.exists()
    assert "seal-5.state" in caplog.text
    assert "names another file" in caplog.text


def test_what_is_no_file_but_has_the_name_of_one_is_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever somebody has put there: the node starts with what is its own."""
    directory = state_directory(tmp_path)
    path = directory.seal(KEY, 3)
    directory.write(path, header(b"x"), [memoryview(b"x")])
    copies = directory.host_copy(1).parent
    odd = [
        path.with_name("seal-4.partial"),
        path.with_name("seal-5.state"),
        copies / "copy-1.partial",
        copies / "copy-2.state",
    ]
    for each in odd:
        each.mkdir(parents=True)
        (each / "within").write_text("not ours")
    probe = tmp_path / f"{PROBE_PREFIX}no-directory"
    probe.write_text("")
    pipe = path.with_name("seal-7.state")
    os.mkfifo(pipe)
    assert [(p, h.seq) for p, h in directory.scan()] == [(path, 3)]
    assert all((each / "within").exists() for each in odd)
    assert probe.exists()
    left_out = [*odd[:3], probe, pipe]
    assert all(str(each) in caplog.text for each in left_out)
    # Neither is it taken for a host copy, nor in the way of a job that ends.
    assert directory.host_copies() == set()
    directory.clear(KEY)
    assert not path.exists()
    assert all(each.exists() for each in (*odd, pipe))


def test_names_that_are_no_plain_file_names_are_refused(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    for name in ("..", "a/b", "", ".", "x" * 65, "a\0b"):
        with pytest.raises(CallerError, match="not a valid name"):
            directory.seal(DeploymentKey("acme", name, "policy"), 1)
        with pytest.raises(CallerError, match="not a valid name"):
            directory.version(VersionKey(DeploymentKey(name, "sums", "policy"), 1))


def test_unwritable_directory_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "acme").write_text("a file where a directory belongs")
    directory = state_directory(tmp_path)
    with pytest.raises(ResourceError) as caught:
        directory.write(directory.seal(KEY, 1), header(b"x"), [memoryview(b"x")])
    assert caught.value.info.code is Code.UNAVAILABLE


def test_directory_behind_a_link_that_leads_to_nothing_yet_is_made(tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(tmp_path / "disk" / "checkpoints")
    make_directory(tmp_path / "mounted" / "tenant")
    assert (tmp_path / "disk" / "checkpoints" / "tenant").is_dir()
