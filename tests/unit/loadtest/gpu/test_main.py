"""The proofs' frame: what is run, what is said of it, and what is needed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from loadtest.gpu import __main__ as gpucheck
from loadtest.gpu import patterns
from loadtest.gpu.__main__ import (
    Outcome,
    Verdict,
    described,
    plan,
    run_isolated,
    run_proof,
    table,
)
from loadtest.gpu.proofs import Disproved, Found, Skipped
from phaseloom.worker.cuda import driver as cuda
from phaseloom.worker.cuda.driver import CudaError, Driver

ROOT = Path(__file__).parents[4]
NOT_NEEDED = ("msgspec", "xxhash", "nats", "opentelemetry", "transformers", "safetensors")


def _raising(error: Exception) -> Found:
    raise error


def test_where_there_is_no_gpu_nothing_is_proved_and_the_exit_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-of-nobody.so.1")
    written = tmp_path / "gpu.json"
    assert gpucheck.main(["--out", str(written)]) == gpucheck.NOTHING_RAN
    assert "libcuda-of-nobody" in json.loads(written.read_text())["nothing_because"]
    said = capsys.readouterr().out
    assert said.startswith("gpu-check: nothing was proved: there is no CUDA driver: libcuda-of-nob")


def test_proofs_need_torch_and_the_standard_library_only() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))"
    wanted = "from loadtest.gpu import __main__ as g; print(len(g.plan([8, 9])))"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}; {wanted}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "22\n"), done.stderr


def test_outcome_of_a_proof_is_what_it_found_or_why_not() -> None:
    held = run_proof("a", lambda: Found("all equal", {"load_gb_s": 50.0}))
    assert (held.verdict, held.detail, held.figures) == (
        Verdict.HOLDS,
        "all equal",
        {"load_gb_s": 50.0},
    )
    for error, verdict, detail in (
        (Disproved("3 words differ"), Verdict.FAILS, "3 words differ"),
        (Skipped("no kvikio"), Verdict.SKIPPED, "no kvikio"),
        (RuntimeError("out of memory"), Verdict.FAILS, "RuntimeError: out of memory"),
    ):
        outcome = run_proof("b", lambda error=error: _raising(error))  # type: ignore[misc]
        assert (outcome.verdict, outcome.detail) == (verdict, detail)


def test_what_this_machine_lacks_is_skipped_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked of a device."""
    nobody: Driver = sys  # type: ignore[assignment]  # nothing of it is used
    monkeypatch.setattr(torch.cuda.green_contexts, "SUPPORTED", False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    proofs = plan([8])
    for name, lacking in (
        ("Green Contexts", "this torch has no Green Contexts"),
        ("NCCL's memory over switches", "this torch has no NCCL"),
        ("kvikio", "kvikio is not installed"),
        ("heap to NVMe and back by kvikio", "kvikio is not installed"),
    ):
        outcome = run_proof(name, partial(proofs[name], nobody))
        assert outcome.verdict is Verdict.SKIPPED
        assert outcome.detail.startswith(lacking)


def test_table_and_json_have_every_proof_and_figure() -> None:
    outcomes = [
        Outcome("copies", Verdict.HOLDS, "all equal", 1.25, {"load_gb_s": 51.2345}),
        Outcome("kvikio", Verdict.SKIPPED, "not installed"),
    ]
    assert table(outcomes).splitlines() == [
        "| proof | | seconds | found |",
        "| --- | --- | --- | --- |",
        "| copies | holds | 1.2 | all equal |",
        "| kvikio | skipped | 0.0 | not installed |",
        "",
        "| proof | figure | |",
        "| --- | --- | --- |",
        "| copies | `load_gb_s` | 51.2 |",
    ]
    said = json.loads(described(outcomes, {"device": "H200"}))
    assert said["machine"] == {"device": "H200"}
    assert [each["verdict"] for each in said["proofs"]] == ["holds", "skipped"]
    assert said["proofs"][0]["figures"] == {"load_gb_s": 51.2345}


WRITES = (
    "import json, pathlib, sys; pathlib.Path(sys.argv[-1]).write_text(json.dumps(dict("
    "name=sys.argv[1], verdict=sys.argv[2], detail='as seen', figures=dict(x=1.5))))"
)
"""A proof that writes what it is told, where it is told."""


def _writing(name: str, verdict: Verdict) -> list[str]:
    return [sys.executable, "-c", WRITES, name, verdict]


def test_outcome_of_a_process_is_what_it_writes() -> None:
    outcome = run_isolated("a", _writing("a", Verdict.SKIPPED), 60.0)
    assert outcome == Outcome("a", Verdict.SKIPPED, "as seen", 0.0, {"x": 1.5})


def test_process_that_dies_has_failed() -> None:
    """An error of the device takes the process with it, and no other proof."""
    died = run_isolated("a", [sys.executable, "-c", "import os; os.abort()"], 60.0)
    assert (died.verdict, died.detail.split(",")[0]) == (
        Verdict.FAILS,
        "its process ended with SIGABRT",
    )
    left = run_isolated("a", [sys.executable, "-c", "raise SystemExit(3)"], 60.0)
    assert left.detail.startswith("its process ended with status 3")


def test_process_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """The fifo's end is held by a process that the hanging one has started."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hanging = (
        f"import subprocess, time; end = open({str(fifo)!r}, 'wb')"
        "; subprocess.Popen(['sleep', '600'], stdout=end); time.sleep(600)"
    )
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    hung = run_isolated("a", [sys.executable, "-c", hanging], 2.0)
    assert (hung.verdict, hung.detail) == (Verdict.FAILS, "not done after 2 s: killed")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "nobody writes there any more"
    os.close(reader)


@pytest.mark.parametrize("failing", [True, False])
def test_every_proof_is_run_whatever_the_others_say(
    failing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def command(options: object, name: str) -> list[str]:
        is_bad = failing and name == "captured graphs"
        return _writing(name, Verdict.FAILS if is_bad else Verdict.HOLDS)

    monkeypatch.setattr(gpucheck, "_found", lambda device: (None, {"device": f"GPU {device}"}))
    monkeypatch.setattr(gpucheck, "_command", command)
    written = tmp_path / "gpu.json"
    arguments = ["--device", "1", "--sizes-mib", "8", "--out", str(written)]
    assert gpucheck.main(arguments) == int(failing)
    said = json.loads(written.read_text())
    assert said["machine"] == {"device": "GPU 1"}
    assert [each["name"] for each in said["proofs"]] == [*plan([8])]
    assert sum(each["verdict"] == Verdict.FAILS for each in said["proofs"]) == int(failing)


def test_gpu_that_the_driver_refuses_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(device: int) -> None:
        raise CudaError("cuInit", 999, "CUDA_ERROR_UNKNOWN", "unknown error")

    monkeypatch.setattr(gpucheck, "_found", found)
    assert gpucheck.main([]) == 1
    assert "the GPU cannot be used: cuInit: CUDA_ERROR_UNKNOWN" in capsys.readouterr().out


def test_proof_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpucheck.main(["--proof", "captured graph", "--out", "x"])
    assert "captured graphs" in capsys.readouterr().err


def test_pattern_finds_one_changed_bit_and_another_seed() -> None:
    memory = torch.empty(8 * 1000, dtype=torch.uint8)
    patterns.fill(memory, 3)
    assert patterns.num_differing(memory, 3) == 0
    assert patterns.num_differing(memory, 4) == 1000
    memory[4001] ^= 16
    assert patterns.num_differing(memory, 3) == 1
    assert len(set(memory.view(torch.int64).tolist())) == 1000
