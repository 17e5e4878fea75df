"""The parts of a scenario, and the spreading of its runs over processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from phaseloom.common.contract.errors import CallerError
from phaseloom.simulator.scenarios.report import Report

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of the command line; an empty one leaves the scenario's own."""

    policies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    workload: Path | None = None
    virtual_clusters: tuple[str, ...] = ()
    start_h: float | None = None
    """The hour at which the window of a trace of real arrivals begins."""
    processes: int = 0
    """The number of runs at once; 0: one on each core."""


Advance = Callable[[str, int, int], None]
"""Called with the name of the run that has just ended, the number of ended runs, and that of all;
it draws the progress bar."""


class Scenario(NamedTuple):
    about: str
    run: Callable[[Options, Advance], Report]
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
        for field in ("workload", "virtual_clusters", "start_h"):
            if getattr(options, field) not in (None, ()) and field not in self.accepts:
                flag = field.removesuffix("s").replace("_", "-")
                raise CallerError(
                    f"scenario {name} has arrivals and jobs of its own",
                    field=flag,
                    remedy=f"leave --{flag} out, or choose another scenario",
                )


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a scenario: a function at module level, and its arguments."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_cases(cases: Sequence[Case], options: Options, advance: Advance) -> list[Any]:
    """Run all cases; their results are in the order of the cases."""
    processes = options.processes or os.cpu_count() or 1
    results: dict[int, Any] = {}
    for done, (index, result) in enumerate(_results(cases, processes), 1):
        results[index] = result
        advance(cases[index].name, done, len(cases))
    return [results[index] for index in range(len(cases))]


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


def chosen(asked: tuple[T, ...], known: Sequence[T], field: str) -> tuple[T, ...]:
    """The items that were asked for; all of them where nothing was.

    Raises: CallerError: an item is not known.
    """
    for item in asked:
        if item not in known:
            raise CallerError(
                f"{item!r} is not known to this scenario",
                field=field,
                remedy=f"one of {', '.join(map(str, known))}",
            )
    return asked or tuple(known)
