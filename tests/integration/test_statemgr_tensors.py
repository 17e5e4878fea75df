"""What is equal in part is held once in that part: tensors, and rows of tensors."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.common.contract.state_agent import ContentState, StatusReport
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap
from tests.support.statedaemon import (
    POLICY,
    Daemon,
    Rank,
    daemon,
    emptied,
    flip_in_memory,
    real_memory,
    start,
    taken,
)

COLUMNS = 4096
ROWS = 64
LAYERS = 8
TENSOR = ROWS * COLUMNS
HEAD = COLUMNS * 2
"""Bytes of what differs."""
FIRST = DeploymentKey("acme", "sums", "reference")
SECOND = DeploymentKey("acme", "sums", "reward")
THIRD = DeploymentKey("acme", "letters", "reference")
FOREIGN = DeploymentKey("umbrella", "sums", "reference")
NAMES = [f"layers.{number}" for number in range(LAYERS)]


def rows_of(name: str, rows: range, seed: int = 0) -> bytes:
    """Of a tensor: its bytes depend on its name, on the row and on the seed."""
    rng = random.Random(f"{name} {seed}")
    whole = rng.randbytes(ROWS * COLUMNS)
    return whole[rows.start * COLUMNS : rows.stop * COLUMNS]


def state(
    seeds: dict[str, int], rows: range = range(ROWS), head: int | None = None
) -> list[tuple[TensorSlot, bytes]]:
    """A rank's tensors: so many rows of each layer, and a head of its own, first of all."""
    tensors: list[tuple[TensorSlot, bytes]] = []
    at = 0
    if head is not None:
        slot = TensorSlot("head", Role.WEIGHT, "uint8", [HEAD], 0, HEAD)
        tensors.append((slot, random.Random(head).randbytes(HEAD)))
        at = HEAD
    for name in NAMES:
        num_bytes = len(rows) * COLUMNS
        is_whole = len(rows) == ROWS
        tensors.append(
            (
                TensorSlot(
                    name,
                    Role.WEIGHT,
                    "uint8",
                    [len(rows), COLUMNS],
                    at,
                    num_bytes,
                    [] if is_whole else [ROWS, COLUMNS],
                    [] if is_whole else [rows.start, 0],
                ),
                rows_of(name, rows, seeds.get(name, 0)),
            )
        )
        at += num_bytes
    return tensors


class Model(Rank):
    """A frozen rank with several tensors."""

    def __init__(self, tensors: Sequence[tuple[TensorSlot, bytes]]) -> None:
        slots = [slot for slot, _ in tensors]
        size = slots[-1].offset + slots[-1].num_bytes
        super().__init__(Heap(size), slots, frozen=True)
        self.size = size
        self.expected = b""
        self.write(tensors)

    def write(self, tensors: Sequence[tuple[TensorSlot, bytes]], seq: int = 0) -> None:
        """A mutating operation."""
        for slot, content in tensors:
            self.heap.buffer[slot.offset : slot.offset + slot.num_bytes] = content
        self.expected = bytes(self.heap.buffer)
        self.seq = seq


async def frozen(
    d: Daemon,
    key: DeploymentKey,
    *states: Sequence[tuple[TensorSlot, bytes]],
    incarnation: int = 1,
) -> list[Model]:
    """A deployment with a rank for each, rank i on device i; it is offloaded then."""
    tokens = [f"token of {key} {incarnation} {index}" for index in range(len(states))]
    await d.agent.register_wpg(tokens, key, incarnation, list(range(len(states))), 0)
    ranks = [Model(tensors) for tensors in states]
    for token, rank in zip(tokens, ranks, strict=True):
        rank.client = await RankStateClient.connect(
            d.socket, token, applied=rank.applied, on_loaded=rank.loaded
        )
        d.ranks.append(rank.client)
        assert not await rank.client.register_heap(rank.heap, rank.slots, frozen=True)
        await rank.client.commit_initial()
    return ranks


async def until(d: Daemon, predicate: Callable[[StatusReport], bool]) -> StatusReport:
    """The daemon finds what is equal in the background."""
    try:
        async with asyncio.timeout(30):
            while not predicate(report := await d.agent.status()):
                pass
    except TimeoutError:
        raise AssertionError(f"{report}\n{d.text()}") from None
    return report


async def held(d: Daemon, num_bytes: int) -> StatusReport:
    """Once so many bytes of host memory are taken."""
    return await until(d, lambda report: report.host_used_bytes == num_bytes)


