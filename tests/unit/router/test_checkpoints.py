"""What several nodes say of checkpoints, as one list."""

from __future__ import annotations

from msgspec.structs import replace

from phaseloom.common.contract.api import SavedCheckpoint
from phaseloom.router.checkpoints import merged

FIRST = SavedCheckpoint("sums", "policy", "a", 10, 1.0)
SECOND = SavedCheckpoint("sums", "policy", "b", 20, 2.0)
OTHER = SavedCheckpoint("letters", "policy", "a", 30, 1.5)


def test_nodes_with_one_root_name_each_checkpoint_once_and_the_newest_is_last() -> None:
    assert merged([SECOND, FIRST, OTHER, FIRST, SECOND]) == [FIRST, OTHER, SECOND]


def test_newest_of_a_name_counts_when_nodes_have_roots_of_their_own() -> None:
    anew = replace(FIRST, num_bytes=11, saved_s=3.0)
    for order in ([FIRST, anew], [anew, FIRST]):
        assert merged([*order, SECOND]) == [SECOND, anew]
