"""Checkpoints of a real daemon: written while ranks go on, killed, out of disk, damaged, pruned."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load_file

from phaseloom.common.contract.checkpoints import EraseCheckpoint, SetExpiry
from phaseloom.common.contract.codec import JSON
from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import Operation, SaveState
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.transport.bus import Bus
from phaseloom.statemgr.checkpoints.marker import BLOCK_BYTES
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.rank.calls import DeviceCall
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.group import GroupLost, WpgRanks
from phaseloom.worker.rank.outcomes import Outcomes
from phaseloom.worker.rank.stateops import StateOperations
from phaseloom.worker.rank.wire import Payload, RankConfig
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap
from tests.support.node import policy_spec
from tests.support.statedaemon import (
    OTHER,
    POLICY,
    Daemon,
    MiB,
    Rank,
    daemon,
    flip_in_memory,
    join,
    start,
    start_ranks,
)

SIZE = 3 * MiB
Tensors = dict[str, np.ndarray[Any, Any]]
CONFIG = json.dumps({"model_type": "none"})


def slots(*, rank: int = 0, num_ranks: int = 1) -> list[TensorSlot]:
    """A weight of 1024 rows, another of some, gradients and a counter; rows dealt out to ranks."""

    def slot(name: str, role: Role, rows: int, columns: int, offset: int) -> TensorSlot:
        own = rows // num_ranks
        part = {"global_shape": [rows, columns], "start": [rank * own, 0]} if num_ranks > 1 else {}
        return TensorSlot(name, role, "float32", [own, columns], offset, own * columns * 4, **part)

    first = slot("a.weight", Role.WEIGHT, 1024, 256, 0)
    second = slot("b.weight", Role.WEIGHT, 30, 7, first.num_bytes)
    third = slot("a.weight.grad", Role.GRADIENT, 1024, 256, first.num_bytes + 4096)
    step = TensorSlot("step", Role.OPTIMIZER, "float32", [], third.offset + third.num_bytes, 4)
    return [first, second, third, step]


def heap_bytes(num_ranks: int = 1) -> int:
    return slots(num_ranks=num_ranks)[-1].offset + 64


@asynccontextmanager
async def saving(
    short_dir: Path,
    *,
    host_bytes: int = 256 * MiB,
    file_bytes: int = 10**9,
    home: str = ".",
    max_bytes: int = 10**9,
    limits: dict[str, dict[str, int]] | None = None,
) -> AsyncIterator[Daemon]:
    """Args: home: of the daemon; its checkpoints are where all others' are."""
    async with daemon(
        short_dir / home,
        host_bytes=host_bytes,
        CHECKPOINT_ROOT=str(short_dir / "checkpoints"),
        CHECKPOINT_FILE_BYTES=str(file_bytes),
        MAX_CHECKPOINT_BYTES=str(max_bytes),
        TENANT_LIMITS=json.dumps(limits or {}),
    ) as d:
        yield d


async def active(d: Daemon, key: DeploymentKey = POLICY, *, incarnation: int = 1) -> Rank:
    """A rank that has run operation 1."""
    rank = await start(d, key, heap_bytes(), slots=slots(), incarnation=incarnation)
    await d.agent.switch_in(key, incarnation, 1, [])
    rank.run(1)
    return rank


async def save(rank: Rank, name: str, operation: str = "", keep: int = 0) -> str:
    operation = operation or f"saves {name}"
    await rank.client.take_snapshot(operation, name, rank.seq)
    return await rank.client.write_checkpoint(operation, name, CONFIG, keep)


def place(d: Daemon, name: str, key: DeploymentKey = POLICY) -> Path:
    return d.directory / "checkpoints" / key.tenant / key.job / key.deployment / name


def left_over(d: Daemon) -> list[str]:
    """What is beside the checkpoints that have their name."""
    return [p.name for p in (d.directory / "checkpoints").glob("*/*/*/.*")]


