"""Results as a controller gets them: the parts of a split operation merged, arrays as lists."""

from __future__ import annotations

from typing import TypeVar

from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.kinds import KINDS
from phaseloom.common.contract.operations import Result, result_kind

R = TypeVar("R", bound=Result)


def merged(parts: list[Result], expected: type[R]) -> R:
    """The result of an operation from those of the parts that it travelled in, in their order.

    Raises: InternalError: a part has the result of another kind.
    """
    same: list[R] = [part for part in parts if isinstance(part, expected)]
    if len(same) != len(parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise InternalError(f"{names} came where {expected.__name__} was due")
    kind = KINDS[result_kind(same[0])]
    if len(same) == 1:
        whole: R = kind.as_lists(same[0])
        return whole
    assert kind.merge is not None, f"{kind.name} is never split"
    whole = kind.as_lists(kind.merge(same))
    return whole