def of(report: StatusReport, key: DeploymentKey) -> ContentState:
    (content,) = [content for content in report.contents if content.users == [str(key)]]
    return content


class Visits:
    """Each switches ranks in, and looks whether everything is there, and out again."""

    def __init__(self, d: Daemon) -> None:
        self.daemon = d
        self.epoch = 0

    async def __call__(self, ranks: list[Model], key: DeploymentKey, incarnation: int = 1) -> None:
        self.epoch += 1
        await self.daemon.agent.switch_in(key, incarnation, self.epoch, [])
        for rank in ranks:
            assert bytes(rank.heap.buffer) == rank.expected
        self.epoch += 1
        await self.daemon.agent.switch_out(key, incarnation, self.epoch)


WHOLE = LAYERS * TENSOR


async def test_models_that_differ_in_one_tensor_hold_the_others_once(short_dir: Path) -> None:
    before = mapped_here()
    async with daemon(short_dir) as d:
        visit = Visits(d)
        first = await frozen(d, FIRST, state({}))
        second = await frozen(d, SECOND, state({"layers.3": 1}, head=5))
        report = await held(d, WHOLE + HEAD + TENSOR)
        shared = WHOLE - TENSOR
        assert of(report, SECOND).shared_bytes == of(report, FIRST).shared_bytes == shared
        assert of(report, SECOND).shared_with == [str(FIRST)]
        assert [s.shared_bytes for s in report.deployments] == [shared, shared]
        assert report.owned_bytes == 2 * WHOLE + HEAD
        assert report.held_bytes == WHOLE + HEAD + TENSOR
        for _ in range(2):
            await visit(first, FIRST)
            await visit(second, SECOND)
        await taken(d, WHOLE + HEAD + TENSOR)
        mine = mapped_here() - before
        # Ranks keep nothing alive that was given up.
        assert mine <= real_memory(d.process.pid).keys()


