"""Checkpoints of a real daemon, found, kept for a while, deleted, overwritten, and read as tar
files, while others load them, and over kills."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from phaseloom.common.contract.checkpoints import (
    ArchiveOpened,
    ArchiveRead,
    CheckpointErased,
    CheckpointsFound,
    DescribeCheckpoint,
    EraseCheckpoint,
    FindCheckpoints,
    OpenArchive,
    ReadArchivePart,
    SetExpiry,
)
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.statemgr.checkpoints.files import EXPIRY_FILE
from phaseloom.statemgr.checkpoints.marker import MARKER_FILE
from tests.integration.test_statemgr_checkpoints import (
    CONFIG,
    active,
    assert_holds,
    assert_same,
    heap_bytes,
    left_over,
    place,
    save,
    saving,
    slots,
    tensors,
)
from tests.support.meshcerts import NODE
from tests.support.statedaemon import OTHER, POLICY, Daemon, daemon, start

ROOT = "checkpoints"


async def found(d: Daemon, job: str = "", deployment: str = "", tenant: str = "acme") -> list[str]:
    answer = await d.agent.checkpoints(FindCheckpoints(tenant, job, deployment))
    assert isinstance(answer, CheckpointsFound)
    return [f"{each.job}/{each.deployment}/{each.name}" for each in answer.checkpoints]


async def erase(d: Daemon, name: str, *, if_expired: bool = False) -> int:
    answer = await d.agent.checkpoints(EraseCheckpoint(POLICY, name, if_expired))
    assert isinstance(answer, CheckpointErased)
    return answer.num_bytes


async def archived(d: Daemon, id: str, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        part = await d.agent.checkpoints(ReadArchivePart("acme", id, len(content)))
        assert isinstance(part, ArchiveRead)
        content += part.content
    return content


def pins(d: Daemon) -> list[str]:
    """The names of checkpoints that are kept for those who have loaded them."""
    return sorted(path.name for path in (d.directory / ROOT).glob("*/*/.*.loaded/*/*"))


def not_found(raised: pytest.ExceptionInfo[CallerError]) -> bool:
    return raised.value.info.code is Code.NOT_FOUND


async def test_checkpoints_are_found_described_and_erased_whoever_wrote_them(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank, other = await active(d), await start(d, OTHER, heap_bytes(), slots=slots())
        await save(rank, "one")
        await save(rank, "two")
        await d.agent.switch_in(OTHER, 1, 2, [POLICY])
        other.run(1)
        await save(other, "one")
        foreign = place(d, "foreign")
        foreign.mkdir()
        (foreign / "model.safetensors").write_bytes(b"12345")
        (foreign / "elsewhere").symlink_to("/etc/hostname")
        (foreign.parent / "no name").mkdir()
        all_of_policy = [f"sums/policy/{name}" for name in ("foreign", "one", "two")]
        assert await found(d) == ["letters/policy/one", *all_of_policy]
        assert await found(d, job="sums") == all_of_policy
        assert await found(d, deployment="sampler") == []
        assert await found(d, tenant="globex") == []
        answer = await d.agent.checkpoints(DescribeCheckpoint(POLICY, "one"))
        assert isinstance(answer, CheckpointsFound)
        (one,) = answer.checkpoints
        assert one.files == {path.name: path.stat().st_size for path in place(d, "one").iterdir()}
        assert one.num_bytes == sum(one.files.values())
        assert (one.seq, one.keep, one.expires_in_s) == (1, 0, None)
        answer = await d.agent.checkpoints(DescribeCheckpoint(POLICY, "foreign"))
        assert isinstance(answer, CheckpointsFound)
        assert answer.checkpoints[0].files == {"model.safetensors": 5}
        assert answer.checkpoints[0].weights_sha256 == ""
        assert await erase(d, "one") == one.num_bytes
        for name in ("one", "three"):
            with pytest.raises(CallerError) as raised:
                await erase(d, name)
            assert not_found(raised)
        for name in ("../one", ".one.lock", "", "o" * 65, "ö"):
            with pytest.raises(CallerError, match="name"):
                await erase(d, name)
        assert await found(d, job="sums") == ["sums/policy/foreign", "sums/policy/two"]


async def test_loaded_checkpoint_is_read_again_by_the_same_load_whatever_became_of_it(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        expected = tensors(rank)
        rank.run(2)
        await rank.client.read_checkpoint("c", load="first")
        assert_same(tensors(rank), expected)
        rank.run(3)
        newer = tensors(rank)
        await rank.client.take_snapshot("again", "c", 3, overwrite=True)
        await rank.client.write_checkpoint("again", "c", CONFIG, 0, overwrite=True)
        assert_holds(place(d, "c"), newer)
        await rank.client.read_checkpoint("c", load="second")
        assert_same(tensors(rank), newer)
        await erase(d, "c")
        await d.relaunch()
        for load, content in (("first", expected), ("second", newer)):
            await rank.client.read_checkpoint("c", load=load)
            assert_same(tensors(rank), content)
        for load in ("third", ""):
            with pytest.raises(CallerError) as raised:
                await rank.client.read_checkpoint("c", load=load)
            assert not_found(raised)
        assert pins(d) == ["c", "c"]
        # Of three, the oldest is given up.
        await save(rank, "d")
        await rank.client.read_checkpoint("d", load="third")
        assert pins(d) == ["c", "d"]
        # One that is refused is not kept, and takes no other's place.
        (place(d, "d") / "model.safetensors").unlink()
        with pytest.raises(Exception, match=r"model\.safetensors"):
            await rank.client.read_checkpoint("d", load="fourth")
        assert pins(d) == ["c", "d"]
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        assert pins(d) == []


async def test_overwritten_checkpoint_is_the_old_or_the_new_one_over_kills(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        old = tensors(rank)
        rank.run(2)
        await rank.client.take_snapshot("again", "c", 2, overwrite=True)
        # Killed when the old one has lost its name, and the new one has none yet.
        replaced = place(d, f".c.replaced.{NODE}.draft")
        place(d, "c").rename(replaced)
        await d.relaunch()
        await rank.client.read_checkpoint("c")
        assert_same(tensors(rank), old)
        sha256 = await rank.client.write_checkpoint("again", "c", CONFIG, 0, overwrite=True)
        rank.run(3)
        assert not replaced.exists()
        # Killed when the new one has its name, and the old one is there still.
        replaced.mkdir()
        (replaced / "model.safetensors").touch()
        await d.relaunch()
        assert await rank.client.write_checkpoint("again", "c", CONFIG, 0) == sha256
        assert left_over(d) == []
        with pytest.raises(CallerError) as raised:
            await rank.client.take_snapshot("more", "c", 3)
        assert raised.value.info.code is Code.ALREADY_EXISTS


@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
async def test_load_is_repeated_as_it_was_if_another_program_overwrites_its_files(
    is_link: bool, short_dir: Path
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        expected = tensors(rank)
        file = place(d, "c") / "model.safetensors"
        (place(d, "c") / MARKER_FILE).unlink()  # as if another program had written it
        if is_link:
            file.rename(short_dir / "elsewhere")
            file.symlink_to(short_dir / "elsewhere")
        rank.run(2)
        await rank.client.read_checkpoint("c", load="first", optimizer=False)
        overwrite(file)
        rank.run(3)
        await rank.client.read_checkpoint("c", load="first", optimizer=False)
        loaded = tensors(rank)
        weights = [name for name in load_file(file) if name in loaded]
        assert weights
        for name in weights:
            assert np.array_equal(loaded[name], expected[name]), name
        await rank.client.read_checkpoint("c", load="second", optimizer=False)
        newer = tensors(rank)
        assert not all(np.array_equal(newer[name], expected[name]) for name in weights)


async def test_load_of_an_own_checkpoint_that_was_overwritten_in_place_is_a_loss(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        await rank.client.read_checkpoint("c", load="first")
        expected = tensors(rank)
        overwrite(place(d, "c") / "model.safetensors")
        with pytest.raises(ResourceError) as lost:
            await rank.client.read_checkpoint("c", load="first")
        assert lost.value.info.code is Code.DATA_LOSS
        assert_same(tensors(rank), expected)


def overwrite(file: Path) -> None:
    """Change the last bytes of a file in place, and nothing that `stat` shows but the change."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        last = opened.read()
        opened.seek(-8, os.SEEK_END)
        opened.write(bytes(byte ^ 1 for byte in last))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_expired_checkpoint_is_removed_once_however_many_nodes_look(
    short_dir: Path,
) -> None:
    root = str(short_dir / ROOT)
    async with (
        saving(short_dir) as d,
        daemon(short_dir / "b", NODE="b", CHECKPOINT_ROOT=root) as b,
    ):
        rank = await active(d)
        for name in ("soon", "later", "kept"):
            await rank.client.take_snapshot(name, name, 1)
            ttl_s = {"soon": 1e-3, "later": 1e4, "kept": 0.0}[name]
            await rank.client.write_checkpoint(name, name, CONFIG, 0, ttl_s=ttl_s)

        async def expired(of: Daemon) -> list[str]:
            return [each.name for each in (await of.agent.expired_checkpoints()).checkpoints]

        while "soon" not in await expired(b):
            pass
        assert await expired(d) == ["soon"]
        for name in ("later", "kept"):
            with pytest.raises(CallerError) as raised:
                await erase(d, name, if_expired=True)
            assert not_found(raised)
        both = [erase(of, "soon", if_expired=True) for of in (d, b)]
        ended = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(isinstance(each, CallerError) for each in ended) == [False, True]

        answer = await d.agent.checkpoints(SetExpiry(POLICY, "kept", 1e3))
        assert isinstance(answer, CheckpointsFound)
        assert 0 < (answer.checkpoints[0].expires_in_s or 0) <= 1e3
        await b.agent.checkpoints(SetExpiry(POLICY, "later", 0.0))
        assert not (place(d, "later") / EXPIRY_FILE).exists()
        (place(d, "kept") / EXPIRY_FILE).write_text("garbage")
        assert await expired(d) == []
        assert await found(d) == ["sums/policy/kept", "sums/policy/later"]
        with pytest.raises(CallerError) as raised:
            await d.agent.checkpoints(SetExpiry(POLICY, "soon", 1.0))
        assert not_found(raised)


