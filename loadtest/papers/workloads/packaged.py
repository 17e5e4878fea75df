"""The workloads that are kept as files next to the papers' scenarios."""

from __future__ import annotations

from pathlib import Path

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison import workloadfile
from phaseloom.simulator.jobs import SimJob

DATA = Path(__file__).parents[1] / "data"


def packaged(name: str) -> list[SimJob]:
    """One of the workloads that come with the simulator, e.g. `Mixed_seed0_nodesA`.

    Raises: CallerError: there is none of that name.
    """
    file = DATA / f"{name}.csv"
    if not file.is_file():
        raise CallerError(
            f"no workload {name!r} comes with the simulator",
            field="workload",
            remedy=f"one of {', '.join(packaged_names())}, or a file",
        )
    return workloadfile.parse(file.read_text(encoding="utf-8").splitlines(), f"{name}.csv")


def packaged_names() -> list[str]:
    files = (DATA).iterdir()
    names = [file.name.removesuffix(".csv") for file in files if "_nodes" in file.name]
    return sorted(names)
