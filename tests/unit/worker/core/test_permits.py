"""What of a node's commands is still meant."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.worker.core.permits import (
    REMEMBERED_CANCELS,
    REMEMBERED_COMMANDS,
    AcceptedCommands,
    CancelledOperations,
    PermitVerdict,
    judge_permit,
)


@pytest.mark.parametrize(
    ("incarnation", "epoch", "verdict"),
    [
        (2, 7, PermitVerdict.ACCEPT),
        (2, 8, PermitVerdict.EARLY),
        (2, 6, PermitVerdict.STALE),
        (2, 9, PermitVerdict.STALE),  # its activation was refused
        (1, 7, PermitVerdict.STALE),
        (3, 7, PermitVerdict.STALE),
    ],
)
def test_permit_is_judged_by_life_and_activation(
    incarnation: int, epoch: int, verdict: PermitVerdict
) -> None:
    judged = judge_permit(
        incarnation=incarnation, epoch=epoch, opened_incarnation=2, opened_epoch=7, refused_epoch=9
    )
    assert judged is verdict


def test_newest_commands_are_remembered_until_they_are_forgotten() -> None:
    taken = AcceptedCommands()
    ids = [CommandId(i, 0) for i in range(REMEMBERED_COMMANDS + 1)]
    for id in ids:
        taken.add(id)
    assert ids[0] not in taken
    assert ids[1] in taken
    taken.forget(ids[1])
    assert ids[1] not in taken


def test_newest_cancels_are_remembered() -> None:
    cancelled = CancelledOperations()
    keys = [OperationKey("acme", "job", "d", f"r{i}") for i in range(REMEMBERED_CANCELS + 1)]
    for key in keys:
        cancelled.add(key)
    assert keys[0] not in cancelled
    assert all(key in cancelled for key in keys[1:])


def test_everything_counts_as_cancelled_once_nobody_waits() -> None:
    cancelled, key = CancelledOperations(), OperationKey("acme", "job", "d", "r")
    cancelled.add(key, keeps_partial=True)
    cancelled.add_all()
    assert OperationKey("acme", "job", "d", "other") in cancelled
    assert not cancelled.keeps_partial(key), "what it has is not wanted"
