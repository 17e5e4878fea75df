"""Which lack of room the gateway tells clients to wait for, and which is for good."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.gateway.models import is_for_good


def error(code: Code = Code.RESOURCE_EXHAUSTED, field: str = "", **numbers: int) -> ErrorInfo:
    details = {name: str(number) for name, number in numbers.items()}
    return ErrorInfo(code, "no room", field=field, details=details)


@pytest.mark.parametrize(
    ("found", "is_expected"),
    [
        (error(needed_bytes=20, used_bytes=0, budget_bytes=10), True),
        (error(needed_bytes=8, used_bytes=9, budget_bytes=10), False),
        (error(field="spec.deployments"), True),
        (error(), False),
        (error(Code.UNAVAILABLE, "spec.deployments"), False),
    ],
    ids=[
        "larger than the device",
        "others are there now",
        "no node could hold the job",
        "the server's disk is full, or a device is gone",
        "the job waits for a place",
    ],
)
def test_no_room_is_for_good_where_empty_nodes_would_not_have_it(
    found: ErrorInfo, *, is_expected: bool
) -> None:
    assert is_for_good(found) == is_expected