def tensors(rank: Rank) -> Tensors:
    return {
        slot.name: np.frombuffer(rank.heap.buffer, "<f4", slot.num_bytes // 4, slot.offset)
        .reshape(slot.shape)
        .copy()
        for slot in rank.slots
    }


def assert_holds(directory: Path, expected: Tensors) -> None:
    found: Tensors = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    assert_same(found, expected)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


async def used_bytes(d: Daemon) -> int:
    return (await d.agent.status()).host_used_bytes


# --- saving while work goes on -------------------------------------------------------------------


async def test_checkpoint_is_of_the_snapshot_whatever_the_deployment_does_afterwards(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank, other = await active(d), await start(d, OTHER, SIZE)
        expected = tensors(rank)
        await rank.client.take_snapshot("op", "c", 1)
        rank.run(2)
        await d.agent.switch_in(OTHER, 1, 2, [POLICY])
        other.run(1)
        await d.agent.switch_in(POLICY, 1, 3, [OTHER])
        rank.run(3)
        sha256 = await rank.client.write_checkpoint("op", "c", CONFIG, 0)
        assert_holds(place(d, "c"), expected)
        assert (place(d, "c") / "config.json").read_text() == CONFIG
        # Whoever asks again is answered the same, whether there is a snapshot or not.
        await rank.client.take_snapshot("op", "c", 3)
        assert await rank.client.write_checkpoint("op", "c", CONFIG, 0) == sha256
        with pytest.raises(CallerError) as taken:
            await rank.client.take_snapshot("another", "c", 3)
        assert taken.value.info.code is Code.ALREADY_EXISTS
        assert left_over(d) == []


async def test_memory_of_a_snapshot_is_used_for_the_next_one_and_never_lost(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        before = await used_bytes(d)
        await save(rank, "first")
        after = await used_bytes(d)
        assert after > before
        for number in range(3):
            await save(rank, f"again{number}")
            # One that nobody has written makes room for the next.
            await rank.client.take_snapshot(f"never {number}", f"never{number}", rank.seq)
        await save(rank, "last")
        assert await used_bytes(d) == after
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        assert await used_bytes(d) == 0


async def test_snapshot_at_another_operation_than_the_last_is_refused(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        with pytest.raises(CallerError) as stale:
            await rank.client.take_snapshot("op", "c", 0)
        assert stale.value.info.code is Code.FAILED_PRECONDITION
        with pytest.raises(ResourceError, match=r"there is no snapshot of .*"):
            await rank.client.write_checkpoint("op", "c", CONFIG, 0)
        assert await save(rank, "c")


async def test_save_whose_snapshot_is_gone_is_left_to_the_next_incarnation(
    short_dir: Path, bus: Bus
) -> None:
    """As where the agent has died and the rank has not yet: its word must not be the outcome."""
    async with saving(short_dir) as d:
        rank = await active(d)
        settings = RankConfig("", POLICY, 1, policy_spec(), "node", 0, "", "")
        factory = backend_factory("fsdp")
        backend = factory(settings.spec, Heap(factory.plan(settings.spec).heap_bytes))
        agent: Any = None  # of several ranks only
        with ThreadPoolExecutor(1) as thread:
            state = StateOperations(
                settings,
                bus,
                rank.client,
                Executor(settings, backend, applied=rank.seq),
                WpgRanks(thread, agent),
                Outcomes(settings, bus),
            )
            args = SaveState("c")
            operation = Operation("op", 1, args)
            key = OperationKey(POLICY.tenant, POLICY.job, POLICY.deployment, "2")
            permit = Permit(
                CommandId(1, 0), NodeId("node"), 1, key, "op", "save_state", 1, 1, rank.seq
            )
            call = DeviceCall(permit, operation, Payload(key, b"", JSON), "")
            with pytest.raises(GroupLost):
                await state.save(
                    call, args, lambda: rank.client.take_snapshot("other", "other", rank.seq)
                )
        # It is made where it can be.
        assert await save(rank, "c", "op")


async def test_snapshot_that_host_memory_has_no_room_for_is_refused_with_the_numbers(
    short_dir: Path,
) -> None:
    async with saving(short_dir, host_bytes=SIZE) as d:
        rank = await active(d)
        used = await used_bytes(d)
        with pytest.raises(ResourceError) as full:
            await save(rank, "c")
        assert full.value.info.code is Code.RESOURCE_EXHAUSTED
        assert full.value.info.details["budget_bytes"] == str(SIZE)
        assert await used_bytes(d) == used
        await d.agent.switch_out(POLICY, 1, 1)


async def test_names_that_lead_elsewhere_and_ranks_that_do_not_lead_are_refused(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        for name in ("../c", "/tmp/c", ".c", ""):
            with pytest.raises(CallerError) as refused:
                await rank.client.take_snapshot("op", name, 1)
            assert refused.value.info.field == "args.name"
            with pytest.raises(CallerError):
                await rank.client.read_checkpoint(name)
        _, follower = await start_ranks(d, OTHER, [MiB, MiB], devices=[0, 0])
        for call in (
            follower.client.take_snapshot("op", "c", 0),
            follower.client.write_checkpoint("op", "c", CONFIG, 0),
            follower.client.prune_checkpoints(1, []),
        ):
            with pytest.raises(CallerError) as denied:
                await call
            assert denied.value.info.code is Code.PERMISSION_DENIED


async def test_slice_that_lies_about_its_place_is_not_filled(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        await save(await active(d), "c")
        outside, *others = slots()
        outside = structs.replace(outside, global_shape=outside.shape, start=[1024, 0])
        liar = await start(d, POLICY, heap_bytes(), slots=[outside, *others], incarnation=2)
        await d.agent.switch_in(POLICY, 2, 2, [])
        with pytest.raises(CallerError) as refused:
            await liar.client.read_checkpoint("c")
        assert refused.value.info.field == "tensors[a.weight]"


async def test_slices_that_make_no_whole_are_refused_and_nothing_is_left(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        half = [slots(num_ranks=2)[0]]
        rank = await start(d, POLICY, heap_bytes(), slots=half)
        await d.agent.switch_in(POLICY, 1, 1, [])
        with pytest.raises(
            CallerError, match=r"a\.weight: its slices do not cover the whole tensor"
        ):
            await save(rank, "c")
        assert left_over(d) == []
        assert not place(d, "c").exists()


# --- files ---------------------------------------------------------------------------------------


async def test_tensors_are_split_over_files_of_bounded_size(short_dir: Path) -> None:
    async with saving(short_dir, file_bytes=MiB) as d:
        rank = await active(d)
        await save(rank, "c")
        files = {path.name: path.stat().st_size for path in place(d, "c").iterdir()}
        assert set(files) == {
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "operation.json",
            "training-00001-of-00002.safetensors",
            "training-00002-of-00002.safetensors",
            "training.safetensors.index.json",
        }
        (short_dir / "ordinary").touch()
        modes = {path.stat().st_mode for path in place(d, "c").iterdir()}
        assert modes == {(short_dir / "ordinary").stat().st_mode}  # as the umask says
        index = json.loads((place(d, "c") / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {
            "a.weight": "model-00001-of-00002.safetensors",
            "b.weight": "model-00002-of-00002.safetensors",
        }
        assert index["metadata"]["total_size"] == (1024 * 256 + 30 * 7) * 4
        expected = tensors(rank)
        assert_holds(place(d, "c"), expected)
        rank.run(2)
        await rank.client.read_checkpoint("c")
        assert_same(tensors(rank), expected)


async def test_checkpoint_of_two_ranks_is_loaded_by_one_and_back(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        tokens = ["rank 0", "rank 1"]
        await d.agent.register_wpg(tokens, POLICY, 1, [0, 0], 0)
        pair = [Rank(Heap(heap_bytes(2)), slots(rank=index, num_ranks=2)) for index in range(2)]
        for token, rank in zip(tokens, pair, strict=True):
            await join(d, token, rank)
        await d.agent.switch_in(POLICY, 1, 1, [])
        for index, rank in enumerate(pair):
            rank.run(1 + index)
            rank.seq = 1
        whole = together([tensors(rank) for rank in pair])
        await save(pair[0], "pair")
        assert_holds(place(d, "pair"), whole)

        alone = await active(d, incarnation=2)
        await alone.client.read_checkpoint("pair")
        assert_same(tensors(alone), whole)
        sha256 = await save(alone, "alone")
        assert sha256 == await alone.client.read_checkpoint("pair")


@pytest.mark.parametrize("has_left", [False, True])
async def test_incarnations_of_a_deployment_over_nodes_are_never_mixed_in_a_checkpoint(
    short_dir: Path, *, has_left: bool
) -> None:
    """Two incarnations at one seq may differ in bits, where devices do not sum up in one order.
    When the first one ends, one node has a snapshot; or the other one has left its part, too."""
    root = str(short_dir / "checkpoints")
    async with (
        daemon(short_dir / "a", NODE="a", CHECKPOINT_ROOT=root) as one,
        daemon(short_dir / "b", NODE="b", CHECKPOINT_ROOT=root) as two,
    ):
        first, second = await pair_of_nodes([one, two], 1)
        await first.client.take_snapshot("op", "c", 1)
        if has_left:
            await second.client.take_snapshot("op", "c", 1)
            await second.client.write_checkpoint("op", "c", "", 0)
        first, second = again = await pair_of_nodes([one, two], 2)
        for rank in again:
            await rank.client.take_snapshot("op", "c", 1)
        await second.client.write_checkpoint("op", "c", "", 0)
        # As the agent does whose answer was lost.
        await second.client.write_checkpoint("op", "c", "", 0)
        await first.client.write_checkpoint("op", "c", CONFIG, 0)
        directory = short_dir / "checkpoints" / POLICY.tenant / POLICY.job / POLICY.deployment
        assert_holds(directory / "c", together([tensors(rank) for rank in again]))
        assert [path.name for path in directory.iterdir()] == ["c"]


async def pair_of_nodes(daemons: list[Daemon], incarnation: int) -> list[Rank]:
    """A rank of two on each, at seq 1, and with a content of its own."""
    ranks = []
    for at, d in enumerate(daemons):
        rank = await start(
            d,
            POLICY,
            heap_bytes(2),
            slots=slots(rank=at, num_ranks=2),
            incarnation=incarnation,
            content=10 * incarnation + at,
            applied=1,
            rank_offset=at,
            num_ranks=2,
        )
        await d.agent.switch_in(POLICY, incarnation, 1, [])
        ranks.append(rank)
    return ranks


def together(parts: list[Tensors]) -> Tensors:
    """Of two ranks."""
    return {
        name: np.concatenate([part[name] for part in parts]) if array.shape else array
        for name, array in parts[0].items()
    }


# --- kills ---------------------------------------------------------------------------------------


async def test_daemon_that_is_killed_after_the_snapshot_writes_it_in_its_next_life(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        expected = tensors(rank)
        await rank.client.take_snapshot("op", "c", 1)
        rank.run(2)
        await d.relaunch()
        await rank.client.write_checkpoint("op", "c", CONFIG, 0)
        assert_holds(place(d, "c"), expected)


async def test_daemon_that_is_killed_in_the_middle_leaves_all_or_nothing(short_dir: Path) -> None:
    """Wherever it was: the call that waited is answered by the next daemon, from that snapshot."""
    async with saving(short_dir) as d:
        rank = await active(d)
        expected = tensors(rank)
        await rank.client.take_snapshot("op", "c", 1)
        rank.run(2)
        writing = asyncio.create_task(rank.client.write_checkpoint("op", "c", CONFIG, 0))
        async with asyncio.timeout(60):
            while not left_over(d) and not place(d, "c").exists():
                await asyncio.sleep(0)
        await d.relaunch()
        sha256 = await writing
        assert_holds(place(d, "c"), expected)
        assert left_over(d) == []
        assert await rank.client.read_checkpoint("c") == sha256


async def test_snapshot_outlives_its_ranks_and_is_written_for_their_successors(
    short_dir: Path,
) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        expected = tensors(rank)
        await rank.client.take_snapshot("op", "c", 1)
        await rank.client.close()
        await d.agent.drop_wpg(POLICY, 1)
        again = await active(d, incarnation=2)
        await again.client.take_snapshot("op", "c", 1)
        await again.client.write_checkpoint("op", "c", CONFIG, 0)
        assert_holds(place(d, "c"), expected)


async def test_job_that_ends_takes_what_is_not_durable_with_it(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "durable")
        await rank.client.take_snapshot("op", "c", 1)
        writing = asyncio.create_task(rank.client.write_checkpoint("op", "c", CONFIG, 0))
        await d.agent.drop_wpg(POLICY, 1, forget=True)
        with contextlib.suppress(PhaseloomError):
            await writing
        assert await used_bytes(d) == 0
        assert left_over(d) == []
        assert place(d, "durable").exists()


# --- memory that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True])
async def test_bit_that_flips_in_a_snapshot_is_in_no_checkpoint(
    short_dir: Path, *, is_killed: bool
) -> None:
    """The operation fails by it, with all names, and nothing else."""
    async with saving(short_dir) as d:
        rank = await active(d)
        await rank.client.take_snapshot("op", "c", 1)
        await d.logged(f"the snapshot of {POLICY} for checkpoint 'c' has its checksums")
        if is_killed:
            await d.relaunch()
            await d.agent.status()  # answered once the snapshot is taken over
        flip_in_memory(d.pid, f"a copy of {POLICY}")
        with pytest.raises(ResourceError, match=rf"{POLICY} rank 0.*a\.weight") as bad:
            await rank.client.write_checkpoint("op", "c", CONFIG, 0)
        assert bad.value.info.code is Code.DATA_LOSS
        assert bad.value.info.details["deployment"] == str(POLICY)
        assert bad.value.info.details["rank"] == "0"
        assert not place(d, "c").exists()
        assert left_over(d) == []
        expected = tensors(rank)
        await save(rank, "c", "again")
        assert_holds(place(d, "c"), expected)


async def test_bit_that_flips_before_a_snapshot_has_its_checksums_is_found_by_the_host_copys(
    short_dir: Path,
) -> None:
    """An offloaded state is copied from its host copy, which has a digest."""
    async with saving(short_dir) as d:
        rank = await active(d)
        await d.agent.switch_out(POLICY, 1, 1)
        await d.digested()
        flip_in_memory(d.pid, f"the host copy of {POLICY}")
        with pytest.raises(ResourceError, match=rf"{POLICY}.* is bad") as bad:
            await rank.client.take_snapshot("op", "c", 1)
        assert bad.value.info.code is Code.DATA_LOSS


# --- disk ----------------------------------------------------------------------------------------


async def test_full_disk_fails_that_checkpoint_and_nothing_else(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        used = await used_bytes(d)
        before = resource.prlimit(d.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(d.pid, resource.RLIMIT_FSIZE, (MiB // 2, before[1]))
        with pytest.raises(ResourceError) as full:
            await save(rank, "c")
        assert full.value.info.code is Code.RESOURCE_EXHAUSTED
        assert left_over(d) == []
        assert not place(d, "c").exists()
        content = rank.run(2)
        await d.agent.switch_out(POLICY, 1, 1)
        await d.agent.switch_in(POLICY, 1, 2, [])
        assert rank.digest() == content
        resource.prlimit(d.pid, resource.RLIMIT_FSIZE, before)
        expected = tensors(rank)
        await save(rank, "c")
        assert_holds(place(d, "c"), expected)
        assert await used_bytes(d) <= used + heap_bytes() + 4096


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


async def test_flipped_bit_is_found_named_and_never_loaded(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        content = rank.run(2)
        await d.relaunch()  # its memory of the snapshot is gone
        for file, offset, named in (
            ("model.safetensors", 4096 + 5, "a.weight"),
            ("model.safetensors", -3, "b.weight"),
            ("model.safetensors", 30, "model.safetensors"),
            ("model.safetensors", 4000, "header"),
            ("training.safetensors", 4096 + BLOCK_BYTES - 1, "a.weight.grad"),
            ("operation.json", 40, "its checksum"),
            ("operation.json", -20, "its checksum"),
        ):
            flip(place(d, "c") / file, offset)
            with pytest.raises(ResourceError, match=re.escape(named)) as damaged:
                await rank.client.read_checkpoint("c")
            assert damaged.value.info.code is Code.DATA_LOSS
            assert file in damaged.value.info.message
            assert rank.digest() == content
            flip(place(d, "c") / file, offset)
        await rank.client.read_checkpoint("c")


async def test_file_that_ends_early_or_is_gone_is_data_loss(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        await d.relaunch()
        file = place(d, "c") / "training.safetensors"
        whole = file.read_bytes()
        for content in (whole[:-1], b"", None):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(ResourceError, match=r"training\.safetensors") as damaged:
                await rank.client.read_checkpoint("c")
            assert damaged.value.info.code is Code.DATA_LOSS
            file.touch()
        file.write_bytes(whole)
        assert await rank.client.read_checkpoint("c")


async def begun(d: Daemon, name: str, *, incarnation: int) -> Rank:
    """An incarnation whose initial state is a checkpoint; it is offloaded."""
    token = f"begun {incarnation}"
    await d.agent.register_wpg([token], POLICY, incarnation, [0], 0)
    rank = Rank(Heap(heap_bytes()), slots())
    rank.client = await RankStateClient.connect(
        d.socket, token, applied=rank.applied, on_loaded=rank.loaded
    )
    d.ranks.append(rank.client)
    await rank.client.register_heap(rank.heap, rank.slots)
    rank.seq = 5
    await rank.client.commit_checkpoint(name, rank.seq)
    return rank


async def test_incarnation_begins_from_a_checkpoint(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        expected = tensors(rank)
        rank.run(2)
        reborn = await begun(d, "c", incarnation=2)
        await d.agent.switch_in(POLICY, 2, 2, [])
        assert_same(tensors(reborn), expected)


async def test_load_where_host_memory_has_no_room_changes_nothing(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        await save(await active(d), "c")
    async with saving(short_dir, host_bytes=SIZE, home="again") as d:
        rank = await active(d)
        content = rank.run(2)
        with pytest.raises(ResourceError) as full:
            await rank.client.read_checkpoint("c")
        assert full.value.info.code is Code.RESOURCE_EXHAUSTED
        assert rank.digest() == content


async def test_daemon_that_is_stopped_for_a_moment_loads_all_the_same(short_dir: Path) -> None:
    """A load that is under way as the daemon is killed is asked again of the next one."""
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "c")
        expected = tensors(rank)
        rank.run(2)
        os.kill(d.pid, signal.SIGSTOP)
        loading = asyncio.create_task(rank.client.read_checkpoint("c"))
        await d.relaunch()
        await loading
        assert_same(tensors(rank), expected)


# --- retention -----------------------------------------------------------------------------------


async def test_newest_are_kept_and_what_is_needed_or_was_meant_to_stay(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "mine")
        for number in range(1, 6):
            await save(rank, f"auto{number}", keep=2)
            await rank.client.prune_checkpoints(2, ["auto1", f"auto{number}"])
        assert {path.name for path in place(d, "mine").parent.iterdir()} == {
            "mine",
            "auto1",
            "auto4",
            "auto5",
        }
        await rank.client.read_checkpoint("auto1")
        await rank.client.prune_checkpoints(1, [])
        assert {path.name for path in place(d, "mine").parent.iterdir()} == {"mine", "auto5"}
        with pytest.raises(CallerError, match="one or more"):
            await rank.client.prune_checkpoints(0, [])


async def test_checkpoint_is_removed_by_name(short_dir: Path) -> None:
    async with saving(short_dir) as d:
        rank = await active(d)
        await save(rank, "mine")
        files = sum(path.stat().st_size for path in place(d, "mine").rglob("*") if path.is_file())
        assert await rank.client.remove_checkpoint("mine") == files
        assert [*place(d, "mine").parent.iterdir()] == []
        assert await rank.client.remove_checkpoint("mine") == 0
        with pytest.raises(CallerError, match="name"):
            await rank.client.remove_checkpoint("../mine")
        await save(rank, "mine")
        await rank.client.read_checkpoint("mine")


async def test_name_that_is_being_written_is_taken(short_dir: Path) -> None:
    """By an operation that nobody waits for any more; the draft of the first is left alone."""
    async with saving(short_dir) as d:
        rank = await active(d)
        expected = tensors(rank)
        await rank.client.take_snapshot("first", "one", 1)
        first = asyncio.create_task(rank.client.write_checkpoint("first", "one", CONFIG, 0))
        second = asyncio.create_task(rank.client.take_snapshot("second", "one", 1))
        with pytest.raises(CallerError) as caught:
            await second
        assert caught.value.info.code is Code.ALREADY_EXISTS
        await first
        assert_holds(place(d, "one"), expected)
        assert left_over(d) == []


# --- a tenant's limit ----------------------------------------------------------------------------

STRANGER = DeploymentKey("other", "sums", "policy")


async def refused_save(rank: Rank, name: str) -> ResourceError:
    with pytest.raises(ResourceError) as refused:
        await save(rank, name)
    info = refused.value.info
    assert info.code is Code.RESOURCE_EXHAUSTED
    assert info.details["bound"] == "max_checkpoint_bytes"
    assert "max_checkpoint_bytes" in info.remedy
    return refused.value


async def test_checkpoints_of_a_tenant_have_a_limit_that_deleted_ones_leave(
    short_dir: Path,
) -> None:
    size = sum(slot.num_bytes for slot in slots())
    limits = {STRANGER.tenant: {"max_checkpoint_bytes": 0}}
    async with saving(short_dir, max_bytes=5 * size // 2, limits=limits) as d:
        rank = await active(d)
        await save(rank, "first")
        await save(rank, "second")
        before = await used_bytes(d)
        await refused_save(rank, "third")
        assert not place(d, "third").exists()
        assert left_over(d) == []
        assert await used_bytes(d) == before
        await d.relaunch()
        await refused_save(rank, "third")
        other = await active(d, STRANGER)
        for name in ("first", "second", "third"):
            await save(other, name)
        await d.agent.switch_in(POLICY, 1, 2, [STRANGER])
        await rank.client.remove_checkpoint("first")
        await save(rank, "third")
        await refused_save(rank, "fourth")
        await d.agent.checkpoints(SetExpiry(POLICY, "third", 0.01))
        while not (await d.agent.expired_checkpoints()).checkpoints:
            await asyncio.sleep(0.01)
        await d.agent.checkpoints(EraseCheckpoint(POLICY, "third", if_expired=True))
        await save(rank, "fourth")


async def test_checkpoints_that_are_not_written_yet_count_and_cannot_pass_the_limit_together(
    short_dir: Path,
) -> None:
    size = sum(slot.num_bytes for slot in slots())
    async with saving(short_dir, max_bytes=3 * size // 2) as d:
        rank, other = await active(d), await active(d, OTHER)
        saves = [each.client.take_snapshot("op", "c", each.seq) for each in (rank, other)]
        results = await asyncio.gather(*saves, return_exceptions=True)
        assert [type(result) for result in results if result] == [ResourceError]
        first, second = (other, rank) if results[0] else (rank, other)
        # The daemon still has the snapshot after a restart, and with it the reservation.
        await d.relaunch()
        await refused_save(second, "c")
        await first.client.write_checkpoint("op", "c", CONFIG, 0)
        await refused_save(second, "c")
        await first.client.remove_checkpoint("c")
        await save(second, "c")
