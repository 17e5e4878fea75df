"""Host copies: who may share what, and that each is held as long as somebody refers to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, InternalError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.records.hostcopies import HostCopies, bases_of
from phaseloom.statemgr.records.incarnations import HostCopy, Rank, State, Step
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.records.versions import Version

SIZE = 64
SLOT = TensorSlot("w", Role.WEIGHT, "uint8", [SIZE], 0, SIZE)
BASE, OTHER_BASE, PRIVATE = "a" * 64, "b" * 64, "c" * 64
BASES = {BASE: "base", OTHER_BASE: "other base"}


class World:
    """Frozen ranks of several tenants, and what they refer to."""

    def __init__(self) -> None:
        self.residency = Residency([10**9], BASES)
        self.copies = self.residency.copies
        self.ranks: list[Rank] = []
        self.extents: set[int] = set()

    def rank(self, tenant: str, job: str = "job") -> Rank:
        key = DeploymentKey(tenant, job, f"d{len(self.ranks)}")
        self.residency.register(RegisterWpg([f"t{len(self.ranks)}"], key, 1, [0], 0))
        (rank,) = self.residency.current(key, 1).ranks
        extent = max(self.extents, default=0) + 1
        self.extents.add(extent)
        heap = RegisterHeap(SIZE, b"", frozen=True)
        self.residency.register_heap(rank, heap, TensorTable.of([SLOT]), extent)
        self.residency.fill(rank, 1, "digest")
        self.ranks.append(rank)
        return rank

    def hold(self, rank: Rank, known: str = "", *, is_immutable: bool = True) -> HostCopy:
        """Give it a copy of its own."""
        extent = max(self.extents, default=0) + 1
        self.extents.add(extent)
        self.leave(rank)
        copy = self.copies.add(rank, extent, "digest")
        copy.is_immutable, copy.hash = is_immutable, known
        return copy

    def leave(self, rank: Rank) -> None:
        gone = self.copies.detach(rank)
        if gone is not None and gone.extent is not None:
            self.extents.remove(gone.extent)

    def merge(self, copy: HostCopy) -> HostCopy | None:
        """With its twin, if it has one."""
        twin = self.copies.twin(copy)
        if twin is not None:
            self.copies.merge(copy, twin)
            assert copy.extent is not None
            self.extents.remove(copy.extent)
        return twin

    def check(self) -> None:
        self.copies.validate()
        assert set(self.copies.extents()) == self.extents
        for rank in self.ranks:
            assert rank.copy is None or rank in rank.copy.users


def test_bases_are_hashes_with_one_name() -> None:
    assert bases_of({"m": [BASE, OTHER_BASE], "n": [PRIVATE, PRIVATE]}) == {
        BASE: "m",
        OTHER_BASE: "m",
        PRIVATE: "n",
    }
    for wrong, why in (({"m": ["m"]}, "not a BLAKE3"), ({"m": [BASE], "n": [BASE]}, "already")):
        with pytest.raises(CallerError, match=why) as caught:
            bases_of(wrong)
        assert caught.value.info.remedy


@pytest.mark.parametrize(
    ("tenants", "hashes", "immutable", "is_shared"),
    [
        (("a", "a"), (PRIVATE, PRIVATE), (True, True), True),
        (("a", "b"), (PRIVATE, PRIVATE), (True, True), False),
        (("a", "b"), (BASE, BASE), (True, True), True),
        (("a", "a"), (BASE, OTHER_BASE), (True, True), False),
        (("a", "a"), ("", ""), (True, True), False),
        (("a", "a"), (PRIVATE, PRIVATE), (True, False), False),
        (("a", "b"), (BASE, BASE), (False, True), False),
    ],
)
def test_equal_copies_are_shared_where_they_may_be(
    tenants: tuple[str, str],
    hashes: tuple[str, str],
    immutable: tuple[bool, bool],
    is_shared: bool,
) -> None:
    world = World()
    first, second = (
        world.hold(world.rank(tenant), known, is_immutable=fixed)
        for tenant, known, fixed in zip(tenants, hashes, immutable, strict=True)
    )
    assert (world.merge(second) is first) is is_shared
    assert (len(first.users) == 2) is is_shared
    world.check()


def test_content_of_another_length_is_another_one() -> None:
    world = World()
    first, second = (world.hold(world.rank("a"), PRIVATE) for _ in range(2))
    second.num_bytes += 1
    assert world.copies.twin(first) is None


def test_what_tenants_share_is_not_taken_from_them_when_it_is_no_base_any_more() -> None:
    world = World()
    copy = world.hold(world.rank("a"), BASE)
    world.merge(world.hold(world.rank("b"), BASE))
    later = HostCopies({})
    users, copy.users = copy.users, []
    later.take_over(copy)
    for rank in users:
        rank.copy = None
        later.attach(rank, copy)
    later.validate()
    stranger = World().rank("c")
    stranger.copy = None
    newcomer = later.add(stranger, 99, "digest")
    newcomer.is_immutable, newcomer.hash = True, BASE
    assert later.twin(newcomer) is None


def test_jobs_share_nothing_that_one_of_them_can_write() -> None:
    world = World()
    copy = world.hold(world.rank("a", "one"), PRIVATE, is_immutable=False)
    second = world.rank("a", "two")
    world.leave(second)
    world.copies.attach(second, copy)
    with pytest.raises(AssertionError, match="can be written by another"):
        world.copies.validate()


def test_memory_of_a_version_is_found() -> None:
    world = World()
    key = VersionKey(DeploymentKey("a", "job", "policy"), 7)
    rank = world.rank("a")
    world.leave(rank)
    version = Version(key, rank.extent_bytes, rank.table, "digest", extent=5)
    copy = world.copies.add_version(rank, version)
    assert world.copies.of_version(key, 5) is copy
    assert world.copies.of_version(key, 6) is None
    assert world.copies.states()[0].version == key
    assert not rank.has_other_layout


def test_version_in_another_layout_serves_ranks_of_both_layouts() -> None:
    world = World()
    key = VersionKey(DeploymentKey("a", "job", "policy"), 7)
    same, other = world.rank("a"), world.rank("a")
    for rank in (same, other):
        world.leave(rank)
    version = Version(key, same.extent_bytes, same.table, "digest", extent=5)
    other.heap_bytes += 64
    assert world.copies.add_version(same, version) is world.copies.add_version(other, version)
    assert (same.has_other_layout, other.has_other_layout) == (False, True)
    assert other.copy_bytes == same.extent_bytes


def test_equal_bytes_in_other_layouts_are_not_merged() -> None:
    world = World()
    first, second = world.rank("a"), world.rank("a")
    copy, twin = world.hold(first, PRIVATE), world.hold(second, PRIVATE)
    assert world.copies.twin(copy) is twin
    twin.table = TensorTable.of([TensorSlot("w", Role.WEIGHT, "uint8", [64], 0, 64)])
    assert world.copies.twin(copy) is None


def test_content_stays_while_a_user_needs_it() -> None:
    world = World()
    first, second = world.rank("a"), world.rank("a")
    copy = world.hold(first, PRIVATE)
    world.merge(world.hold(second, PRIVATE))
    demotable = world.copies.demotable
    assert demotable() == [copy]
    with world.residency.using(second.wpg):
        assert demotable() == []
    assert copy.next_use_s == math.inf
    first.wpg.next_use_s = 50.0
    assert copy.next_use_s == 50.0
    world.residency.prepare_seal(first.wpg, 1)
    assert demotable() == []


def test_moves_follow_the_table_and_nvme_is_counted_once() -> None:
    world = World()
    copy = world.hold(world.rank("a"), PRIVATE)
    world.merge(world.hold(world.rank("a"), PRIVATE))
    with pytest.raises(InternalError):
        world.copies.step(copy, Step.PROMOTE_BEGUN)
    world.copies.step(copy, Step.DEMOTE_BEGUN)
    assert world.copies.nvme_used_bytes() == SIZE
    world.copies.step(copy, Step.DEMOTE_VERIFIED)
    assert copy.state is State.DEMOTED
    assert world.copies.nvme_used_bytes() == SIZE
    assert world.copies.states()[0].on_nvme


class Storm(World):
    """Anything that ranks of three tenants may do, in any order."""

    def act(self, draw: st.DataObject) -> None:
        whole = [rank for rank in self.ranks if rank.copy is not None]
        match draw.draw(st.sampled_from(["join", "write", "find", "leave"])):
            case "join":
                self.hold(self.rank(draw.draw(st.sampled_from("abc"))))
            case "write" if whole:
                self.hold(draw.draw(st.sampled_from(whole)))
            case "find":
                for copy in self.copies.all():
                    known = st.sampled_from([BASE, OTHER_BASE, PRIVATE])
                    copy.hash = copy.hash or draw.draw(known)
                for copy in self.copies.all():
                    if self.copies.is_known(copy):
                        self.merge(copy)
            case "leave" if whole:
                self.leave(draw.draw(st.sampled_from(whole)))


@given(st.data())
def test_every_content_has_its_users_and_no_memory_is_lost(data: st.DataObject) -> None:
    storm = Storm()
    for _ in range(data.draw(st.integers(1, 30))):
        storm.act(data)
        storm.check()
    for rank in storm.ranks:
        storm.leave(rank)
    storm.check()
    assert storm.copies.all() == []


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_one_copy_a_tenant_is_held_of_what_is_no_base_and_one_of_what_is(tenants: str) -> None:
    for known, expected in ((PRIVATE, len(set(tenants))), (BASE, 1)):
        world = World()
        for tenant in tenants:
            world.merge(world.hold(world.rank(tenant), known))
            world.check()
        assert len(world.copies.all()) == expected
        assert sum(len(copy.users) for copy in world.copies.all()) == len(tenants)
