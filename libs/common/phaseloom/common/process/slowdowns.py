"""Tables of slowdowns: the file, and what is said while one is measured.

`phaseloom measure-slowdown` starts two processes of the worker and tells them what to run; of their
times it makes a table. The scheduler decides by such a table what is worth running side by side on
one device, and the simulator's study of sharing in space takes one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from phaseloom.common.contract.errors import CallerError, ErrorInfo
from phaseloom.common.contract.specs import SlowdownTable

SUB_STAGES = ("decode_small", "decode_large", "prefill", "reference", "train")
"""The kinds that a measured table has: decoding of few rows, and of many; prefilling; the
log-probabilities of a reference; training."""


class Run(msgspec.Struct, frozen=True):
    """measure-slowdown → worker: do one kind of work until a time."""

    kind: str
    """A kind of sub-stage, one of `SUB_STAGES`."""
    units: list[int]
    """The units of the device that it may use."""
    from_s: float
    until_s: float
    """Unix times: what begins after the one and ends before the other counts."""


class Ran(msgspec.Struct, frozen=True):
    """worker → measure-slowdown. Answer to `Run`, and the first line, once it can work."""

    seconds: float = 0.0
    """The mean time of a call."""
    calls: int = 0
    """How many calls counted; 0: none was short enough, and `seconds` is that of the last one."""
    refused: ErrorInfo | None = None
    """In the first line alone: why the model cannot be run."""


class _File(SlowdownTable, frozen=True, forbid_unknown_fields=True):
    """A table that people have written: what stands there has a meaning, or is a slip."""


def read(path: Path, needed: Iterable[str] = ()) -> SlowdownTable:
    """Read a table of slowdowns from a file.

    Args:   needed: the kinds that the table must have.
    Raises: CallerError: the file cannot be read, or holds no such table.
    """
    try:
        table = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise _refused(path, str(error)) from None
    for name, kind in table.kinds.items():
        if not kind.shares or min(*kind.shares, *kind.shares.values()) <= 0:
            raise _refused(path, f"kinds.{name}.shares: shares and slowdowns are positive")
    if any(factor <= 0 for row in table.beside.values() for factor in row.values()):
        raise _refused(path, "beside: factors are positive")
    if any(name not in table.kinds for name in table.beside):
        raise _refused(path, "beside: a kind that is not among the kinds")
    lacking = [kind for kind in needed if kind not in table.kinds]
    if lacking:
        raise _refused(path, f"kinds: it lacks {', '.join(lacking)}")
    return SlowdownTable(*msgspec.structs.astuple(table))


def _refused(path: Path, why: str) -> CallerError:
    return CallerError(
        f"{path.name} is no table of slowdowns: {why}",
        field="slowdowns",
        remedy="measure one with `phaseloom measure-slowdown`",
    )
