"""Bounds of a tenant, as one replica and as several judge them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.router.core.limits import Limits, Meter, Reading

NONE = Limits(0, 0, 0.0, 1)


def refusal(meter: Meter, sequence: int, time_s: float = 0.0, num_bytes: int = 1) -> str:
    """Which bound refuses it; empty: none."""
    try:
        meter.admit(sequence, time_s, num_bytes)
    except ResourceError as refused:
        error = refused
    else:
        return ""
    assert error.info.code is Code.RESOURCE_EXHAUSTED
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    assert int(error.info.details["used"]) >= int(error.info.details["limit"])
    return error.info.details["bound"]


def let_in(meter: Meter, sequence: int, log_sequence: int) -> None:
    assert refusal(meter, sequence) == ""
    meter.logged(log_sequence)


def test_open_operations_count_what_was_read_and_what_came_since() -> None:
    meter = Meter(Limits(max_operations=3))
    let_in(meter, 1, 11)
    let_in(meter, 2, 12)
    meter.read(Reading(1, 11, 0, 2))  # it counts the first, not the second
    assert meter.open_operations == 2
    let_in(meter, 3, 13)
    assert refusal(meter, 4) == "max_operations"
    meter.read(Reading(2, 13, 0, 4))
    assert refusal(meter, 5) == ""


def test_outcomes_count_as_bytes_until_a_reading_without_them() -> None:
    meter = Meter(Limits(max_bytes=100))
    meter.read(Reading(0, 0, 10, 5, outcome_bytes=90))
    with pytest.raises(ResourceError) as refused:
        meter.admit(6, 0.0, 1)
    assert refused.value.info.details["bound"] == "max_bytes"
    assert "fewer samples" in refused.value.info.remedy
    meter.read(Reading(0, 0, 10, 6))
    assert refusal(meter, 7) == ""


def test_operation_that_did_not_get_into_the_log_is_not_counted() -> None:
    meter = Meter(Limits(max_operations=1))
    assert refusal(meter, 1) == ""
    assert refusal(meter, 2) == "max_operations"
    meter.dropped()
    assert refusal(meter, 1) == ""


def test_repeat_whose_first_the_reading_counts_is_not_counted_twice() -> None:
    meter = Meter(Limits(max_operations=5))
    meter.read(Reading(2, 20, 0, 9))
    let_in(meter, 8, 20)
    assert meter.open_operations == 2


def test_stored_bytes_count_what_was_read_and_what_came_since() -> None:
    meter = Meter(Limits(max_bytes=100))
    meter.read(Reading(0, 0, 60, 7))
    assert refusal(meter, 7, num_bytes=50) == ""  # in the reading already
    assert refusal(meter, 8, num_bytes=40) == ""
    assert refusal(meter, 9, num_bytes=1) == "max_bytes"
    meter.read(Reading(0, 0, 10, 9))
    assert refusal(meter, 10, num_bytes=90) == ""


@given(st.integers(1, 4), st.integers(1, 50), st.integers(1, 200))
def test_burst_over_all_replicas_is_what_is_let_in_at_once(
    replicas: int, burst: int, sent: int
) -> None:
    """Messages go round the replicas, as the server deals them."""
    meters = [Meter(Limits(rate=1.0, burst=burst)) for _ in range(replicas)]
    refused = [refusal(meters[i % replicas], i + 1) for i in range(sent)]
    passed = refused.count("")
    assert passed >= min(sent, burst) // replicas
    assert passed <= burst + replicas
    assert set(refused) <= {"", "rate"}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_steady_excess_passes_at_the_rate(replicas: int) -> None:
    """Twice as many as allowed, evenly, for a minute: half of them pass."""
    rate, burst = 100.0, 10
    meters = [Meter(Limits(rate=rate, burst=burst)) for _ in range(replicas)]
    total = 12_000
    passed = sum(
        refusal(meters[i % replicas], i + 1, time_s=i / (2 * rate)) == "" for i in range(total)
    )
    assert total / 2 * 0.9 <= passed <= total / 2 * 1.1 + burst


def test_retry_time_is_when_the_bucket_has_room_again() -> None:
    meter = Meter(Limits(rate=10.0, burst=2))
    assert [refusal(meter, i, time_s=5.0) for i in (1, 2, 3)] == ["", "", "rate"]
    with pytest.raises(ResourceError) as refused:
        meter.admit(4, 5.0, 1)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    assert refusal(meter, 5, time_s=5.1001) == ""


def test_repeat_and_one_that_was_overtaken_fill_no_bucket() -> None:
    meter = Meter(Limits(rate=1.0, burst=3))
    assert [refusal(meter, i, time_s=1.0) for i in (1, 3, 2, 3, 1)] == [""] * 5
    assert refusal(meter, 4, time_s=1.0) == "rate"


def test_zero_is_no_bound() -> None:
    meter = Meter(NONE)
    meter.read(Reading(10**9, 0, 10**15, 0))
    assert [refusal(meter, i) for i in range(1, 1000)] == [""] * 999


def test_first_ones_that_come_in_the_wrong_order_fill_the_bucket_all_the_same() -> None:
    meter = Meter(Limits(rate=0.001, burst=2))
    assert [refusal(meter, i, time_s=1.0) for i in (6, 5, 7, 8)] == ["", "", "rate", "rate"]
