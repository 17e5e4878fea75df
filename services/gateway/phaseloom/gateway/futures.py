"""Promises: answers to calls that take time. A repeated call finds its promise by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import nats.errors

from phaseloom.client import (
    CallerError,
    Code,
    Explanation,
    Lost,
    OperationHandle,
    PhaseloomError,
    ResourceError,
)

log = logging.getLogger(__name__)

Answer = bytes | dict[str, Any]
"""A protobuf message, or a JSON object."""

ACTIVE, PAUSED = "active", "paused_capacity"
"""The SDK's words for a running call, and for one that waits for a device."""
_PERMITTED = "permitted"
_MAX_KEPT = 10_000
_MAX_KEPT_BYTES = 256 * 2**20
"""Maximum bytes of the answers that are kept."""


@dataclass
class Promise:
    """The answer to one call, which may still be pending."""

    task: asyncio.Task[Answer | Lost]
    handle: OperationHandle[Any] | None = None
    """The operation that produces the answer, for explanations and cancellation. None: not
    submitted yet."""
    is_cancelled: bool = False
    """Whether the caller no longer wants the answer."""

    async def comes_from(self, handle: OperationHandle[Any]) -> None:
        """Set the operation that produces the answer, once it is submitted."""
        self.handle = handle
        if self.is_cancelled:
            await handle.cancel()

    async def cancel(self) -> None:
        """Cancel the operation that produces the answer, now or when it is submitted."""
        self.is_cancelled = True
        if self.handle is not None and not self.handle.done():
            with suppress(CallerError):  # it has ended already
                await self.handle.cancel()

    async def stored(self) -> None:
        """Wait until the mesh has stored the operation. From then on the promise survives any
        crash.

        Raises: Lost: it is unknown whether the mesh has the operation.
        """
        if self.handle is None:
            return
        try:
            await self.handle.stored()
        except PhaseloomError as error:
            raise Lost(
                f"{self.handle.key} is not known to be stored: {error.info.message}",
                remedy="send it again",
            ) from error

    @property
    def is_lost(self) -> bool:
        """Whether this gateway can no longer learn the answer, so the call must be made again."""
        if self.handle is not None and self.handle.is_lost:
            return True
        return self.task.done() and isinstance(self.task.result(), Lost)

    async def answer(self) -> Answer:
        """Wait for the answer. Raises: Lost: this gateway cannot learn it."""
        answer = await asyncio.shield(self.task)
        if isinstance(answer, Lost):
            raise answer
        return answer

    async def queue(self) -> tuple[str, str]:
        """Return the call's state in the SDK's words, and the scheduler's reason why it waits."""
        if self.handle is None:
            return PAUSED, "waits for a place on the mesh"
        try:
            explanation = await self.handle.explain()
        except PhaseloomError as error:
            return PAUSED, str(error)
        return ACTIVE if explanation.state == _PERMITTED else PAUSED, reason(explanation)


def reason(explanation: Explanation) -> str:
    """Format an explanation as one sentence, with the predicted start."""
    waits = [f"waits for {cause}" for cause in explanation.waits_for]
    place = f"place {explanation.place} on its device" if explanation.place else ""
    start = (
        f"starts in about {explanation.predicted_start_s:.1f} s"
        if explanation.predicted_start_s >= 0
        else ""
    )
    return "; ".join(filter(None, (explanation.state, *waits, place, start, explanation.why)))


class Futures:
    """A tenant's promises. Above `_MAX_KEPT`, or `_MAX_KEPT_BYTES`, the oldest finished ones are
    forgotten."""

    def __init__(self) -> None:
        self._promises: dict[str, Promise] = {}
        self._num_bytes = 0

    def find(self, name: str) -> Promise | None:
        """Return the promise with this name, or None if there is none or it is lost."""
        promise = self._promises.get(name)
        return None if promise is None or promise.is_lost else promise

    def promise(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, Answer]],
        handle: OperationHandle[Any] | None = None,
    ) -> Promise:
        """Return the promise with this name. If there is none, or it is lost, start the work.

        Args: work: produces the answer.
              handle: the operation that the answer comes from.
        Raises: ResourceError: RESOURCE_EXHAUSTED: too many promises are open.
        """
        promise = self.find(name)
        if promise is None:
            self._forget()
            if len(self._promises) >= _MAX_KEPT:
                raise ResourceError(
                    f"at most {_MAX_KEPT} calls may be open at once",
                    code=Code.RESOURCE_EXHAUSTED,
                    remedy="retrieve the answers of some calls first",
                )
            promise = self._promises[name] = Promise(asyncio.create_task(_answer(work)), handle)
            promise.task.add_done_callback(self._count)
        return promise

    def _count(self, task: asyncio.Task[Answer | Lost]) -> None:
        self._num_bytes += _num_bytes(task)
        self._forget()

    def _forget(self) -> None:
        """Forget the oldest finished promises while there are too many."""
        for name, promise in [*self._promises.items()]:
            if len(self._promises) < _MAX_KEPT and self._num_bytes <= _MAX_KEPT_BYTES:
                return
            if promise.task.done():
                self._num_bytes -= _num_bytes(promise.task)
                del self._promises[name]


def _num_bytes(task: asyncio.Task[Answer | Lost]) -> int:
    answer = None if task.cancelled() else task.result()
    return len(answer) if isinstance(answer, bytes) else 0


async def _answer(work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer | Lost:
    """Run the work and return its answer, with errors in the form that the SDK reads.

    `Lost` is returned instead of raised, because nobody may be awaiting the promise.
    """
    try:
        return await work()
    except Lost as error:
        return error
    except PhaseloomError as error:
        return failed(error)
    except nats.errors.Error as error:
        return Lost(f"the mesh gives no answer: {error!r}", remedy="ask again")
    except Exception:
        log.exception("a promise failed")
        return {"error": "the gateway failed; its log says why", "category": "server"}


def failed(error: PhaseloomError) -> dict[str, Any]:
    is_callers = isinstance(error, CallerError) or error.info.code is Code.RESOURCE_EXHAUSTED
    category = "user" if is_callers else "server"
    return {"error": str(error), "category": category}
