"""The runs of a comparison, spread over processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.process import diewithparent


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a comparison: a function at module level, and its arguments."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


Advance = Callable[[str, int, int], None]
"""Draws the progress bar. Arguments: the run that ended, or the progress of a long one; the
number of ended runs; the number of all runs."""


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of the command line. An empty one selects the default."""

    policies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    workload: Path | None = None
    processes: int = 0
    """Number of runs at once; 0: one on each core."""
    advance: Advance = lambda message, done, total: None

    def check(self) -> None:
        """Raises: CallerError: the number of processes is negative."""
        if self.processes < 0:
            raise CallerError(
                f"processes must be at least 0, got {self.processes}",
                field="processes",
                remedy="give 1 or more, or 0 for one on each core",
            )

    def policies_of(self, available: Iterable[str]) -> tuple[str, ...]:
        """Return the requested policies, or all known ones if none was requested.

        Raises: CallerError: a policy is not known.
        """
        available = tuple(available)
        for policy in self.policies:
            if policy not in available:
                raise CallerError(
                    f"policy {policy!r} is not one that this comparison runs",
                    field="policy",
                    remedy=f"name one of {', '.join(available)}",
                )
        return self.policies or available

    def run_cases(self, cases: Sequence[Case]) -> list[Any]:
        """Run all cases and return their results in the order of the cases."""
        processes = self.processes or os.cpu_count() or 1
        results: dict[int, Any] = {}

        def report(message: str) -> None:
            self.advance(message, len(results), len(cases))

        for index, result in _results(cases, processes, report):
            results[index] = result
            report(cases[index].name)
        return [results[index] for index in range(len(cases))]


# --- processes -----------------------------------------------------------------------------------

_REPORT_EVERY_S = 5.0
"""Shortest time between two progress reports of a long run."""


class ProgressReporter:
    """Reports the progress of a run, at most once every `_TELL_S`, however often it is called.

    Reports from worker processes reach the caller of `Options.run_cases`, too.
    """

    report: ClassVar[Callable[[str], None]] = staticmethod(lambda message: None)

    def __init__(self, name: str, every_s: float = _REPORT_EVERY_S) -> None:
        self._name = name
        self._every_s = every_s
        self._next_s = time.monotonic() + every_s

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            ProgressReporter.report(f"{self._name} {done}/{total}")


def _results(
    cases: Sequence[Case], processes: int, report: Callable[[str], None]
) -> Iterator[tuple[int, Any]]:
    if processes == 1 or len(cases) == 1:
        _prepare(report)
        for index, case in enumerate(cases):
            yield index, case.run(*case.arguments)
        return
    # Spawn instead of fork: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with (
        _forwarding(context.SimpleQueue(), report) as put,
        ProcessPoolExecutor(processes, context, _prepare, (put, os.getpid())) as pool,
    ):
        try:
            with _delaying_interrupts():
                futures = {
                    pool.submit(case.run, *case.arguments): i for i, case in enumerate(cases)
                }
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # a run takes up to minutes
                process.terminate()
            raise


@contextmanager
def _delaying_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Processes that start in it never get it: they would
    print a traceback each."""
    numbers: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    for number in numbers:
        signal.raise_signal(number)


def _prepare(report: Callable[[str], None], parent_pid: int = 0) -> None:
    """Prepare this process. Args: parent_pid: end when this process ends; 0: never."""
    ProgressReporter.report = staticmethod(report)
    if parent_pid:
        diewithparent.arm(parent_pid)


@contextmanager
def _forwarding(queue: Any, report: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function through which worker processes call `told` in this process."""

    def forward() -> None:
        while (message := queue.get()) is not None:
            report(message)

    thread = Thread(target=forward, daemon=True)
    thread.start()
    yield queue.put
    # Not in a finally: after a failure a killed process may hold the queue's lock forever.
    queue.put(None)
    thread.join()