def mapped_here() -> set[int]:
    """Inodes of host copies. Ranks of a test are in its process, as those of tests before it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "the host copy" in line}


async def test_shards_of_rows_lie_in_the_whole_model(short_dir: Path) -> None:
    halves = (range(ROWS // 2), range(ROWS // 2, ROWS))
    async with daemon(short_dir, devices=[2 * WHOLE, 2 * WHOLE]) as d:
        visit = Visits(d)
        whole = await frozen(d, FIRST, state({}))
        shards = await frozen(d, THIRD, *(state({}, rows) for rows in halves))
        report = await held(d, WHOLE)
        assert (report.owned_bytes, report.held_bytes) == (2 * WHOLE, WHOLE)
        for _ in range(2):
            await visit(shards, THIRD)
            await visit(whole, FIRST)
        await d.agent.drop_wpg(FIRST, 1)
        await visit(shards, THIRD)
        assert (await d.agent.status()).host_used_bytes == WHOLE


async def test_whole_model_lies_in_shards_that_came_first(short_dir: Path) -> None:
    thirds = (range(21), range(21, 42), range(42, ROWS))
    async with daemon(short_dir, devices=[2 * WHOLE] * 3) as d:
        visit = Visits(d)
        shards = await frozen(d, THIRD, *(state({}, rows) for rows in thirds))
        await until(d, lambda report: all(content.hash for content in report.contents))
        whole = await frozen(d, FIRST, state({}))
        halves = (range(ROWS // 2), range(ROWS // 2, ROWS))
        others = await frozen(d, SECOND, *(state({"layers.7": 1}, rows) for rows in halves))
        await held(d, WHOLE + TENSOR)
        for ranks, key in ((whole, FIRST), (shards, THIRD), (others, SECOND)) * 2:
            await visit(ranks, key)


async def test_who_came_first_leaves_first_and_the_bytes_stay(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        visit = Visits(d)
        await frozen(d, FIRST, state({}))
        second = await frozen(d, SECOND, state({"layers.3": 1}, head=5))
        await held(d, WHOLE + HEAD + TENSOR)
        await d.agent.drop_wpg(FIRST, 1)
        report = await d.agent.status()
        assert report.host_used_bytes == WHOLE + HEAD + TENSOR  # for an eighth nothing is moved
        assert of(report, SECOND).shared_bytes == 0
        assert report.held_bytes == WHOLE + HEAD
        await visit(second, SECOND)
        await d.agent.drop_wpg(SECOND, 1)
        assert (await d.agent.status()).host_used_bytes == 0


async def test_what_nobody_refers_to_any_more_is_given_back(short_dir: Path) -> None:
    """The first is equal in half of it only: the rest of its memory goes with it."""
    others = {name: 1 for name in NAMES[: LAYERS // 2]}
    async with daemon(short_dir) as d:
        visit = Visits(d)
        await frozen(d, FIRST, state({}))
        second = await frozen(d, SECOND, state(others))
        third = await frozen(d, THIRD, state(others, head=7))
        await held(d, WHOLE + WHOLE // 2 + HEAD)
        await d.agent.drop_wpg(FIRST, 1)
        report = await held(d, WHOLE + HEAD)
        assert report.held_bytes == WHOLE + HEAD
        await visit(second, SECOND)
        await d.agent.drop_wpg(SECOND, 1)
        await visit(third, THIRD)
        await d.relaunch()
        await visit(third, THIRD)
        assert (await d.agent.status()).host_used_bytes == WHOLE + HEAD


async def test_write_of_one_leaves_the_others_what_they_had(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        visit = Visits(d)
        ranks = {
            key: await frozen(d, key, state({}, head=head))
            for key, head in ((FIRST, 1), (SECOND, 2), (THIRD, 3))
        }
        await held(d, WHOLE + 3 * HEAD)
        for seq, (key, (rank,)) in enumerate(ranks.items(), start=1):
            # What was written before has found what it has in common with the others.
            await until(d, is_shared(seq - 1))
            visit.epoch += 1
            await d.agent.switch_in(key, 1, visit.epoch, [])
            rank.write(state({"layers.0": seq}, head=10 + seq), seq)
            await d.agent.switch_out(key, 1, visit.epoch)
            for other, they in ranks.items():
                await visit(they, other)
        report = await until(d, is_shared(3))
        # What it had alone in the memory that it made, and others refer to, stays there.
        assert report.host_used_bytes == report.held_bytes + HEAD + TENSOR
        for key, they in ranks.items():
            await visit(they, key)


def is_shared(num_written: int) -> Callable[[StatusReport], bool]:
    """Three hold everything once but their heads, and the first layer of those who have written."""
    num_layers = min(num_written, 2)
    return lambda report: report.held_bytes == WHOLE + 3 * HEAD + num_layers * TENSOR


async def test_seal_of_what_lies_in_pieces_is_whole(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        visit = Visits(d)
        await frozen(d, FIRST, state({}))
        (second,) = await frozen(d, SECOND, state({}, head=5))
        await held(d, WHOLE + HEAD)
        visit.epoch += 1
        await d.agent.switch_in(SECOND, 1, visit.epoch, [])
        second.seq = 3  # an operation that leaves the heap as it was
        await d.agent.prepare_seal(SECOND, 1, 3)
        assert (await d.agent.write_seal(SECOND, 1, 3, [])).written_bytes == second.size
        await d.agent.drop_wpg(SECOND, 1)
        reborn = await start(
            d, SECOND, second.size, slots=second.slots, frozen=True, incarnation=2, seal_seq=3
        )
        await d.agent.switch_in(SECOND, 2, 1, [])
        assert bytes(reborn.heap.buffer) == second.expected
        await held(d, WHOLE + HEAD)


# --- tenants -------------------------------------------------------------------------------------


async def test_tenants_share_no_tensor_that_is_not_registered(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await frozen(d, FIRST, state({}))
        await frozen(d, FOREIGN, state({}, head=5))
        report = await until(d, lambda r: all(c.hash for c in r.contents))
        await d.relaunch()  # all is looked at once more
        report = await d.agent.status()
        assert report.host_used_bytes == 2 * WHOLE + HEAD
        assert {content.shared_bytes for content in report.contents} == {0}
        known = of(report, FIRST).hash
    async with daemon(short_dir, FROZEN_BASES=json.dumps({"a model": [known]})) as d:
        visit = Visits(d)
        first = await frozen(d, FIRST, state({}))
        foreign = await frozen(d, FOREIGN, state({}, head=5))
        report = await held(d, WHOLE + HEAD)
        assert of(report, FOREIGN).shared_with == [str(FIRST)]
        await visit(first, FIRST)
        await visit(foreign, FOREIGN)
        d.environment.pop("PHASELOOM_STATEMGR_FROZEN_BASES")
        await d.relaunch()  # what they came to share stays
        await d.agent.drop_wpg(FIRST, 1)
        await visit(foreign, FOREIGN)


async def test_tenant_with_a_part_of_a_registered_model_is_not_given_the_rest(
    short_dir: Path,
) -> None:
    async with daemon(short_dir) as d:
        await frozen(d, FIRST, state({}))
        known = of(await until(d, lambda r: all(c.hash for c in r.contents)), FIRST).hash
    async with daemon(short_dir, FROZEN_BASES=json.dumps({"a model": [known]})) as d:
        visit = Visits(d)
        first = await frozen(d, FIRST, state({}))
        await until(d, lambda r: all(c.hash for c in r.contents))
        foreign = await frozen(d, FOREIGN, state({"layers.3": 1}))
        second = await frozen(d, SECOND, state({"layers.5": 1}))
        report = await held(d, 2 * WHOLE + TENSOR)  # its own tenant's model may
        assert of(report, FOREIGN).shared_bytes == 0
        await visit(foreign, FOREIGN)
        assert given(foreign[0]) == WHOLE
        whole = DeploymentKey("umbrella", "sums", "whole")
        others = await frozen(d, whole, state({}))
        await held(d, WHOLE + 2 * TENSOR)
        for ranks, key in ((foreign, FOREIGN), (first, FIRST), (second, SECOND), (others, whole)):
            await visit(ranks, key)


async def test_memory_with_what_one_tenant_alone_has_is_never_given_to_another(
    short_dir: Path,
) -> None:
    """What is to be registered was composed of a private model, before anybody knew."""
    private = DeploymentKey("acme", "sums", "private")
    async with daemon(short_dir) as d:
        await frozen(d, private, state({}, head=1))
        await frozen(d, FIRST, state({}))
        report = await held(d, WHOLE + HEAD)
        known = of(report, FIRST).hash
        d.environment["PHASELOOM_STATEMGR_FROZEN_BASES"] = json.dumps({"a model": [known]})
        await d.relaunch()
        visit = Visits(d)
        foreign = await frozen(d, FOREIGN, state({}))
        report = await held(d, 2 * WHOLE + HEAD)
        assert of(report, FOREIGN).shared_bytes == 0
        third = await frozen(d, THIRD, state({}))
        report = await until(
            d, lambda r: any(str(THIRD) in c.users and len(c.users) == 2 for c in r.contents)
        )
        await visit(foreign, FOREIGN)
        assert given(foreign[0]) == WHOLE
        await visit(third, THIRD)


async def test_registered_model_is_never_composed_of_a_private_one(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        await frozen(d, FIRST, state({}))
        known = of(await until(d, lambda r: all(c.hash for c in r.contents)), FIRST).hash
    async with daemon(short_dir, FROZEN_BASES=json.dumps({"a model": [known]})) as d:
        private = DeploymentKey("acme", "sums", "private")
        await frozen(d, private, state({}, head=1))
        await until(d, lambda r: all(c.hash for c in r.contents))
        visit = Visits(d)
        first = await frozen(d, FIRST, state({}))
        foreign = await frozen(d, FOREIGN, state({}))
        await held(d, WHOLE + HEAD)  # the private one is composed of the registered one
        await visit(first, FIRST)
        await visit(foreign, FOREIGN)
        assert given(foreign[0]) == WHOLE


def given(rank: Model) -> int:
    """Bytes of memory that it was given to load from, whatever of that it needed."""
    return sum(len(source.buffer) for source in rank.client._copies._sources.values())


async def test_registered_model_that_comes_again_is_what_the_others_refer_to(
    short_dir: Path,
) -> None:
    """It is never composed itself: they lean on it, and what they had kept of the first goes."""
    async with daemon(short_dir) as d:
        await frozen(d, FIRST, state({}))
        known = of(await until(d, lambda r: all(c.hash for c in r.contents)), FIRST).hash
    async with daemon(short_dir, FROZEN_BASES=json.dumps({"a model": [known]})) as d:
        visit = Visits(d)
        foreign = await frozen(d, FOREIGN, state({}, head=5))
        second = await frozen(d, SECOND, state({}, head=6))
        report = await until(d, lambda r: all(c.hash for c in r.contents))
        assert report.host_used_bytes == 2 * (WHOLE + HEAD)
        for incarnation in (1, 2, 3):
            first = await frozen(d, FIRST, state({}), incarnation=incarnation)
            await held(d, WHOLE + 2 * HEAD)
            await visit(first, FIRST, incarnation)
            for ranks, key in ((foreign, FOREIGN), (second, SECOND)):
                await visit(ranks, key)
            await d.agent.drop_wpg(FIRST, incarnation)
        await visit(foreign, FOREIGN)
        await d.agent.drop_wpg(FOREIGN, 1)
        await visit(second, SECOND)
        await d.agent.drop_wpg(SECOND, 1)
        assert (await d.agent.status()).host_used_bytes == 0


# --- the tier below ------------------------------------------------------------------------------

ROOM = 2 * WHOLE + 4 * HEAD
"""For both models as they come."""


async def composed(d: Daemon) -> tuple[list[Model], list[Model]]:
    first = await frozen(d, FIRST, state({}, head=1))
    second = await frozen(d, SECOND, state({}, head=2))
    await held(d, WHOLE + 2 * HEAD)
    return first, second


@pytest.mark.parametrize("keys", [(FIRST, SECOND), (SECOND, FIRST)])
async def test_both_go_down_and_come_up_in_any_order(
    short_dir: Path, keys: tuple[DeploymentKey, DeploymentKey]
) -> None:
    async with daemon(short_dir, devices=[ROOM], host_bytes=ROOM) as d:
        visit = Visits(d)
        ranks = dict(zip((FIRST, SECOND), await composed(d), strict=True))
        for _ in range(2):
            for key in keys:
                await visit(ranks[key], key)
            filler = await start(d, POLICY, ROOM - HEAD)
            report = await d.agent.status()
            assert [content.on_nvme for content in report.contents] == [True, True]
            assert report.host_used_bytes == ROOM - HEAD
            await d.agent.drop_wpg(POLICY, 1)
            del filler
            for key in keys:
                await visit(ranks[key], key)
            await held(d, WHOLE + 2 * HEAD)
            assert not list((d.files / ".contents").iterdir())
            await d.agent.drop_wpg(POLICY, 1, forget=True)
        await emptied(d)


async def test_one_goes_down_for_what_is_its_own_where_the_other_is_in_use(
    short_dir: Path,
) -> None:
    """The other is on a device: what both have stays, and is no room for anybody."""
    other = {name: 1 for name in NAMES[: LAYERS // 2]}
    room = 2 * WHOLE + WHOLE // 2
    async with daemon(short_dir, devices=[2 * room], host_bytes=room) as d:
        first = await frozen(d, FIRST, state({}))
        await start(d, THIRD, WHOLE // 2)
        second = await frozen(d, SECOND, state(other))
        await d.logged("not now")  # there is no memory for what it would take first
        await d.agent.drop_wpg(THIRD, 1)
        await held(d, WHOLE + WHOLE // 2)
        await d.agent.switch_in(FIRST, 1, 1, [])
        with pytest.raises(ResourceError) as caught:
            await start(d, POLICY, room - WHOLE + 4096)
        assert caught.value.info.code is Code.RESOURCE_EXHAUSTED
        assert not any(content.on_nvme for content in (await d.agent.status()).contents)
        await d.agent.drop_wpg(POLICY, 1)
        await start(d, POLICY, room - WHOLE, incarnation=2)
        report = await d.agent.status()
        assert of(report, SECOND).on_nvme
        assert report.host_used_bytes == room
        await d.agent.drop_wpg(POLICY, 2)
        visit = Visits(d)
        await visit(second, SECOND)
        assert bytes(first[0].heap.buffer) == first[0].expected
        await held(d, WHOLE + WHOLE // 2)


async def test_bad_file_of_one_ends_nobody_else(short_dir: Path) -> None:
    async with daemon(short_dir, devices=[ROOM], host_bytes=ROOM) as d:
        visit = Visits(d)
        first, _ = await composed(d)
        await start(d, POLICY, ROOM - HEAD)
        for path in (d.files / ".contents").iterdir():
            if b"reward" in path.read_bytes()[:4096]:
                content = bytearray(path.read_bytes())
                content[-5000] ^= 1
                path.write_bytes(content)
        await d.agent.drop_wpg(POLICY, 1)
        with pytest.raises(ResourceError, match="checksum"):
            await d.agent.switch_in(SECOND, 1, 1, [])
        visit.epoch = 5
        await visit(first, FIRST)
        assert [s.deployment for s in (await d.agent.status()).deployments] == [FIRST]


# --- bad memory ----------------------------------------------------------------------------------

UNSEALED = (sys.executable, "-m", "tests.support.unsealed")


@pytest.mark.parametrize("key", [FIRST, SECOND])
async def test_bit_that_flips_in_what_both_have_is_never_loaded(
    short_dir: Path, key: DeploymentKey
) -> None:
    """Whoever finds it, all that refer to it are over, and begin again."""
    async with daemon(short_dir, launcher=UNSEALED) as d:
        visit = Visits(d)
        await composed(d)
        third = await frozen(d, THIRD, state({"layers.2": 1}, head=3))
        await held(d, WHOLE + 3 * HEAD + TENSOR)
        flip_in_memory(d.process.pid, f"the host copy of {FIRST}", HEAD + 2 * TENSOR + 5)
        visit.epoch += 1
        with pytest.raises(ResourceError) as caught:
            await d.agent.switch_in(key, 1, visit.epoch, [])
        assert caught.value.info.code is Code.DATA_LOSS
        report = await until(d, lambda r: len(r.deployments) == 1)
        assert report.deployments[0].deployment == THIRD  # it has another "layers.2"
        await visit(third, THIRD)
        again = await frozen(d, key, state({}, head=1), incarnation=2)
        await visit(again, key, 2)
        await d.agent.drop_wpg(key, 2)
        await visit(third, THIRD)
        await d.agent.drop_wpg(THIRD, 1)
        await held(d, 0)  # some may have been taken for a comparison that is over now


async def test_bit_that_flips_in_what_one_has_alone_ends_that_one(short_dir: Path) -> None:
    async with daemon(short_dir, launcher=UNSEALED) as d:
        visit = Visits(d)
        first, _ = await composed(d)
        flip_in_memory(d.process.pid, "the host copy: what is", 5)
        await d.agent.prepare_seal(SECOND, 1, 0)
        with pytest.raises(ResourceError) as caught:
            await d.agent.write_seal(SECOND, 1, 0, [])
        assert caught.value.info.code is Code.DATA_LOSS
        with pytest.raises(ResourceError):
            await d.agent.switch_in(SECOND, 1, 1, [])
        visit.epoch = 2
        await visit(first, FIRST)


async def test_bad_piece_is_not_taken_over_after_a_kill(short_dir: Path) -> None:
    async with daemon(short_dir, launcher=UNSEALED) as d:
        visit = Visits(d)
        first, _ = await composed(d)
        flip_in_memory(d.process.pid, "the host copy: what is", 5)
        await d.relaunch()
        report = await d.agent.status()
        assert [s.deployment for s in report.deployments] == [FIRST]
        await visit(first, FIRST)
        await d.agent.drop_wpg(FIRST, 1)
        assert (await d.agent.status()).host_used_bytes == 0


# --- kills ---------------------------------------------------------------------------------------


async def test_pieces_are_there_after_a_kill(short_dir: Path) -> None:
    async with daemon(short_dir) as d:
        visit = Visits(d)
        first, second = await composed(d)
        before = await d.agent.status()
        for _ in range(2):
            await d.relaunch()
            assert await d.agent.status() == before
            await visit(second, SECOND)
            await visit(first, FIRST)
        await d.agent.drop_wpg(FIRST, 1)
        await d.relaunch()
        await visit(second, SECOND)
        await d.agent.drop_wpg(SECOND, 1)
        assert (await d.agent.status()).host_used_bytes == 0


async def test_rank_that_died_with_the_daemon_leaves_what_the_other_needs(short_dir: Path) -> None:
    async with daemon(short_dir, RESUME_TIMEOUT_S="5") as d:
        visit = Visits(d)
        (first,), second = await composed(d)
        await d.kill()
        await first.client.close()
        await d.launch()
        report = await d.agent.status()
        assert [s.deployment for s in report.deployments] == [SECOND]
        await visit(second, SECOND)
        await d.agent.drop_wpg(SECOND, 1)
        assert (await d.agent.status()).host_used_bytes == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
async def test_kill_at_any_moment_of_it_harms_nobody(short_dir: Path, delay_s: float) -> None:
    async with daemon(short_dir) as d:
        visit = Visits(d)
        first = await frozen(d, FIRST, state({}, head=1))
        second = await frozen(d, SECOND, state({}, head=2))
        await asyncio.sleep(delay_s)  # some moment: none of them may matter
        await d.relaunch()
        await visit(second, SECOND)
        await visit(first, FIRST)
        await held(d, WHOLE + 2 * HEAD)
        await d.relaunch()
        await visit(first, FIRST)
        await visit(second, SECOND)
