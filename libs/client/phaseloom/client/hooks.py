"""Runtime hooks: plain functions that receive the events of a job as they happen.

@phaseloom.runtime_hook
def watch(event: phaseloom.RuntimeEvent) -> None:
    match event:
        case phaseloom.Progress(key, num_done, num_total): ...
        case phaseloom.OperationEnded(key, kind, error): ...
        case phaseloom.PhaseBegan(job, pool) | phaseloom.PhaseEnded(job, pool): ...

Hooks run on the event loop, so they must return quickly. An exception in a hook is logged and has
no other effect. Long operations report progress about once a second, streaming ones up to twenty
times a second. Progress reports may be lost. The end of an operation is reported exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OperationEnded:
    """An operation has ended. A call that was split into parts has one such event per part."""

    key: OperationKey
    kind: str
    error: PhaseloomError | None
    """Why the operation failed, or None if it completed."""


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    job: JobKey
    pool: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    job: JobKey
    pool: str


RuntimeEvent = Progress | OperationEnded | PhaseBegan | PhaseEnded
RuntimeHook = Callable[[RuntimeEvent], None]
H = TypeVar("H", bound=RuntimeHook)


class Hooks:
    """The hooks of one session of a job."""

    def __init__(self, hooks: tuple[RuntimeHook, ...] = ()) -> None:
        self._hooks = list(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook: RuntimeHook) -> None:
        if hook not in self._hooks:
            self._hooks.append(hook)

    def emit(self, event: RuntimeEvent) -> None:
        for hook in self._hooks:
            try:
                hook(event)
            except Exception:
                # A hook is the controller's own code: its error must not stop later completions.
                log.exception("a runtime hook failed on %r", event)


DECLARED: ContextVar[tuple[RuntimeHook, ...]] = ContextVar("runtime_hooks", default=())
"""Hooks to register with every job that this context submits or attaches to."""
