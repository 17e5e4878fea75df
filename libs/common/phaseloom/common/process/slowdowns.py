"""Slowdown tables: the file format, and the messages exchanged while a table is measured.

`phaseloom measure-slowdown` starts two worker processes, tells them what to run, and makes a table
from their times. The scheduler uses the table to decide which operations to run side by side on a
device. The simulator's study of space sharing also reads one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, ErrorInfo
from phaseloom.common.contract.specs import SlowdownTable

SUB_STAGES = ("decode_small", "decode_large", "prefill", "reference", "train")
"""The kinds of a measured table: decoding few rows, decoding many rows, prefilling, computing the
log-probabilities of a reference, training."""


class MeasureRequest(msgspec.Struct, frozen=True):
    """measure-slowdown → worker: do one kind of work until a given time."""

    kind: str
    """A kind of sub-stage from `SUB_STAGES`."""
    units: list[int]
    """Compute units of the device that the work may use."""
    from_s: float
    until_s: float
    """Unix times. Only calls that start after `from_s` and end before `until_s` count."""


class MeasureResult(msgspec.Struct, frozen=True):
    """worker → measure-slowdown. The answer to `Run`, and also the first line, sent once the worker
    is ready."""

    seconds: float = 0.0
    """Mean duration of a call."""
    calls: int = 0
    """Number of calls that counted. 0: all calls were too long, and `seconds` is the duration of
    the last one."""
    refused: ErrorInfo | None = None
    """Why the model cannot run; only in the first line."""


class _TableFile(SlowdownTable, frozen=True, forbid_unknown_fields=True):
    """A table written by people. Unknown fields are errors, since they are probably typos."""


def read(path: Path, needed: Iterable[str] = ()) -> SlowdownTable:
    """Read a slowdown table from a file.

    Args:   needed: kinds that the table must have.
    Raises: CallerError: the file cannot be read or has no valid table.
    """
    try:
        table = msgspec.json.decode(path.read_bytes(), type=_TableFile)
    except (OSError, msgspec.DecodeError) as error:
        raise _invalid(path, str(error)) from None
    for name, kind in table.kinds.items():
        if not kind.shares or min(*kind.shares, *kind.shares.values()) <= 0:
            raise _invalid(path, f"kinds.{name}.shares: shares and slowdowns must be positive")
    if any(factor <= 0 for row in table.beside.values() for factor in row.values()):
        raise _invalid(path, "factors in `beside` must be positive")
    if any(name not in table.kinds for name in table.beside):
        raise _invalid(path, "`beside` has a kind that `kinds` lacks")
    missing = [kind for kind in needed if kind not in table.kinds]
    if missing:
        raise _invalid(path, f"`kinds` lacks {', '.join(missing)}")
    return SlowdownTable(*msgspec.structs.astuple(table))


def _invalid(path: Path, problem: str) -> CallerError:
    return CallerError(
        f"{path.name} is not a slowdown table: {problem}",
        field="slowdowns",
        remedy="measure one with `phaseloom measure-slowdown`",
    )
