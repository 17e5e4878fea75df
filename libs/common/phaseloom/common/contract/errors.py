"""Every error Phaseloom raises or sends, as one tree.

    PhaseloomError
    ├── CallerError        the request was wrong: change it and send again
    ├── ResourceError      something was lost, full or unreachable: retry or repair
    └── InternalError      a bug in Phaseloom: please report

On the bus an error is an `ErrorInfo`; `to_exception` and `PhaseloomError.info` convert.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Code(StrEnum):
    """The subset of gRPC's canonical status codes that Phaseloom uses."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    ABORTED = "ABORTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    INTERNAL = "INTERNAL"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The wire form of an error."""

    code: Code
    message: str
    field: str = ""
    """Path of the offending field, e.g. `args.batch[3].targets`; empty: no field is at fault."""
    remedy: str = ""
    details: dict[str, str] = {}


MAX_MESSAGE_CHARS = 2000
"""Longest error message, in characters. Messages may quote a caller's value or a library's error,
and errors are stored."""


def _shortened(message: str) -> str:
    num_omitted = len(message) - MAX_MESSAGE_CHARS
    return (
        message
        if num_omitted <= 0
        else f"{message[:MAX_MESSAGE_CHARS]} … and {num_omitted} more characters"
    )


class PhaseloomError(Exception):
    """Base of all errors raised by Phaseloom; `info` is its wire form."""

    default_code = Code.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        field: str = "",
        remedy: str = "",
        details: Mapping[str, object] | None = None,
    ) -> None:
        message = _shortened(message)
        detail_texts = {name: str(value) for name, value in (details or {}).items()}
        self.info = ErrorInfo(code or self.default_code, message, field, remedy, detail_texts)
        field_hint = f" (field {field})" if field else ""
        remedy_hint = f"; {remedy}" if remedy else ""
        super().__init__(f"{self.info.code}: {message}{field_hint}{remedy_hint}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error as its `ErrorInfo`, for the processes of the simulator."""
        return to_exception, (self.info,)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the same request may succeed; None: unknown."""
        try:
            return float(self.info.details["retry_after_s"])
        except (KeyError, ValueError):
            return None


class CallerError(PhaseloomError):
    """The request was wrong. The same request will fail again."""

    default_code = Code.INVALID_ARGUMENT


class ResourceError(PhaseloomError):
    """A resource was lost, full, fenced or unreachable. The request itself was fine."""

    default_code = Code.UNAVAILABLE


class InternalError(PhaseloomError):
    """A bug in Phaseloom."""

    default_code = Code.INTERNAL


_NO_MEMORY = "free memory on this machine, or give it less work; then try again"
_NO_DESCRIPTORS = "raise the limit of open files (ulimit -n), or close some; then try again"
_NO_SPACE = "free space on the disk, then try again"
_SHORTAGES = {
    errno.ENOMEM: _NO_MEMORY,
    errno.ENOBUFS: _NO_MEMORY,
    errno.EMFILE: _NO_DESCRIPTORS,
    errno.ENFILE: _NO_DESCRIPTORS,
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
}
"""Remedies for errors of the operating system that report a shortage, by number."""


shortages: deque[ErrorInfo] = deque(maxlen=1)
"""The newest shortage that `unexpected_error` has seen. The heartbeat takes and reports it."""


def unexpected_error(error: BaseException) -> ErrorInfo:
    """Wrap an unexpected exception as an error.

    A shortage of the machine is `RESOURCE_EXHAUSTED`. Anything else is a bug in Phaseloom:
    `INTERNAL`.
    """
    shortage = _SHORTAGES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    if isinstance(error, MemoryError):
        shortage = _NO_MEMORY
    if shortage:
        text = _shortened(f"{type(error).__name__}: {error}")
        info = ErrorInfo(Code.RESOURCE_EXHAUSTED, text, remedy=shortage)
        shortages.append(info)
        return info
    return ErrorInfo(Code.INTERNAL, _shortened(f"{type(error).__name__}: {error}"))


def session_superseded(session: int, newest: int) -> ErrorInfo:
    """The error for an operation whose session was ended by a newer session."""
    return ErrorInfo(
        Code.ABORTED,
        f"session {session} has ended, because session {newest} is attached",
        field="session",
        remedy="attach again",
    )


# All other codes but INTERNAL are a ResourceError.
_CALLER_CODES = {
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.FAILED_PRECONDITION,
    Code.PERMISSION_DENIED,
}


def to_exception(info: ErrorInfo) -> PhaseloomError:
    """Return the exception for an `ErrorInfo` received from the bus."""
    kind: type[PhaseloomError]
    if info.code in _CALLER_CODES:
        kind = CallerError
    elif info.code is Code.INTERNAL:
        kind = InternalError
    else:
        kind = ResourceError
    return kind(
        info.message,
        code=info.code,
        field=info.field,
        remedy=info.remedy,
        details=dict(info.details),
    )
