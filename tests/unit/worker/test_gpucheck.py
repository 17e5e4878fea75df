"""The proofs' frame: what is run, what is said of it, and what is needed for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phaseloom.worker import gpucheck
from phaseloom.worker.cuda import driver as cuda
from phaseloom.worker.cuda import patterns
from phaseloom.worker.cuda.proofs import Disproved, Found, Skipped
from phaseloom.worker.gpucheck import Outcome, Verdict, described, run_proof, table

ROOT = Path(__file__).parents[3]
NOT_NEEDED = ("msgspec", "xxhash", "nats", "opentelemetry", "transformers", "safetensors")


def _raising(error: Exception) -> Found:
    raise error


def test_nothing_is_proved_and_nothing_fails_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-of-nobody.so.1")
    assert gpucheck.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("gpu-check: nothing was proved: there is no CUDA driver: libcuda-of-nob")


def test_proofs_need_torch_and_the_standard_library_only() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))"
    wanted = "import phaseloom.worker.gpucheck, phaseloom.worker.cuda.proofs as p; print(p.TURNS)"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}; {wanted}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


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


@pytest.mark.parametrize("failing", [True, False])
def test_exit_status_says_whether_something_fails(
    failing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcomes = [
        Outcome("a", Verdict.FAILS if failing else Verdict.HOLDS, "why"),
        Outcome("b", Verdict.SKIPPED, "why not"),
    ]
    monkeypatch.setattr(gpucheck, "_found", lambda device: (None, {"device": f"GPU {device}"}))
    monkeypatch.setattr(gpucheck, "run_all", lambda driver, sizes: outcomes)
    written = tmp_path / "gpu.json"
    assert gpucheck.main(["--device", "1", "--out", str(written)]) == int(failing)
    assert json.loads(written.read_text())["machine"] == {"device": "GPU 1"}


def test_pattern_finds_one_changed_bit_and_another_seed() -> None:
    memory = torch.empty(8 * 1000, dtype=torch.uint8)
    patterns.fill(memory, 3)
    assert patterns.num_differing(memory, 3) == 0
    assert patterns.num_differing(memory, 4) == 1000
    memory[4001] ^= 16
    assert patterns.num_differing(memory, 3) == 1
    assert len(set(memory.view(torch.int64).tolist())) == 1000
