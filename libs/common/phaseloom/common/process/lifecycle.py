"""One life cycle for every service: start, serve, stop in bounded time.

A service's `main.py` is `lifecycle.run("router", serve)`. SIGTERM and SIGINT set the stop event
that is passed to `serve`, which must then return soon or raise `Stopped`. Any other exception ends
the process with exit code 1 and one log line, plus a traceback if the error is a bug in Phaseloom.
A `serve` that returns before the stop event is set is also an error, because the process would look
healthy and do nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import msgspec
import uvloop
from opentelemetry import trace

from phaseloom.common.contract.errors import CallerError, InternalError, PhaseloomError
from phaseloom.common.observability import metrics, telemetry
from phaseloom.common.process import config, diewithparent, heartbeat, watchdog

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
_CANCEL_AGAIN_S = 0.2
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 2**20
DIE_WITH_PARENT = f"{config.PREFIX}DIE_WITH_PARENT"

_log_name: ContextVar[str] = ContextVar("speaker")
"""The service name in log lines of this task or thread, instead of the process's."""

Serve = Callable[[asyncio.Event], Awaitable[None]]
T = TypeVar("T")


class Stopped(Exception):
    """A service was asked to stop before it served, for example while it was connecting."""


class LogFormat(StrEnum):
    JSON = "json"
    """One JSON object per line: time, level, service, logger, message, and the current trace."""
    TEXT = "text"
    AUTO = "auto"
    """`TEXT` if standard error is a terminal, otherwise `JSON`."""


