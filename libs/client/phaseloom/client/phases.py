"""Phases: a controller declares when a series of operations on one pool begins and ends.

A phase is a hint, never a lock. It lets the mesh keep the pool's device for the job between the
operations of the phase, and give the device away right after the last one. Phases may overlap. A
lost hint changes no result.
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
    """The methods of a job's session that phases use."""

    async def begin_phase(self, pool: str) -> None: ...

    async def end_phase(self, pool: str) -> None: ...

    def runtime_hook(self, hook: hooks.H) -> hooks.H: ...


CURRENT: ContextVar[HasPhases | None] = ContextVar("job", default=None)
"""The job that this context submitted or attached to last."""


class Phase:
    """A phase on a pool. Use `async with`, decorate an async function, or call `begin` and `end`.

    A phase made without a job belongs to the first job among the arguments of the decorated
    function. If there is none, it belongs to the job that this context submitted or attached to
    last.
    """

    def __init__(self, pool: str, job: HasPhases | None = None) -> None:
        self.pool = pool
        self._job = job
        self._open: list[HasPhases] = []

    async def begin(self) -> None:
        """Begin the phase.

        Raises: CallerError: there is no current job. ResourceError: ABORTED: the job's session is
                over.
        """
        job = self._job or _current()
        await job.begin_phase(self.pool)
        self._open.append(job)

    async def end(self) -> None:
        """End the phase.

        Raises: CallerError: the phase has not begun.
        """
        if not self._open:
            raise CallerError(
                f"phase {self.pool!r} has not begun",
                code=Code.FAILED_PRECONDITION,
                remedy="call `begin` first",
            )
        await self._open.pop().end_phase(self.pool)

    async def __aenter__(self) -> Phase:
        await self.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def in_phase(*args: P.args, **kwargs: P.kwargs) -> T:
            job = self._job or _job_in([*args, *kwargs.values()]) or _current()
            # Calls may overlap, so each one opens its own phase.
            async with Phase(self.pool, job):
                return await function(*args, **kwargs)

        return in_phase


def phase(pool: str) -> Phase:
    """A phase of the current job on a pool such as `rollout` or `train`; see `Phase`."""
    return Phase(pool)


def runtime_hook(hook: hooks.H) -> hooks.H:
    """Register a function for the events of the current job and of later ones; usable as a
    decorator.

    `phaseloom.client.hooks` lists the events.
    """
    hooks.DECLARED.set((*hooks.DECLARED.get(), hook))
    job = CURRENT.get()
    if job is not None:
        job.runtime_hook(hook)
    return hook


def _job_in(arguments: list[object]) -> HasPhases | None:
    for argument in arguments:
        for candidate in (argument, getattr(argument, "job", None)):
            if isinstance(candidate, HasPhases):
                return candidate
    return None


def _current() -> HasPhases:
    job = CURRENT.get()
    if job is None:
        raise CallerError(
            "there is no current job for this phase",
            code=Code.FAILED_PRECONDITION,
            remedy="submit or attach to a job first, pass it to the function, or use `job.phase`",
        )
    return job
