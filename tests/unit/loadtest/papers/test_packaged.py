"""The workloads that are kept as files."""

from __future__ import annotations

import pytest

from loadtest.papers.workloads import packaged
from phaseloom.common.contract.errors import CallerError


def test_packaged_workloads_are_whole() -> None:
    assert len(packaged.packaged_names()) == 6
    for name in packaged.packaged_names():
        jobs = packaged.packaged(name)
        assert len(jobs) == 300
        assert max(job.arrival_s for job in jobs) <= 580 * 3600
        assert all(1 <= job.slo <= 2 for job in jobs)
    with pytest.raises(CallerError, match="no workload 'none'"):
        packaged.packaged("none")
