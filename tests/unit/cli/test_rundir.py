"""Which run, and how its mesh is reached."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from phaseloom.cli.rundir import bus_config, find_run, locked, new_run_dir, run_to_resume
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.transport.connection import BusConfig
from phaseloom.common.transport.natsserver import Credentials


def make_run(directory: Path, age_s: float = 0.0) -> Path:
    directory.mkdir(parents=True)
    (directory / "mesh.json").write_text("{}")
    os.utime(directory / "mesh.json", (1e9 - age_s, 1e9 - age_s))
    return directory


def test_newest_run_is_found_when_none_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "b", age_s=60)
    newest = make_run(tmp_path / "a")
    (tmp_path / "bench").mkdir()
    assert find_run(None, tmp_path) == newest


def test_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="no run directory"):
        find_run(tmp_path / "none")
    with pytest.raises(CallerError, match="phaseloom up"):
        find_run(None, tmp_path)


def test_credentials_come_from_the_run_named_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    of_run = Credentials("nats://run:1", "mesh", "p", {})
    (run / "credentials.json").write_bytes(msgspec.json.encode(of_run))
    for name, value in (("URL", "nats://env:1"), ("USER", "u"), ("PASSWORD", "q")):
        monkeypatch.setenv(f"PHASELOOM_BUS_{name}", value)
    assert bus_config(run) == of_run.bus
    assert bus_config(None) == BusConfig("nats://env:1", "u", "q")
    monkeypatch.setenv("PHASELOOM_BUS_REPLICAS", "3")
    assert bus_config(None).replicas == 3


def test_credentials_of_three_servers_are_of_streams_that_all_of_them_keep() -> None:
    three = Credentials("nats://a:1,nats://b:2,nats://c:3", "mesh", "p", {})
    assert three.bus.replicas == 3
    assert Credentials("nats://a:1", "mesh", "p", {}).bus.replicas == 1


def test_even_number_of_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("URL", "nats://env:1"), ("USER", "u"), ("PASSWORD", "q")):
        monkeypatch.setenv(f"PHASELOOM_BUS_{name}", value)
    monkeypatch.setenv("PHASELOOM_BUS_REPLICAS", "2")
    with pytest.raises(CallerError, match="2 is not valid") as refused:
        bus_config(None)
    assert refused.value.info.field == "PHASELOOM_BUS_REPLICAS"


def test_run_without_credentials_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="PHASELOOM_BUS_URL"):
        bus_config(make_run(tmp_path / "run"))


def test_new_run_dir_makes_another_each_time_and_latest_follows(tmp_path: Path) -> None:
    runs = [new_run_dir(tmp_path / "runs") for _ in range(3)]
    assert len(set(runs)) == 3
    assert (tmp_path / "runs" / "latest").resolve() == runs[-1].resolve()


def test_run_is_found_by_its_name_or_its_path(tmp_path: Path) -> None:
    run = make_run(tmp_path / "20260101-000000")
    assert find_run(Path("20260101-000000"), tmp_path) == run
    assert find_run(run, tmp_path) == run


def test_folder_in_which_no_run_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    with pytest.raises(CallerError, match="no run directory can be created") as refused:
        new_run_dir(tmp_path / "runs")
    assert refused.value.info.field == "--runs"


def test_run_goes_on_where_the_id_of_its_process_is_somebody_elses(tmp_path: Path) -> None:
    """As after a restart of the machine, or of a container whose first process the mesh was."""
    run = make_run(tmp_path / "run")
    (run / "mesh.json").write_text(json.dumps({"pid": os.getpid(), "pids": {}}))
    assert run_to_resume(str(run), tmp_path) == run


def test_run_that_has_not_ended_is_not_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with locked(run), pytest.raises(CallerError, match="in use by a running mesh") as refused:
        run_to_resume(str(run), tmp_path)
    assert refused.value.info.code is Code.FAILED_PRECONDITION
    assert run_to_resume(str(run), tmp_path) == run
