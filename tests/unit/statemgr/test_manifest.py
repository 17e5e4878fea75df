"""The record that survives a kill: whatever is torn, an older whole one counts, and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.contract.state_rank import RegisterHeap
from phaseloom.common.tensors.tensortable import TensorTable
from phaseloom.statemgr.records.incarnations import State
from phaseloom.statemgr.records.manifest import (
    decode_manifest,
    encode_manifest,
    encode_record,
    manifest_of,
    newest_record,
)
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.seals import HostSeal
from phaseloom.statemgr.records.snapshots import Snapshot, SnapshotPart
from phaseloom.statemgr.records.versions import Version

KEY = DeploymentKey("acme", "sums", "policy")
FROZEN = DeploymentKey("acme", "also", "reference")
SLOT = TensorSlot("w", Role.WEIGHT, "float32", [2, 3], 0, 24)


def test_nothing_is_found_where_nothing_was_written() -> None:
    assert newest_record([]) is None
    assert newest_record([b"", b"\0" * 4096]) is None


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=300), st.integers(1))
def test_newest_whole_record_counts_whatever_older_ones_left_behind_it(
    older: bytes, newer: bytes, remains: bytes, generation: int
) -> None:
    generation %= 2**63
    first = encode_record(generation, older)
    second = encode_record(generation + 1, newer)
    places = [first + remains, second + remains]
    assert newest_record(places) == (generation + 1, newer)
    assert newest_record(reversed(places)) == (generation + 1, newer)


@given(st.data())
def test_record_that_was_being_written_at_the_kill_leaves_the_one_before(
    data: st.DataObject,
) -> None:
    """A third record is written over the first, as the third `record` of a daemon does."""
    payloads = [data.draw(st.binary(min_size=1, max_size=100)) for _ in range(3)]
    first, second, third = (encode_record(n + 1, p) for n, p in enumerate(payloads))
    cut = data.draw(st.integers(0, len(third) - 1))
    torn = third[:cut] + first[cut:]
    found = newest_record([second, torn])
    # Nothing is torn where old and new bytes happen to be the same.
    assert found == ((3, payloads[2]) if torn.startswith(third) else (2, payloads[1]))


@given(st.data())
def test_flipped_bit_is_found(data: st.DataObject) -> None:
    record = bytearray(encode_record(7, data.draw(st.binary(max_size=50))))
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] ^= 1 << data.draw(st.integers(0, 7))
    assert newest_record([bytes(record)]) is None


def test_manifest_says_what_is_needed_to_go_on() -> None:
    records = Records([100, 100])
    residency, versions = records.residency, records.versions
    residency.register(RegisterWpg(["gone"], DeploymentKey("acme", "gone", "policy"), 9, [0], 0))
    residency.drop(DeploymentKey("acme", "gone", "policy"), 9)
    residency.register(RegisterWpg(["t0", "t1"], KEY, 3, [0, 1], 5))
    rank = residency.authenticate("t1")
    residency.register_heap(rank, RegisterHeap(24, b""), TensorTable.of([SLOT]), 4)
    residency.fill(rank, 5, "digest")
    table = TensorTable.of([SLOT])
    versions.take_over(Version(VersionKey(KEY, 6), 24, table, "version's digest", 8, 3))
    versions.add_from_disk(VersionKey(KEY, 2), 24, [SLOT], "on disk only")
    residency.register(RegisterWpg(["frozen"], FROZEN, 1, [0], 0))
    frozen = residency.authenticate("frozen")
    heap = RegisterHeap(24, b"", frozen=True, model="a" * 64)
    residency.register_heap(frozen, heap, TensorTable.of([SLOT]), 9)
    residency.fill(frozen, 2, "its digest")
    own, copy = residency.copies.all()
    copy.hash, copy.is_immutable = "hash", True
    part = SnapshotPart(11, 24, table, b"checksum")
    records.snapshots[KEY, "operation"] = Snapshot(KEY, 3, "operation", "name", 5, [part], 2, 4)
    records.seals[KEY, 4] = HostSeal(KEY, 4, 12, 100)
    manifest = decode_manifest(encode_manifest(manifest_of(records, "host:1")))
    assert manifest.endpoint == "host:1"
    gone = DeploymentKey("acme", "gone", "policy")
    assert dict(manifest.fences) == {gone: 9, KEY: 3, FROZEN: 1}
    other, wpg = manifest.wpgs
    assert (other.ranks[0].frozen, other.ranks[0].model) == (True, "a" * 64)
    assert (other.ranks[0].copy, other.ranks[0].new_extent) == (copy.number, None)
    for found, of in zip(manifest.host_copies, (own, copy), strict=True):
        left_out = {"users", "num_writes"}
        assert asdict(found) == {
            name: getattr(of, name) for name in of.__slots__ if name not in left_out
        }
    assert (wpg.key, wpg.incarnation, wpg.seal_seq, wpg.prepared) == (KEY, 3, 5, None)
    assert [r.state for r in wpg.ranks] == [State.AWAITING, State.HOST]
    described = wpg.ranks[1]
    assert (described.token, described.device, described.copy) == ("t1", 1, own.number)
    assert (own.extent, own.digest, own.is_frozen) == (4, "digest", False)
    assert (described.applied, described.table.tensors) == (5, [SLOT])
    (version,) = manifest.versions
    assert (version.key, version.extent, version.incarnation) == (VersionKey(KEY, 6), 8, 3)
    (snapshot,) = manifest.snapshots
    assert (snapshot.key, snapshot.name, snapshot.num_ranks) == (KEY, "name", 4)
    assert snapshot.parts == [part]
    assert manifest.seals == [*records.seals.values()]
