"""The parts of a scenario, and the options that one may accept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.comparison import cases
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.report import Report


class Bound(StrEnum):
    """The yardstick of a cost. The search for an optimum takes minutes where jobs are many."""

    NONE = "none"
    """There is no yardstick."""
    SOLO = "solo"
    """The cheapest regrouping of jobs that each stay for as long as they would alone."""
    REGROUPING = "regrouping"
    """As `SOLO`, and also the cheapest regrouping of the jobs present in the run. That costs more
    if a policy delays jobs."""


@dataclass(frozen=True, slots=True)
class Options(cases.Options):
    """The choices of the command line. An empty one keeps the scenario's own."""

    virtual_clusters: tuple[str, ...] = ()
    start_h: float | None = None
    """The hour at which the window of a trace of real arrivals begins."""
    slowdowns: Path | None = None
    """A table of slowdowns instead of the scenario's own."""
    bound: Bound = Bound.SOLO
    mixes: int | None = None
    """How many random mixes run."""

    def run_each(
        self,
        run: Callable[[str, str, int], Any],
        workloads: Iterable[str],
        ways: Iterable[str],
        seeds: Iterable[int],
    ) -> list[Any]:
        """Run every workload in every way with every seed; results are in that order.

        Args: run: gets the three; a function at module level.
              seeds: the scenario's own, for where none was asked for.
        """
        every = product(workloads, ways, self.seeds or seeds)
        return self.run_cases(
            [Case(f"{one}, {way}, seed {seed}", run, (one, way, seed)) for one, way, seed in every]
        )


_FLAGS = {"virtual_clusters": "virtual-cluster", "start_h": "start-h"}
"""The options whose flags have other names."""


class Scenario(NamedTuple):
    about: str
    run: Callable[[Options], Report]
    draw: Callable[[Report, Path], None]
    """Draws the picture of a report to a path (PNG)."""
    policies: tuple[str, ...]
    """The policies that may be asked for."""
    accepts: frozenset[str] = frozenset()
    """The options that the scenario takes, beside policies, seeds and processes."""

    def check(self, name: str, options: Options) -> None:
        """Refuse an option that the scenario would ignore.

        Raises: CallerError: the scenario does not take this option, or no run could.
        """
        options.check()
        if options.mixes is not None and options.mixes < 1:
            raise CallerError(
                f"mixes must be at least 1, got {options.mixes}",
                field="mixes",
                remedy="give the number of mixes to run, or leave --mixes out",
            )
        for field in ("workload", "virtual_clusters", "start_h", "slowdowns", "bound", "mixes"):
            is_chosen = getattr(options, field) not in (None, (), Bound.SOLO)
            if is_chosen and field not in self.accepts:
                flag = _FLAGS.get(field, field)
                raise CallerError(
                    f"scenario {name} has jobs of its own, and its own yardstick",
                    field=flag,
                    remedy=f"leave --{flag} out, or choose another scenario",
                )
