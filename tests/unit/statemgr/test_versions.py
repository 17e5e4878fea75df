"""The records of weights versions, and the checks on layouts."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.tensortable import EMPTY, TensorTable
from phaseloom.common.tensors.versionparts import manifest_slots, part_of
from phaseloom.statemgr.records.layouts import check_layout
from phaseloom.statemgr.records.versions import Version, Versions

KEY = VersionKey(DeploymentKey("acme", "sums", "policy"), 7)


def slot(name: str, offset: int, num_bytes: int) -> TensorSlot:
    return TensorSlot(name, Role.WEIGHT, "uint8", [num_bytes], offset, num_bytes)


def test_committed_version_is_immutable() -> None:
    versions = Versions()
    version = versions.begin(KEY, 64, EMPTY, extent=1, incarnation=1)
    assert versions.committed() == []
    versions.commit(version, "x")
    versions.commit(version, "x")
    with pytest.raises(CallerError) as caught:
        versions.commit(version, "y")
    assert caught.value.info.code is Code.ALREADY_EXISTS
    with pytest.raises(CallerError, match="ALREADY_EXISTS"):
        versions.begin(KEY, 64, EMPTY, extent=2)
    assert versions.committed() == [KEY]
    versions.validate()


def test_dropped_version_keeps_its_memory_until_its_last_user_is_done() -> None:
    versions = Versions()
    version = versions.begin(KEY, 64, EMPTY, extent=1)
    versions.commit(version, "x")
    version.users += 1
    version.users += 1
    versions.drop(version)
    assert versions.reap(version) is None
    assert versions.find(KEY) is None
    assert versions.extents() == [1]
    versions.validate()
    version.users -= 1
    assert versions.reap(version) is None
    version.users -= 1
    assert versions.reap(version) == 1
    assert versions.extents() == []
    versions.drop(version)
    assert versions.reap(version) is None


def test_unfinished_versions_are_those_of_that_life() -> None:
    versions = Versions()
    versions.begin(KEY, 64, EMPTY, extent=1, incarnation=1)
    done = VersionKey(KEY.policy, 8)
    versions.commit(versions.begin(done, 64, EMPTY, extent=2, incarnation=1), "x")
    versions.begin(VersionKey(KEY.policy, 9), 64, EMPTY, extent=3, incarnation=2)
    assert versions.unfinished(KEY.policy, 1) == [KEY]


def test_layout_with_gaps_and_empty_tensors_is_fine() -> None:
    check_layout([slot("b", 128, 4), slot("a", 0, 65), slot("none", 192, 0)], 192)
    check_layout([], 0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([slot("a", 0, 4), slot("a", 64, 4)], "the same name"),
        ([slot("a", 32, 4)], "multiple of 64"),
        ([slot("a", 0, 65), slot("b", 64, 4)], r"overlap a tensor .* tensors\[b\]"),
        ([slot("a", 128, 65)], r"end within 192 bytes.*tensors\[a\]"),
        ([slot("a", 0, -1)], "-1 bytes"),
        ([slot("a", -64, 4)], "at -64"),
    ],
)
def test_bad_layout_is_refused_naming_the_tensor(tensors: list[TensorSlot], message: str) -> None:
    with pytest.raises(CallerError, match=message.replace(" .* ", ".*")):
        check_layout(tensors, 192)


def test_version_in_memory_joins_its_file_unless_they_differ() -> None:
    versions = Versions()
    versions.add_from_disk(KEY, 64, [], "digest")
    assert versions.take_over(Version(KEY, 64, EMPTY, "digest", extent=5))
    taken = versions.find(KEY)
    assert taken is not None
    assert (taken.extent, taken.is_on_disk) == (5, True)
    assert not versions.take_over(Version(KEY, 64, EMPTY, "another", extent=6))
    assert versions.find(KEY) is taken
    versions.validate()


def test_version_that_nobody_uses_leaves_memory_for_the_disk_and_no_other() -> None:
    versions, (key, copy, open_) = Versions(), _keys()
    for number, each in enumerate((key, copy, open_)):
        versions.begin(each, 64, EMPTY, extent=number)
    versions.commit(version := _found(versions, key), "digest")
    versions.commit(_found(versions, copy), "digest")
    assert versions.unused() == [version]
    version.users += 1
    assert versions.unused() == []
    version.users -= 1
    with pytest.raises(AssertionError):
        versions.leave_memory(version)
    version.is_on_disk = True
    assert versions.leave_memory(version) == 0
    versions.validate()
    assert versions.unused() == []
    assert (version.extent, version.is_committed) == (None, True)


def _keys() -> tuple[VersionKey, VersionKey, VersionKey]:
    policy = DeploymentKey("acme", "leaving", "policy")
    return VersionKey(policy, 1), VersionKey(policy, 1, "slices-of it"), VersionKey(policy, 2)


def _found(versions: Versions, key: VersionKey) -> Version:
    version = versions.find(key)
    assert version is not None
    return version


# --- Versions in parts ----------------------------------------------------------------------------

PARTS = [part_of(KEY, "0of2"), part_of(KEY, "1of2")]


def with_parts(*, is_committed: bool) -> Versions:
    """One that incarnation 3 wrote."""
    versions = Versions()
    for extent, key in enumerate(PARTS):
        versions.commit(
            versions.begin(key, 64, EMPTY, extent=extent, incarnation=3), f"part {extent}"
        )
    if is_committed:
        versions.commit(
            versions.begin(KEY, 100, TensorTable.of(manifest_slots(100)), extent=9), "manifest"
        )
    return versions


def test_parts_are_readable_where_their_manifest_is_committed() -> None:
    versions = with_parts(is_committed=False)
    assert not any(map(versions.is_readable, PARTS))
    manifest = versions.begin(KEY, 100, TensorTable.of(manifest_slots(100)), extent=9)
    assert not any(map(versions.is_readable, PARTS))
    versions.commit(manifest, "manifest")
    assert all(map(versions.is_readable, PARTS))
    versions.drop(manifest)
    assert not any(map(versions.is_readable, PARTS))


def test_parts_of_what_was_written_whole_are_not_readable() -> None:
    versions = with_parts(is_committed=False)
    versions.commit(versions.begin(KEY, 64, EMPTY, extent=9), "whole")
    assert not any(map(versions.is_readable, PARTS))
    assert versions.is_readable(part_of(KEY, "slices-of it")), "a copy, whatever it is of"


def test_all_that_is_here_of_a_version_belongs_together() -> None:
    versions = with_parts(is_committed=False)
    with pytest.raises(CallerError, match="is not here"):
        versions.pieces(KEY)
    versions = with_parts(is_committed=True)
    versions.commit(versions.begin(part_of(KEY, "slices-x"), 64, EMPTY, extent=7), "slices")
    versions.begin(part_of(KEY, "2of3"), 64, EMPTY, extent=8)
    assert [piece.key for piece in versions.pieces(KEY)] == [KEY, *PARTS]


def test_parts_that_never_came_to_be_a_version_go_with_their_incarnation_or_the_next_publish() -> (
    None
):
    versions = with_parts(is_committed=False)
    assert versions.unfinished(KEY.policy, 3) == PARTS
    assert versions.unfinished(KEY.policy, 4) == []
    assert versions.stale_parts(KEY.policy, KEY.seq) == []
    assert [each.key for each in versions.stale_parts(KEY.policy, KEY.seq + 1)] == PARTS
    versions = with_parts(is_committed=True)
    assert versions.unfinished(KEY.policy, 3) == []
    assert versions.stale_parts(KEY.policy, KEY.seq + 1) == []


def test_parts_may_leave_host_memory_and_manifests_stay() -> None:
    versions = with_parts(is_committed=True)
    versions.commit(versions.begin(part_of(KEY, "slices-x"), 64, EMPTY, extent=7), "slices")
    assert [each.key for each in versions.unused()] == PARTS
    assert not versions.is_above(KEY), "who knows which parts belong here"


def test_a_base_is_an_earlier_version_in_memory_with_the_same_layout() -> None:
    versions = Versions()

    def add(seq: int, part: str = "", num_bytes: int = 64, *, is_committed: bool = True) -> Version:
        key = VersionKey(KEY.policy, seq, part)
        number = len(versions.known())
        version = versions.begin(
            key, num_bytes, TensorTable.of([slot("w", 0, num_bytes)]), extent=number
        )
        if is_committed:
            versions.commit(version, "digest")
        return version

    old, older, part = add(4), add(2), add(4, "0of2")
    add(5, num_bytes=32)
    add(6, is_committed=False)
    add(7).is_bad = True
    on_disk = add(8)
    on_disk.is_on_disk = True
    versions.leave_memory(on_disk)
    new = add(10, is_committed=False)
    add(12)
    assert versions.bases_of(new) == [old, older]
    assert versions.bases_of(add(10, "0of2", is_committed=False)) == [part]
    versions.drop(old)
    assert versions.bases_of(new) == [older]
