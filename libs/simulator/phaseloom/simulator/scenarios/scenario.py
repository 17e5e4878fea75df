"""The parts of a scenario, and the spreading of its runs over processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar, NamedTuple

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.process import diewithparent
from phaseloom.simulator.scenarios.report import Report


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a scenario: a function at module level, and its arguments."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


Advance = Callable[[str, int, int], None]
"""Called with the name of the run that has just ended, or the progress of a long one, the number of
ended runs, and the number of all; it draws the progress bar."""


class Bound(StrEnum):
    """The yardstick of a cost. The search for an optimum takes minutes where jobs are many."""

    NONE = "none"
    """There is no yardstick."""
    SOLO = "solo"
    """The cheapest regrouping of jobs that each stay for as long as they would alone."""
    REGROUPING = "regrouping"
    """As `SOLO`, and also the cheapest regrouping of the jobs that were present in the run."""


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
    bound: Bound = Bound.REGROUPING
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

        def told(what: str) -> None:
            self.advance(what, len(results), len(cases))

        for index, result in _results(cases, processes, told):
            results[index] = result
            told(cases[index].name)
        return [results[index] for index in range(len(cases))]

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
        if options.processes < 0:
            raise CallerError(
                f"{options.processes} processes run nothing",
                field="processes",
                remedy="give 1 or more, or 0 for one on each core",
            )
        for field in ("workload", "virtual_clusters", "start_h", "slowdowns", "bound"):
            is_chosen = getattr(options, field) not in (None, (), Bound.REGROUPING)
            if is_chosen and field not in self.accepts:
                flag = _FLAGS.get(field, field)
                raise CallerError(
                    f"scenario {name} has jobs of its own, and its own yardstick",
                    field=flag,
                    remedy=f"leave --{flag} out, or choose another scenario",
                )


# --- processes -----------------------------------------------------------------------------------

_TELL_S = 5.0
"""Seconds between two messages of a long run about its progress."""


class Telling:
    """Reports the progress of a run, at most once in `_TELL_S`: there may be thousands of calls.

    The caller of `Options.run_cases` gets the reports, also those of other processes.
    """

    told: ClassVar[Callable[[str], None]] = staticmethod(lambda what: None)

    def __init__(self, name: str, every_s: float = _TELL_S) -> None:
        self._name = name
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            Telling.told(f"{self._name} {done}/{total}")


def _results(
    cases: Sequence[Case], processes: int, told: Callable[[str], None]
) -> Iterator[tuple[int, Any]]:
    if processes == 1 or len(cases) == 1:
        _begin(told)
        for index, case in enumerate(cases):
            yield index, case.run(*case.arguments)
        return
    # Processes are spawned, since a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with (
        _heard(context.SimpleQueue(), told) as put,
        ProcessPoolExecutor(processes, context, _begin, (put, os.getpid())) as pool,
    ):
        futures = {pool.submit(case.run, *case.arguments): i for i, case in enumerate(cases)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # a run takes up to minutes
                process.terminate()
            raise


def _begin(told: Callable[[str], None], parent_pid: int = 0) -> None:
    """Begin in this process. Args: parent_pid: the process that this one ends with; 0: none."""
    Telling.told = staticmethod(told)
    if parent_pid:
        diewithparent.arm(parent_pid)


@contextmanager
def _heard(queue: Any, told: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """A function with which other processes call `told` here."""

    def hear() -> None:
        while (what := queue.get()) is not None:
            told(what)

    hearing = Thread(target=hear, daemon=True)
    hearing.start()
    yield queue.put
    # After a failure the thread is left waiting: a process that was ended may hold the queue.
    queue.put(None)
    hearing.join()
