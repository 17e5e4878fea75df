"""State files on a real disk: past the page cache, with a checksum for every block."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import DiskMethod
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockfile import PAGE_BYTES, BlockFile, DirectFile, KvikioFile
from phaseloom.common.tensors.blockhash import BLOCK_BYTES, digest_of
from phaseloom.statemgr.disk.disk import (
    MemoryFile,
    probe,
    read_block,
    read_part,
    write_state,
)
from phaseloom.statemgr.disk.files import NEVER, StateDirectory, find_parts
from phaseloom.statemgr.disk.statefile import encode_header, parts_in
from phaseloom.statemgr.records.seals import seal_header
from phaseloom.statemgr.records.stateheader import Section, StateHeader
from tests.support.statefiles import PREFERRED, state_directory

KEY = DeploymentKey("acme", "sums", "policy")
MiB = 1024 * 1024
ON_KVIKIO = PREFERRED is DiskMethod.KVIKIO
SIZES = [2 * BLOCK_BYTES + 3 * MiB + 5, BLOCK_BYTES, 100]
"""Of a rank's memory: with a short last block that is no multiple of anything, and without."""


def memory(num_bytes: int) -> memoryview:
    """Aligned and random, as extents are."""
    view = memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]
    view[:] = os.urandom(num_bytes)
    return view


