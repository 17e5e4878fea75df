"""The bench of a large cluster, at a small one."""

from __future__ import annotations

from pathlib import Path

from loadtest import scale


def test_every_job_of_a_small_cluster_works_and_is_restored(tmp_path: Path) -> None:
    settings = scale.Settings(nodes=20, devices=2, jobs=16, arrival_s=30.0, work_s=60.0)
    report = scale.measure(settings, tmp_path)
    assert report.placed == 16
    assert report.submitted.count == 16
    assert report.operations > 16
    assert report.working.count > report.operations
    assert report.working.p50_s <= report.working.p99_s <= report.working.longest_s
    assert report.losing.count > 0
    assert report.stored_bytes < report.snapshot_bytes
    assert report.state_bytes >= 0
