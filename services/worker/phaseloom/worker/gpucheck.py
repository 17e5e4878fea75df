"""`make gpu-check`: prove on this machine what needs a GPU, or say why nothing can be proved.

    python -m phaseloom.worker.gpucheck [--device 0] [--sizes-mib 64,1024,8192] [--out FILE]

Needs torch and the standard library only. Prints a table and the same as JSON on the last line.
Exit status 0: all holds, or there is no GPU; 1: something does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phaseloom.worker.cuda.driver import CudaUnavailable, Driver, load

if TYPE_CHECKING:
    from phaseloom.worker.cuda.proofs import Found

MiB = 1024 * 1024
DEFAULT_SIZES_MIB = "64,1024,8192"


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


def run_proof(name: str, prove: Callable[[], Found]) -> Outcome:
    """Whatever goes wrong in it is its outcome, not the end of the others."""
    from phaseloom.worker.cuda.proofs import Disproved, Skipped

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


def run_all(driver: Driver, sizes_mib: Sequence[int]) -> list[Outcome]:
    from phaseloom.worker.cuda import proofs

    planned: dict[str, Callable[[], Found]] = {
        f"offload and load, {size} MiB": partial(proofs.round_trip, driver, size * MiB)
        for size in sizes_mib
    }
    planned |= {
        "default stream": partial(proofs.default_stream, driver),
        "captured graphs": partial(proofs.graphs, driver),
        "shared with a process": partial(proofs.shared_memory, driver),
        "AdamW over switches": partial(proofs.optimizer, driver),
        "AdamW on the host": partial(proofs.optimizer_on_host, driver),
        "kvikio": partial(proofs.kvikio_file, driver),
    }
    outcomes = []
    for name, prove in planned.items():
        outcomes.append(run_proof(name, prove))
        print(f"{outcomes[-1].verdict:8} {name}: {outcomes[-1].detail}", flush=True)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown: what holds, then every figure."""
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
        return 0
    outcomes = run_all(driver, [int(size) for size in options.sizes_mib.split(",")])
    text = described(outcomes, machine)
    print(f"\n{', '.join(machine.values())}\n\n{table(outcomes)}\n\n{text}")
    if options.out is not None:
        options.out.write_text(f"{text}\n")
    return int(any(each.verdict is Verdict.FAILS for each in outcomes))


def _found(device: int) -> tuple[Driver, dict[str, str]]:
    """Raises: CudaUnavailable: what is missing."""
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
    parser.add_argument("--sizes-mib", default=DEFAULT_SIZES_MIB, help="of what is offloaded")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