def cached_bytes(path: Path, num_bytes: int) -> int:
    """What of the file's beginning the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), num_bytes) as mapped:
        pages = ctypes.create_string_buffer(num_bytes // mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(address, num_bytes, pages) == 0
        return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


def is_direct_here(directory: Path) -> bool:
    try:
        os.close(os.open(directory / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_probe_takes_direct_io_where_a_file_can_be_opened_so(tmp_path: Path) -> None:
    found = probe(tmp_path / "not yet made")
    if is_direct_here(tmp_path):
        assert found.method is DiskMethod.DIRECT
        assert found.alignment_bytes == PAGE_BYTES
    else:
        assert found.method is DiskMethod.BUFFERED
    assert list((tmp_path / "not yet made").iterdir()) == []


def test_preferred_method_is_in_use(tmp_path: Path) -> None:
    """In each run of these tests, so that a run on kvikio cannot be one on something simpler."""
    if PREFERRED is DiskMethod.DIRECT and not is_direct_here(tmp_path):
        pytest.skip("no direct I/O in the tests' directory")
    assert state_directory(tmp_path / "files").disk.path.method is PREFERRED


def test_simpler_method_takes_over_where_the_preferred_one_is_missing(tmp_path: Path) -> None:
    if importlib.util.find_spec("kvikio"):
        pytest.skip("kvikio is here")
    found = probe(tmp_path, DiskMethod.KVIKIO)
    assert found.method is probe(tmp_path).method
    assert "kvikio: it is not installed" in found.why
    assert "pip install 'phaseloom[gds]'" in found.why


def test_probe_says_why_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where a directory belongs")
    found = probe(tmp_path / "file")
    assert found.method is DiskMethod.BUFFERED
    assert "nothing can be written" in found.why


def test_direct_file_goes_past_the_page_cache(tmp_path: Path) -> None:
    if probe(tmp_path).method is DiskMethod.BUFFERED:
        pytest.skip("no direct I/O in the tests' directory")
    num_bytes = 4 * MiB
    content = memory(num_bytes)
    left = {}
    for name, file in (
        ("direct", DirectFile(tmp_path / "direct", writable=True)),
        ("buffered", BlockFile(tmp_path / "buffered", writable=True)),
    ):
        file.write(content, 0)
        file.finish(num_bytes)
        file.close()
        left[name] = cached_bytes(tmp_path / name, num_bytes)
        assert (tmp_path / name).read_bytes() == content
    assert left == {"direct": 0, "buffered": num_bytes}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)
@given(
    num_bytes=st.integers(0, 5 * PAGE_BYTES),
    skew=st.sampled_from([0, 1, 64, 512]),
    place=st.sampled_from([0, 512, PAGE_BYTES]),
    opened_by=st.sampled_from([BlockFile, DirectFile, *([KvikioFile] if ON_KVIKIO else [])]),
)
def test_any_memory_comes_back_from_any_offset(
    tmp_path: Path, num_bytes: int, skew: int, place: int, opened_by: type[BlockFile]
) -> None:
    """Also where neither memory nor length nor offset is what the disk asks for."""

    def opened(writable: bool) -> BlockFile:
        path, room = tmp_path / "f", (place + num_bytes) * writable
        return opened_by(path, writable=writable, num_bytes=room)

    content = memory(skew + num_bytes)[skew:]
    file = opened(True)
    file.write(content, place)
    file.finish(place + num_bytes)
    file.close()
    assert (tmp_path / "f").read_bytes() == bytes(place) + content
    target = memory(skew + num_bytes + 100)[skew:]
    file = opened(False)
    assert file.read(target, place) == num_bytes
    file.close()
    assert target[:num_bytes] == content


def written(directory: StateDirectory) -> tuple[Path, list[memoryview]]:
    """A seal of three ranks; each has one tensor a MiB."""
    path = directory.seal(KEY, 3)
    contents = [memory(size) for size in SIZES]
    sections = [
        Section(
            size,
            [
                TensorSlot(f"w{start // MiB}", Role.WEIGHT, "uint8", [1], start, MiB)
                for start in range(0, size, MiB)
            ],
            digest_of(content),
        )
        for size, content in zip(SIZES, contents, strict=True)
    ]
    directory.write(path, seal_header(KEY, 3, sections), contents)
    return path, contents


def test_every_section_comes_back_block_by_block(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path, contents = written(directory)
    assert path.stat().st_size == find_parts(path)[-1].offset + SIZES[-1]
    for place, content in zip(find_parts(path), contents, strict=True):
        target = memory(len(content))
        directory.read(place, target)
        assert target == content


def test_file_in_memory_has_the_bytes_of_one_on_disk_and_the_same_checks(tmp_path: Path) -> None:
    """A seal of durability `host`."""
    path, contents = written(state_directory(tmp_path))
    header = find_parts(path)[0].header
    image = memoryview(mmap.mmap(-1, path.stat().st_size))
    file = MemoryFile(image)
    assert write_state(file, "a seal", header, contents, NEVER) == header
    assert image == path.read_bytes()
    places = parts_in(lambda at, length: bytes(image[at : at + length]), "a seal")
    for place, content in zip(places, contents, strict=True):
        target = memory(len(content))
        read_part(file, place, target, NEVER)
        assert target == content
    image[places[1].offset + 5] ^= 1
    with pytest.raises(ResourceError, match=r"a seal: .* rank 1, .*checksum") as caught:
        read_block(file, places[1], 0, memory(BLOCK_BYTES))
    assert caught.value.info.code is Code.DATA_LOSS
    with pytest.raises(ResourceError, match="the file ends before them"):
        read_part(MemoryFile(image[:-1]), places[2], memory(SIZES[2]), NEVER)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("where", ["first", "last"])
def test_flipped_bit_is_named_with_deployment_rank_tensor_and_offset(
    tmp_path: Path, rank: int, where: str
) -> None:
    directory = state_directory(tmp_path)
    path, contents = written(directory)
    places = find_parts(path)
    byte = 0 if where == "first" else SIZES[rank] - 1
    with path.open("r+b") as file:
        file.seek(places[rank].offset + byte)
        (content,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([content ^ 0x10]))
    start = byte // BLOCK_BYTES * BLOCK_BYTES
    for index, place in enumerate(places):
        target = memory(SIZES[index])
        if index != rank:
            directory.read(place, target)
            assert target == contents[index]
            continue
        with pytest.raises(ResourceError, match="checksum does not match") as caught:
            directory.read(place, target)
        assert caught.value.info.code is Code.DATA_LOSS
        assert f"{KEY} rank {rank}" in caught.value.info.message
        assert f"w{start // MiB}" in caught.value.info.message
        assert caught.value.info.details == {
            "file": str(path),
            "deployment": str(KEY),
            "section": str(rank),
            "offset": str(start),
            "file_offset": str(place.offset + start),
        }


def test_torn_file_is_named_with_where_it_ends(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path, _ = written(directory)
    place = find_parts(path)[0]
    os.truncate(path, place.offset + BLOCK_BYTES + 1000)
    with pytest.raises(ResourceError, match="the file ends before them") as caught:
        directory.read(place, memory(SIZES[0]))
    assert caught.value.info.code is Code.DATA_LOSS
    assert caught.value.info.details["offset"] == str(BLOCK_BYTES + 1000)


def test_checksums_that_do_not_cover_the_memory_are_data_loss(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path, _ = written(directory)
    place = find_parts(path)[1]
    short = msgspec.structs.replace(place.part, blocks=b"")
    sections = [short if index == 1 else s for index, s in enumerate(place.header.parts)]
    header = msgspec.structs.replace(place.header, parts=sections)
    with pytest.raises(ResourceError, match="lacks checksums of some blocks"):
        directory.read(type(place)(place.file, header, 1, place.offset), memory(SIZES[1]))


def test_digest_follows_from_what_was_written_where_none_was_known(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path, contents = directory.seal(KEY, 3), [memory(size) for size in SIZES]
    header = seal_header(KEY, 3, [Section(size, [], "") for size in SIZES])
    written = directory.write(path, header, contents)
    assert [part.digest for part in written.parts] == [digest_of(content) for content in contents]
    assert find_parts(path)[0].header == written
    assert written.digest == seal_header(KEY, 3, written.parts).digest


def test_memory_of_another_digest_is_not_written(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path, content = directory.seal(KEY, 3), memory(SIZES[0])
    header = seal_header(KEY, 3, [Section(SIZES[0], [], digest_of(content))])
    content[BLOCK_BYTES + 5] ^= 1
    with pytest.raises(ResourceError, match="does not match its digest") as caught:
        directory.write(path, header, [content])
    assert caught.value.info.code is Code.DATA_LOSS
    assert list(path.parent.iterdir()) == []


def test_file_without_a_checksum_for_each_block_is_refused(tmp_path: Path) -> None:
    path = state_directory(tmp_path).seal(KEY, 3)
    content = os.urandom(2 * BLOCK_BYTES + 7)
    section = Section(len(content), [], xxhash.xxh3_128(content).hexdigest())
    header = StateHeader("seal", KEY, 3, [section])
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_header(header) + content)
    with pytest.raises(ResourceError, match="does not match its blocks") as caught:
        find_parts(path)
    assert caught.value.info.code is Code.DATA_LOSS


def test_cancelled_move_leaves_what_was_there(tmp_path: Path) -> None:
    directory = state_directory(tmp_path)
    path, contents = written(directory)
    cancelled = threading.Event()
    cancelled.set()
    header = find_parts(path)[0].header
    with pytest.raises(ResourceError, match="cancelled") as caught:
        directory.write(path, header, contents, cancelled)
    assert caught.value.info.code is Code.ABORTED
    with pytest.raises(ResourceError, match="cancelled"):
        directory.read(find_parts(path)[0], memory(SIZES[0]), cancelled)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    directory.read(find_parts(path)[1], memory(SIZES[1]))


@pytest.mark.parametrize("opened_by", [BlockFile, DirectFile, *([KvikioFile] if ON_KVIKIO else [])])
def test_file_that_cannot_grow_says_that_the_disk_is_full(
    tmp_path: Path, opened_by: type[BlockFile]
) -> None:
    """A limit on the size of files stands for a full disk; space for this one was not reserved."""
    path = tmp_path / "f"
    ran = subprocess.run(
        [sys.executable, "-c", FILL, opened_by.__name__, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == [errno.errorcode[errno.EFBIG]], ran.stderr


FILL = """
import errno, mmap, pathlib, resource, signal, sys
from phaseloom.common.tensors import blockfile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
file = getattr(blockfile, sys.argv[1])(pathlib.Path(sys.argv[2]), writable=True)
try:
    file.write(memoryview(mmap.mmap(-1, 2**22)), 0)
except OSError as error:
    print(errno.errorcode[error.errno])
"""
