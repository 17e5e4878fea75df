"""The parts of a scenario, and the spreading of its runs over processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.scenarios.report import Report


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a scenario: a function at module level, and its arguments."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


Advance = Callable[[str, int, int], None]
"""Called with the name of the run that has just ended, the number of ended runs, and that of all;
it draws the progress bar."""


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of the command line; an empty one leaves the scenario's own."""

    policies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    workload: Path | None = None
    virtual_clusters: tuple[str, ...] = ()
    start_h: float | None = None
    """The hour at which the window of a trace of real arrivals begins."""
    slowdowns: Path | None = None
    """A table of slowdowns instead of the scenario's own."""
    processes: int = 0
    """The number of runs at once; 0: one on each core."""
    advance: Advance = lambda what, done, total: None

    def policies_of(self, known: Iterable[str]) -> tuple[str, ...]:
        """The policies that were asked for; all of them where none was.

        Raises: CallerError: a policy is not known.
        """
        known = tuple(known)
        for policy in self.policies:
            if policy not in known:
                raise CallerError(
                    f"{policy!r} is not known to this scenario",
                    field="policy",
                    remedy=f"one of {', '.join(known)}",
                )
        return self.policies or known

    def run_cases(self, cases: Sequence[Case]) -> list[Any]:
        """Run all cases; their results are in the order of the cases."""
        processes = self.processes or os.cpu_count() or 1
        results: dict[int, Any] = {}
        for done, (index, result) in enumerate(_results(cases, processes), 1):
            results[index] = result
            self.advance(cases[index].name, done, len(cases))
        return [results[index] for index in range(len(cases))]


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

        Raises: CallerError: the scenario does not take this option.
        """
        for field in ("workload", "virtual_clusters", "start_h", "slowdowns"):
            if getattr(options, field) not in (None, ()) and field not in self.accepts:
                flag = _FLAGS.get(field, field)
                raise CallerError(
                    f"scenario {name} has arrivals and jobs of its own",
                    field=flag,
                    remedy=f"leave --{flag} out, or choose another scenario",
                )


def _results(cases: Sequence[Case], processes: int) -> Iterator[tuple[int, Any]]:
    if processes == 1 or len(cases) == 1:
        for index, case in enumerate(cases):
            yield index, case.run(*case.arguments)
        return
    # Processes are spawned, since a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {pool.submit(case.run, *case.arguments): i for i, case in enumerate(cases)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
