"""The load test and the chaos run on a real mesh: small here, as large as one likes by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest import chaos, deltasync, hiding, load
from loadtest.publishing import delta_table
from loadtest.watching import RANKS
from phaseloom.common.contract import streams
from tests.support.pretrained import save_model


@pytest.mark.slow
async def test_five_jobs_of_forty_operations_complete_without_a_restart(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    settings = load.Settings(jobs=5, operations=40, nodes=2)

    report = await load.run(settings, short_dir)

    assert report.operations == 200
    assert report.restarts == []
    assert report.lost_wpgs == []
    assert report.progress == sorted(report.progress)
    assert set(report.max_lag) == {streams.ops_stream(load.TENANT), streams.SCHED, streams.PERMITS}
    services = {"nats", "scheduler", "router", "profiler", "statemgr", "worker", RANKS}
    assert set(report.growth_bytes) == services
    assert all(report.samples[-1].memory_bytes[name] > 2**20 for name in services)
    assert 0 < report.step_p50_s <= report.step_p99_s
    assert set(report.processor_ms) == services | {load.CLIENTS}
    assert 0 < sum(report.processor_ms.values()) < 1e3 * report.wall_s
    assert 0 <= report.idle_share < 1
    assert all(rate > 0 for rate in report.chain_throughput)
    assert len(report.chain_throughput) == 2


async def test_switches_of_two_jobs_that_share_devices_are_seen_and_accounted_for(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    settings = hiding.Settings(
        steps=5, state_mib=1, generate_s=0.05, environment_s=0.1, train_s=0.05, pause_s=0.1
    )

    report = await hiding.run(settings, short_dir)

    assert report.switches >= 2, "each device was used by both"
    assert set(report.idle_share) == {"rollout-0", "train-0"}
    unhidden_s = sum(report.unhidden_seconds.values())
    assert report.hidden_seconds + unhidden_s == pytest.approx(report.switch_seconds, abs=0.05)


@pytest.mark.slow
async def test_versions_of_a_run_in_bfloat16_are_sent_whole_and_as_deltas(
    short_dir: Path,
) -> None:
    model = save_model(short_dir / "tiny", max_position_embeddings=1024, hidden_size=256)
    settings = deltasync.Settings([1e-6, 1e-5], steps=2, settle_steps=1, rows=1)

    report = await deltasync.measure(model, settings, short_dir)

    low, high = report.runs
    for each in (*low.versions, *high.versions):
        assert each.delta_bytes < each.whole_bytes
        assert each.whole_bytes > report.version_bytes
    assert deltasync.middle(low, "changed") < deltasync.middle(high, "changed") < 0.5
    assert low.seal_changed_blocks > 0.5
    assert f"| learning rate | {1e-6:g} | {1e-5:g} |" in delta_table(report)


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_weights_are_the_same_after_twenty_kills_of_everything(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    told: list[str] = []

    report = await chaos.run(chaos.Settings(kills=20, seed=1), short_dir, told.append)

    assert report.stuck == "", told
    assert len(report.kills) == 20
    assert {kill.victim for kill in report.kills} == set(chaos.Victim)
    assert all(job.is_same for job in report.jobs), told
