"""What is made of a load test's samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.load import LoadReport, Settings, growth
from loadtest.pictures import draw_load, headline, rates
from loadtest.processes import children, cpu_s, idle_s, pss_bytes
from loadtest.publishing import load_table
from loadtest.records import describe
from loadtest.watching import Sample, bucket_quantiles

PAGE = """\
# TYPE step_seconds histogram
step_seconds_bucket{le="0.0001",otel_scope_name="phaseloom"} 50.0
step_seconds_bucket{le="0.001",otel_scope_name="phaseloom"} 98.0
step_seconds_bucket{le="0.01",otel_scope_name="phaseloom"} 100.0
step_seconds_bucket{le="+Inf",otel_scope_name="phaseloom"} 100.0
step_seconds_count{otel_scope_name="phaseloom"} 100.0
"""


def _samples(sizes: list[int]) -> list[Sample]:
    return [Sample(float(n), {"router": size}, {"SCHED": n}) for n, size in enumerate(sizes)]


def test_growth_leaves_the_first_quarter_out_and_single_peaks_too() -> None:
    """What fills up at the beginning, or is freed again, is no leak."""
    assert growth(_samples([10, 20, 30, 100, 100, 100, 100, 100, 500, 100, 100, 100])) == {
        "router": 0
    }
    assert growth(_samples([0, 0, 10, 10, 20, 20, 30, 30])) == {"router": 20}


def test_bucket_quantile_is_the_bound_below_which_the_share_lies() -> None:
    assert bucket_quantiles(PAGE, "step_seconds", 0.5, 0.51, 0.99) == [0.0001, 0.001, 0.01]


def test_bucket_quantiles_refuse_a_page_without_the_histogram() -> None:
    with pytest.raises(ValueError, match="other_seconds"):
        bucket_quantiles(PAGE, "other_seconds", 0.5)


def test_rates_are_over_stretches_of_the_wanted_length() -> None:
    progress = [(1.0, 10), (2.0, 30), (3.0, 40), (4.0, 80)]
    assert rates(progress, 2.0) == [(2.0, 15.0), (4.0, 25.0)]


def _report() -> LoadReport:
    samples = _samples([2**20, 2**21, 2**21, 2**21])
    return LoadReport(
        machine=describe(),
        settings=Settings(jobs=2, operations=50),
        operations=100,
        wall_s=4.0,
        throughput=25.0,
        p50_ms=10.0,
        p99_ms=20.0,
        step_p50_s=1e-4,
        step_p99_s=1e-3,
        restarts=[],
        lost_wpgs=[],
        growth_bytes=growth(samples),
        max_lag={"SCHED": 3},
        progress=[(2.0, 40), (4.0, 100)],
        samples=samples,
        processor_ms={"nats": 0.5, "ranks": 1.25},
        idle_share=0.125,
        chain_throughput=[90.0, 110.0],
    )


def test_picture_is_drawn_of_a_report(tmp_path: Path) -> None:
    report = _report()
    file = tmp_path / "load.png"
    draw_load(report, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "2 jobs, 100 operations" in headline(report)


def test_table_tells_a_slow_mesh_from_a_slow_machine() -> None:
    """The raw chain of the same minutes, and where the processor's time went."""
    lines = load_table(_report()).splitlines()
    assert (
        "| raw chain with as many in flight, before and after | 90 and 110 operations a second |"
        in lines
    )
    assert "| throughput over the raw chain's | 0.25 |" in lines
    assert "| processor time of an operation | 1.75 ms: ranks 1.25, nats 0.50 |" in lines
    assert "| idle time of the cores | 12% |" in lines


def test_children_are_those_of_the_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in children(os.getpid())
        assert pss_bytes(child.pid) > 0
    finally:
        child.communicate(b"\n")
    assert child.pid not in children(os.getpid())
    assert pss_bytes(child.pid) == 0


def test_processor_time_is_that_of_the_process() -> None:
    """Whatever its name is: that stands in parentheses before the figures."""
    name = "open('/proc/self/comm', 'w').write('a) 1 (b'); "
    work = f"{name}print(sum(range(10**7)), flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        used_s = cpu_s(child.pid)
        assert 0.02 < used_s < 60.0
        assert idle_s() > 0.0
    finally:
        child.communicate(b"\n")
    assert cpu_s(child.pid) == 0.0
