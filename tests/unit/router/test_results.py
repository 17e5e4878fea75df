"""What a new session is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.api import DeploymentStatus, JobStatus
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import JobKey
from phaseloom.router.core.results import MAX_HOLES, attach_status, check_attachable, stored_seqs

JOB = JobKey("acme", "sums")


def status(next_seq: int, state: str = "active") -> JobStatus:
    return JobStatus(
        "sums", state, [DeploymentStatus("policy", "train", "node0", "ready", 1, next_seq)]
    )


@given(st.integers(1, 30), st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_every_seq_below_the_next_is_known_or_filled(
    viewed: int, stored: set[int], done: set[int]
) -> None:
    seqs = stored | done
    told, fillers = attach_status(JOB, status(viewed), {"policy": stored}, {"policy": done})
    assert told.deployments[0].open_operations == [str(seq) for seq in sorted(stored - done)]
    next_seq = told.deployments[0].next_seq
    filled = {filler.key.seq for filler in fillers}
    assert not filled & seqs
    assert set(range(viewed, next_seq)) == filled | {s for s in seqs if s >= viewed}
    assert next_seq not in seqs
    assert all(filler.error and filler.error.code is Code.ABORTED for filler in fillers)


@pytest.mark.parametrize(
    ("stored", "next_seq", "num_filled"),
    [
        ({2, 10**17}, 3, 1),
        ({MAX_HOLES + 1, MAX_HOLES + 3}, MAX_HOLES + 2, MAX_HOLES),
        ({MAX_HOLES + 2}, 1, 0),
    ],
)
def test_holes_that_no_session_can_have_left_are_not_closed(
    stored: set[int], next_seq: int, num_filled: int
) -> None:
    """A seq of eighteen digits, typed wrong, must not keep a router busy for ever."""
    told, fillers = attach_status(JOB, status(1), {"policy": stored}, {})
    assert told.deployments[0].next_seq == next_seq
    assert told.deployments[0].open_operations == [str(seq) for seq in sorted(stored)]
    assert len(fillers) == num_filled


def test_seqs_are_read_from_either_stream_and_other_subjects_left_out() -> None:
    subjects = [
        "pl.v1.op.acme.sums.policy.3",
        "pl.v1.done.acme.sums.policy.2",
        "pl.v1.op.acme.sums.policy.3",
        "pl.v1.op.acme.sums.sampler.r7",
        "pl.v1.op.acme.sums.sampler.x",
        "pl.v1.op.acme.sums",
    ]
    assert stored_seqs(subjects) == {"policy": {2, 3}}


@pytest.mark.parametrize("state", ["done", "failed", "rejected"])
def test_ended_job_takes_no_session(state: str) -> None:
    with pytest.raises(CallerError) as error:
        check_attachable(status(1, state))
    assert error.value.info.code is Code.FAILED_PRECONDITION
