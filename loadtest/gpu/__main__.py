"""`make gpu-check`: prove on this machine what needs a GPU, or say why nothing can be proved.

    python -m loadtest.gpu [--device 0] [--sizes-mib 64,1024,3072,16384]
                           [--limit-s 150] [--out FILE]

Needs torch and the standard library only; the proofs of whole backends need their runtimes too, and
are skipped by name where these are not installed. Each proof runs in a process of its own: an error
of the device ends every later call of the process that met it, and what hangs is killed. Prints a
line as each ends, then a table, and the same as JSON on the last line, which the file has from the
first proof on. Exit status 0: all that ran holds; 1: something does not; 2: nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phaseloom.worker.cuda.driver import CudaError, CudaUnavailable, Driver, load

if TYPE_CHECKING:
    from loadtest.gpu.proofs import Found

MiB = 1024 * 1024
DEFAULT_SIZES_MIB = "64,1024,3072,16384"
"""A small heap, and the bfloat16 weights of models of 0.5, 1.5 and 8 billion parameters."""
NOTHING_RAN = 2
DEFAULT_LIMIT_S = 150.0
KILLED_WITHIN_S = 10.0
"""The longest wait for a killed process: one that hangs in the driver may not end when it is
killed."""


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "FAILS"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: Verdict
    detail: str
    duration_s: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


def plan(sizes_mib: Sequence[int]) -> dict[str, Callable[[Driver], Found]]:
    """The proofs by name, in their order."""
    from loadtest.gpu import backends, files, meshes, proofs, sharding

    planned: dict[str, Callable[[Driver], Found]] = {
        f"offload and load, {size} MiB": partial(proofs.round_trip, num_bytes=size * MiB)
        for size in sizes_mib
    }
    planned |= {
        "default stream": proofs.default_stream,
        "captured graphs": proofs.graphs,
        "shared with a process": proofs.shared_memory,
        "in a forked process": proofs.forked,
        "AdamW over switches": proofs.optimizer,
        "AdamW on the host": proofs.optimizer_on_host,
        "FSDP2 over switches": sharding.sharded_training,
        "NCCL's memory over switches": sharding.nccl_residue,
        "Green Contexts": proofs.green_contexts,
        "kvikio": proofs.kvikio_file,
        "kvikio beside direct I/O": proofs.kvikio_beside_direct,
        "heap to NVMe and back by kvikio": files.heap_to_nvme,
        "prefetch from NVMe": files.prefetched,
        "two processes, default order": meshes.two_processes,
        "two full-weight jobs": meshes.two_full_jobs,
    }
    for name in ("fsdp", "megatron", "sampler", "vllm"):
        planned[f"backend {name} over switches"] = partial(
            backends.backend_over_switches, name=name
        )
    planned["backend megatron with Transformer Engine"] = partial(
        backends.backend_over_switches,
        name="megatron",
        model=backends.EXPERTS,
        needs="transformer_engine",
    )
    return planned


def run_proof(name: str, prove: Callable[[], Found]) -> Outcome:
    """Outcome of a proof in this process, whatever goes wrong in it."""
    from loadtest.gpu.proofs import Disproved, Skipped

    started_s = time.perf_counter()

    def outcome(verdict: Verdict, detail: str, figures: dict[str, float] | None = None) -> Outcome:
        return Outcome(name, verdict, detail, time.perf_counter() - started_s, figures or {})

    try:
        found = prove()
    except Skipped as why:
        return outcome(Verdict.SKIPPED, str(why))
    except Disproved as why:
        return outcome(Verdict.FAILS, str(why))
    except Exception as error:
        traceback.print_exc()
        return outcome(Verdict.FAILS, f"{type(error).__name__}: {error}")
    return outcome(Verdict.HOLDS, found.detail, found.figures)


def run_isolated(name: str, command: Sequence[str], limit_s: float) -> Outcome:
    """The outcome that a process writes. If it dies, or is silent for `limit_s`, that is the
    outcome.

    Args: command: the process; the name of a file for the outcome is appended.
    """
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        written = Path(directory) / "outcome.json"
        # In a session of its own, so that whatever it starts can be killed with it.
        process = subprocess.Popen([*command, str(written)], start_new_session=True)
        try:
            status = process.wait(limit_s)
            return _read_outcome(written)
        except subprocess.TimeoutExpired:
            why = f"not done after {limit_s:.0f} s: killed"
        except (OSError, ValueError, KeyError):
            why = f"its process ended with {_described_status(status)}, see what it wrote above"
        finally:
            _kill_session(process)
    return Outcome(name, Verdict.FAILS, why, time.perf_counter() - started_s)


def _read_outcome(written: Path) -> Outcome:
    """The outcome that a process wrote. Raises: OSError, ValueError, KeyError: it is missing or not
    whole."""
    values = json.loads(written.read_text())
    return Outcome(**{**values, "verdict": Verdict(values["verdict"])})


def _described_status(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_WITHIN_S)


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of the verdicts, then one of every figure."""
    lines = ["| proof | | seconds | found |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {each.name} | {each.verdict} | {each.duration_s:.1f} | {each.detail} |"
        for each in outcomes
    ]
    figures = [(each.name, name, v) for each in outcomes for name, v in each.figures.items()]
    if figures:
        lines += ["", "| proof | figure | |", "| --- | --- | --- |"]
        lines += [f"| {proof} | `{name}` | {value:.3g} |" for proof, name, value in figures]
    return "\n".join(lines)