class ProcessConfig(msgspec.Struct, frozen=True):
    """Settings of every process of the mesh, from the variables PHASELOOM_<FIELD>."""

    die_with_parent: int = 0
    """Pid of the parent to die with; 0: outlive it."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: LogFormat = LogFormat.AUTO
    """json, text or auto: text on a terminal, otherwise JSON."""


def run(service: str, serve: Serve) -> NoReturn:
    """Run a service until it is asked to stop, then end the process.

    Args:   service: the service's name in logs and spans.
            serve: the service. It must return soon after the event is set, and end everything it
                started.
    """
    sys.exit(_run(service, serve))


def die_with_parent() -> None:
    """Make this process die with its parent, if the parent requested it.

    Processes started by this one always die with it.
    """
    parent_pid = config.load(ProcessConfig, "").die_with_parent
    if parent_pid:
        diewithparent.arm(parent_pid)
    # Children inherit this process's pid as the parent to die with.
    config.set_for_children(DIE_WITH_PARENT, str(os.getpid()))


def return_large_blocks() -> None:
    """Make this process return each large block of memory to the system as soon as it is freed.

    By default the C library keeps freed blocks of up to 32 MiB once it has seen one, and payloads
    of different sizes then break its heap into pieces.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks repeatedly until they have ended.

    Cancelling once is not enough: on Python 3.11, a NATS request whose answer arrives at the moment
    of its cancellation swallows the cancellation.
    """
    pending: set[asyncio.Task[Any]] = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)


async def unless_stopped(stop: asyncio.Event, call: Coroutine[Any, Any, T]) -> T:
    """Await a call that may take long or never return, such as one that follows a stream.

    Raises: Stopped: the stop event was set first. The call has then been cancelled and has ended.
    """
    calling, stopping = asyncio.create_task(call), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((calling, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end((calling, stopping))
    if calling.cancelled():
        raise Stopped
    return calling.result()


def start_logging(service: str) -> None:
    """Log to standard error in the configured format.

    Raises: CallerError: the configuration is invalid.
    """
    process = config.load(ProcessConfig, "")
    log_to_stderr(service, process.log_level, process.log_format)


def log_as(service: str) -> None:
    """Log under another service name from now on, in this thread or in this task and tasks it
    starts."""
    _log_name.set(service)


def log_to_stderr(service: str, level: str, form: LogFormat = LogFormat.AUTO) -> None:
    """Log structured lines to standard error, each with the current trace.

    Raises: CallerError: the level is unknown.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_text = form is LogFormat.TEXT or (form is LogFormat.AUTO and sys.stderr.isatty())
    handler.setFormatter(TextLines(service) if is_text else JsonLines(service))
    root = logging.getLogger()
    root.handlers = [handler]
    try:
        root.setLevel(level.upper())
    except ValueError:
        raise CallerError(
            f"unknown log level {level!r}",
            field="PHASELOOM_LOG_LEVEL",
            remedy="use DEBUG, INFO, WARNING or ERROR",
        ) from None


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time (Unix seconds), level, service, message, trace."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "service": _log_name.get(self._service),
            "logger": record.name,
            "message": record.getMessage(),
            **_current_trace(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class TextLines(logging.Formatter):
    """Formats a record for people: time, level, service, message, trace; tracebacks follow."""

    def __init__(self, service: str) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(service)s: %(message)s")
        self._service = service

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.service = _log_name.get(self._service)
        trace_id = _current_trace().get("trace_id")
        return super().formatMessage(record) + (f"  trace {trace_id}" if trace_id else "")


def _current_trace() -> dict[str, str]:
    current = trace.get_current_span().get_span_context()
    if not current.is_valid:
        return {}
    return {
        "trace_id": trace.format_trace_id(current.trace_id),
        "span_id": trace.format_span_id(current.span_id),
    }


def _run(service: str, serve: Serve) -> int:
    log_to_stderr(service, "INFO")
    try:
        start_logging(service)
        die_with_parent()
        settings = config.load(telemetry.TelemetryConfig, "telemetry")
        flush_telemetry = telemetry.setup(service, settings)
    except PhaseloomError as error:
        log.critical("%s cannot start: %s", service, error)
        return 1
    try:
        return uvloop.run(_serve(service, serve))
    finally:
        flush_telemetry()


async def _serve(service: str, serve: Serve) -> int:
    """Run `serve` with the stop signals and the metrics endpoint. Returns: the exit code."""
    stop = asyncio.Event()
    stop_signal = _StopSignal(service, stop)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_signal, number)
    started = time.monotonic()
    log.info("%s starts, pid %d", service, os.getpid())
    beating = asyncio.create_task(heartbeat.beat())
    try:
        measuring = config.load(metrics.MetricsConfig, "metrics")
        config.check_bounds(measuring, "metrics", {"port": (0, config.LAST_PORT)})
        async with metrics.endpoint(service, measuring):
            with suppress(Stopped), watchdog.watching(service):
                await serve(stop)
        if not stop.is_set():
            raise InternalError(f"{service} ended without being asked to stop")
    except Exception as error:
        _log_end(service, error)
        return 1
    finally:
        # Tasks left on the event loop, such as a reconnecting client, may outlast cancellation.
        stop_signal.bound()
        await end([beating])
    log.info("%s stopped after %.1f s", service, time.monotonic() - started)
    return 0


class _StopSignal:
    """Sets the stop event at the first signal, and limits the time that stopping may take.

    Later signals have no effect. A thread enforces the limit, so it also works if the event loop is
    blocked.
    """

    def __init__(self, service: str, stop: asyncio.Event) -> None:
        self._service = service
        self._stop = stop

    def __call__(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            return
        log.info("%s stops: %s", self._service, number.name)
        self._stop.set()
        self.bound()

    def bound(self) -> None:
        """Start the time limit: the process must end within `STOP_TIMEOUT_S`."""
        timer = threading.Timer(STOP_TIMEOUT_S, self._give_up)
        timer.daemon = True
        timer.start()

    def _give_up(self) -> None:
        log.critical("%s did not stop within %.0f s: exiting hard", self._service, STOP_TIMEOUT_S)
        sys.stderr.flush()
        os._exit(1)  # sys.exit would only end this thread


def _log_end(service: str, error: BaseException) -> None:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            _log_end(service, inner)
    elif isinstance(error, PhaseloomError) and not isinstance(error, InternalError):
        log.critical("%s ends: %s", service, error)
    else:
        log.critical("%s ends: %r", service, error, exc_info=error)
