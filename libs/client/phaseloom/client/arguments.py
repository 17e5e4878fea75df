"""The types of the arguments of public functions, checked where a controller passes them.

Without the check a dict in place of a `SamplingParams` is an AttributeError somewhere in the
library, and one whose keys are misspelt is taken by the mesh for the defaults. The annotations of a
function are the rule, so that a new one needs nothing but `@checked`.

What an Iterable gives is left to the function, since it may give it only once, and so are the
elements of lists and the values of dicts: the mesh refuses those that are wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from phaseloom.common.contract.errors import CallerError

P = ParamSpec("P")
R = TypeVar("R")

_BYTES = (bytes, bytearray, memoryview)
_NUMBERS: dict[Any, str] = {int: "__index__", float: "__float__"}
"""The method that makes a number of it: those of numpy and torch are numbers, too."""
_ALIKE: dict[Any, Any] = {bytes: _BYTES, dict: Mapping}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator of functions that refuse arguments of other types than their annotations say.

    Such a call raises a CallerError that names the argument, before anything is done.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        # Only now: a method may name classes that come further down in its module.
        return get_type_hints(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints():
                check_type(value, hints()[name], name)
        return function(*args, **kwargs)

    return call


def check_type(value: object, hint: Any, field: str) -> None:
    """Check a value, and the fields of a message.

    Raises: CallerError: it is of another type; names the field.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    found = [kind for kind in kinds if _is(value, kind)]
    if not found:
        given, due = type(value).__name__, " or ".join(map(_named, kinds))
        raise CallerError(f"{given} where {due} is due", field=field, remedy=f"give {due}")
    if isinstance(value, msgspec.Struct):
        for name, inner in _fields(type(value)).items():
            check_type(getattr(value, name), inner, f"{field}.{name}")


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def _is(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if isinstance(value, bool):
        return kind is bool
    if kind in _NUMBERS:
        return hasattr(value, _NUMBERS[kind]) and not getattr(value, "ndim", 0)
    if issubclass(kind, StrEnum):
        return isinstance(value, str) and value in list(kind)
    if kind in (list, tuple, Iterable, Collection):
        many = Iterable if kind is Iterable else Collection
        return isinstance(value, many) and not isinstance(value, (str, *_BYTES))
    return isinstance(value, _ALIKE.get(kind, kind))


def _named(hint: Any) -> str:
    """A type as a message names it."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (None, NoneType):
        return "None"
    if issubclass(kind, StrEnum):
        return " or ".join(map(repr, map(str, kind)))
    if kind in (list, tuple, Iterable, Collection) and inner:
        each = get_args(inner[0]) if get_origin(inner[0]) in (Union, UnionType) else inner[:1]
        return f"a list of {' or '.join(map(_named, each))}"
    if issubclass(kind, Mapping):
        return "dict"
    return str(kind.__name__)