async def test_archive_is_whole_whatever_becomes_of_the_checkpoint(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        expected = {path.name: path.read_bytes() for path in place(d, "c").iterdir()}
        await d.agent.checkpoints(SetExpiry(POLICY, "c", 1e3))
        opened = await d.agent.checkpoints(OpenArchive(POLICY, "c"))
        assert isinstance(opened, ArchiveOpened)
        first = await d.agent.checkpoints(ReadArchivePart("acme", opened.archive, 0))
        await erase(d, "c")
        content = await archived(d, opened.archive, opened.num_bytes)
        assert isinstance(first, ArchiveRead)
        assert content.startswith(first.content)
        offsets = range(0, opened.num_bytes, max(1, opened.num_bytes // 7))
        parts = await asyncio.gather(
            *(d.agent.checkpoints(ReadArchivePart("acme", opened.archive, at)) for at in offsets)
        )
        for at, part in zip(offsets, parts, strict=True):
            assert isinstance(part, ArchiveRead)
            assert part.content
            assert content[at:].startswith(part.content), "readers do not disturb each other"
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            read = {member.name: tar.extractfile(member) for member in tar.getmembers()}
            assert {name: file.read() for name, file in read.items() if file} == {
                f"c/{name}": content for name, content in expected.items()
            }
        end = await d.agent.checkpoints(ReadArchivePart("acme", opened.archive, opened.num_bytes))
        assert end == ArchiveRead(b"")
        for tenant, archive in (("globex", opened.archive), ("acme", f"{NODE}.{'0' * 32}")):
            with pytest.raises(CallerError) as raised:
                await d.agent.checkpoints(ReadArchivePart(tenant, archive, 0))
            assert not_found(raised)
        for offset in (-1, opened.num_bytes + 1):
            with pytest.raises(CallerError, match="from 0 to"):
                await d.agent.checkpoints(ReadArchivePart("acme", opened.archive, offset))
        await d.relaunch()
        with pytest.raises(CallerError) as raised:
            await d.agent.checkpoints(ReadArchivePart("acme", opened.archive, 0))
        assert not_found(raised)
        with pytest.raises(CallerError) as raised:
            await d.agent.checkpoints(OpenArchive(POLICY, "c"))
        assert not_found(raised)