def described(outcomes: Sequence[Outcome], machine: dict[str, str]) -> str:
    return json.dumps({"machine": machine, "proofs": [asdict(each) for each in outcomes]})


def main(arguments: Sequence[str]) -> int:
    options = _parsed(arguments)
    try:
        driver, machine = _found(options.device)
    except CudaUnavailable as why:
        print(f"gpu-check: nothing was proved: {why}")
        if options.out is not None and options.proof is None:
            options.out.write_text(json.dumps({"nothing_because": str(why)}) + "\n")
        return NOTHING_RAN
    except CudaError as error:
        print(f"gpu-check: the GPU cannot be used: {error}")
        return 1
    if options.proof is not None:
        return _prove(driver, options)
    print(", ".join(machine.values()), flush=True)
    outcomes: list[Outcome] = []
    for name in plan(options.sizes_mib):
        outcomes.append(run_isolated(name, _command(options, name), options.limit_s))
        print(f"{outcomes[-1].verdict:8} {name}: {outcomes[-1].detail}", flush=True)
        if options.out is not None:
            options.out.write_text(f"{described(outcomes, machine)}\n")
    print(f"\n{table(outcomes)}\n\n{described(outcomes, machine)}")
    verdicts = {each.verdict for each in outcomes}
    if verdicts == {Verdict.SKIPPED}:
        return NOTHING_RAN
    return int(Verdict.FAILS in verdicts)


def _prove(driver: Driver, options: argparse.Namespace) -> int:
    """Run one proof in this process, for `run_isolated`."""
    import torch

    # Patterns in host memory are looked through by all cores, whatever one rank would take.
    torch.set_num_threads(os.cpu_count() or 1)
    outcome = run_proof(options.proof, partial(plan(options.sizes_mib)[options.proof], driver))
    options.out.write_text(json.dumps(asdict(outcome)))
    return 0


def _command(options: argparse.Namespace, name: str) -> list[str]:
    sizes = ",".join(map(str, options.sizes_mib))
    arguments = ["--device", str(options.device), "--sizes-mib", sizes, "--proof", name, "--out"]
    return [sys.executable, "-m", "loadtest.gpu", *arguments]


def _found(device: int) -> tuple[Driver, dict[str, str]]:
    """The driver and a description of this machine. Raises: CudaUnavailable: something is
    missing."""
    try:
        import torch
    except ImportError as error:
        raise CudaUnavailable(f"torch is not installed: {error}") from error
    driver = load(device)
    if not torch.cuda.is_available():
        raise CudaUnavailable(f"torch {torch.__version__} cannot use this machine's GPU")
    torch.cuda.set_device(device)
    machine = {
        "device": torch.cuda.get_device_name(device),
        "torch": f"torch {torch.__version__}",
        "cuda": f"CUDA {torch.version.cuda}",
        "python": f"Python {sys.version.split()[0]}",
    }
    return driver, machine


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument(
        "--sizes-mib", type=_sizes, default=DEFAULT_SIZES_MIB, help="of what is offloaded"
    )
    parser.add_argument(
        "--limit-s", type=float, default=DEFAULT_LIMIT_S, help="one proof is killed after that"
    )
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--proof", help="only this one, in this process; its outcome goes to OUT")
    options = parser.parse_args(arguments)
    if options.proof is not None and (
        options.out is None or options.proof not in plan(options.sizes_mib)
    ):
        parser.error(f"--proof is one of {', '.join(plan(options.sizes_mib))}, and needs --out")
    return options


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
