"""Phases: a controller says when a run of operations on one pool begins, and when it ends.

A phase is a hint and never a lock. It lets the mesh keep the pool's device for the job between the
operations of the phase, and give the device away at once after the last. Phases may overlap, and a
hint that does not get through changes no result.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from phaseloom.client import hooks
from phaseloom.common.contract.errors import CallerError, Code

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class HasPhases(Protocol):
    """The methods of a job's session that phases need."""

    async def begin_phase(self, pool: str) -> None: ...

    async def end_phase(self, pool: str) -> None: ...

    def runtime_hook(self, hook: hooks.H) -> hooks.H: ...


CURRENT: ContextVar[HasPhases | None] = ContextVar("job", default=None)
"""The job that was submitted or attached to last in this context."""


class Phase:
    """A phase on a pool: use `async with`, decorate an async function with it, or call `begin` and
    `end`.

    A phase that was made without a job belongs to the job that the decorated function gets as an
    argument; without such an argument, to the job that was submitted or attached to last in this
    context.
    """

    def __init__(self, pool: str, job: HasPhases | None = None) -> None:
        self.pool = pool
        self._job = job
        self._begun: list[HasPhases] = []

    async def begin(self) -> None:
        """Begin the phase.

        Raises: CallerError: there is no job. ResourceError: ABORTED: the job's session is over.
        """
        await self._begin(self._job or _current())

    async def end(self) -> None:
        """End the phase.

        Raises: CallerError: the phase was not begun.
        """
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

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def in_phase(*args: P.args, **kwargs: P.kwargs) -> T:
            job = self._job or _job_in([*args, *kwargs.values()]) or _current()
            # Each call has a phase of its own, since calls may overlap.
            async with Phase(self.pool, job):
                return await function(*args, **kwargs)

        return in_phase


def phase(pool: str) -> Phase:
    """A phase on a pool (`rollout`, `train`, …) of the job at hand; see `Phase`."""
    return Phase(pool)


def runtime_hook(hook: hooks.H) -> hooks.H:
    """Register a function for the events of the job at hand and of later ones; a decorator, too.

    `phaseloom.client.hooks` lists the events.
    """
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
