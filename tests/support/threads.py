"""Threads that are late, as on a busy machine: pools for `loop.set_default_executor`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Remembering(ThreadPoolExecutor):
    """They forget late what they were given: the one that asked may go on before."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[object] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given.append((fn, args, kwargs))
        return super().submit(fn, *args, **kwargs)


class FirstIsLate(ThreadPoolExecutor):
    """What is asked first begins only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = threading.Event()
        self._is_first = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        is_first, self._is_first = self._is_first, False

        def late() -> Any:
            self.may_begin.wait()
            return fn(*args, **kwargs)

        return super().submit(late) if is_first else super().submit(fn, *args, **kwargs)
