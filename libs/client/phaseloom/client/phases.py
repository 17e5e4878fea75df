"""Phases: a controller says that a run of operations on one pool has begun, and when it is over.

A hint that lets the mesh keep the pool's device for the job between the operations of a phase, and
give it away at once after the last; never a lock. Nothing is wrong with a phase that overlaps
another, and a hint that does not get through changes no result.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from phaseloom.client import hooks
from phaseloom.common.contract.errors import CallerError, Code

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class HasPhases(Protocol):
    """A session of a job."""

    async def begin_phase(self, pool: str) -> None: ...

    async def end_phase(self, pool: str) -> None: ...

    def runtime_hook(self, hook: hooks.H) -> hooks.H: ...


CURRENT: ContextVar[HasPhases | None] = ContextVar("job", default=None)
"""The job that was submitted or attached to last in this context."""


class Phase:
    """A phase on a pool: `async with` it, decorate an async function with it, or begin and end it.

    Without a job of its own it is the job's that the decorated function is given as an argument;
    else of the one that was submitted or attached to last in this context.
    """

    def __init__(self, pool: str, job: HasPhases | None = None) -> None:
        self.pool = pool
        self._job = job
        self._begun: list[HasPhases] = []

    async def begin(self) -> None:
        """Raises: CallerError: there is no job. ResourceError: ABORTED, its session is over."""
        await self._begin(self._job or _current())

    async def end(self) -> None:
        """Raises: CallerError: it was not begun."""
        if not self._begun:
            raise CallerError(
                f"phase {self.pool!r} was not begun",
                code=Code.FAILED_PRECONDITION,
                remedy="call `begin` first",
            )
        await self._begun.pop().end_phase(self.pool)

    async def _begin(self, job: HasPhases) -> None:
        await job.begin_phase(self.pool)
        self._begun.append(job)

    async def __aenter__(self) -> Phase:
        await self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.end()

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def in_phase(*args: P.args, **kwargs: P.kwargs) -> T:
            job = self._job or _job_in([*args, *kwargs.values()]) or _current()
            # One of its own a call: calls may overlap.
            async with Phase(self.pool, job):
                return await function(*args, **kwargs)

        return in_phase


def phase(pool: str) -> Phase:
    """A phase on a pool (`rollout`, `train`, …) of the job at hand; see `Phase`."""
    return Phase(pool)


def runtime_hook(hook: hooks.H) -> hooks.H:
    """Have a function told what happens in the job at hand, and in those that come after; see
    `phaseloom.client.hooks`."""
    hooks.DECLARED.set((*hooks.DECLARED.get(), hook))
    job = CURRENT.get()
    if job is not None:
        job.runtime_hook(hook)
    return hook


def _job_in(arguments: list[object]) -> HasPhases | None:
    """The first argument that is a job, or that has one as `job`."""
    for argument in arguments:
        for candidate in (argument, getattr(argument, "job", None)):
            if isinstance(candidate, HasPhases):
                return candidate
    return None


def _current() -> HasPhases:
    job = CURRENT.get()
    if job is None:
        raise CallerError(
            "there is no job that this phase could be of",
            code=Code.FAILED_PRECONDITION,
            remedy="submit or attach to one first, pass it to the function, or use `job.phase`",
        )
    return job
