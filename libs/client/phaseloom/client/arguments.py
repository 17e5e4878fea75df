"""Checks argument types of public functions when a controller calls them.

Without the check, a dict passed as `SamplingParams` would fail as an AttributeError inside the
library, and a misspelt key would silently become a default on the mesh. `@checked` reads the
annotations of the function, so a new function needs nothing else.

The items of an Iterable are not checked, because it may yield them only once. List elements and
dict values are not checked either: the mesh validates them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from phaseloom.common.contract.errors import CallerError

P = ParamSpec("P")
R = TypeVar("R")

_BYTES = (bytes, bytearray, memoryview)
_NUMBERS: dict[Any, str] = {int: "__index__", float: "__float__"}
"""The method that converts a value to the type. Checking for it also accepts numpy and torch
scalars."""
_ACCEPTED_TYPES: dict[Any, Any] = {bytes: _BYTES, dict: Mapping}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it checks its arguments against its annotations.

    A call with a wrong type raises a CallerError that names the argument, before the function runs.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        # Resolved at the first call: a method may name classes that its module defines later.
        return get_type_hints(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints():
                check_type(value, hints()[name], name)
        return function(*args, **kwargs)

    return call


def check_type(value: object, hint: Any, field: str) -> None:
    """Check a value against a type and, if it is a message, its fields too.

    Raises: CallerError: the value has another type; the error names the field.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    matches = [kind for kind in kinds if _matches(value, kind)]
    if not matches:
        actual, expected = type(value).__name__, " or ".join(map(_type_name, kinds))
        raise CallerError(
            f"expected {expected}, got {actual}", field=field, remedy=f"pass {expected}"
        )
    if isinstance(value, msgspec.Struct):
        for name, inner in _fields(type(value)).items():
            check_type(getattr(value, name), inner, f"{field}.{name}")


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__struct_fields__}


def _matches(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind is Any or isinstance(kind, TypeVar) or (kind is Literal and value in get_args(hint)):
        return True
    if isinstance(value, bool) or kind is Literal:
        return kind is bool
    if kind in _NUMBERS:
        return hasattr(value, _NUMBERS[kind]) and not getattr(value, "ndim", 0)
    if issubclass(kind, StrEnum):
        return isinstance(value, str) and value in list(kind)
    if kind in (list, tuple, Iterable, Collection):
        container = Iterable if kind is Iterable else Collection
        return isinstance(value, container) and not isinstance(value, (str, *_BYTES))
    return isinstance(value, _ACCEPTED_TYPES.get(kind, kind))


def _type_name(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (None, NoneType):
        return "None"
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if issubclass(kind, StrEnum):
        return " or ".join(map(repr, map(str, kind)))
    if kind in (list, tuple, Iterable, Collection) and inner:
        elements = get_args(inner[0]) if get_origin(inner[0]) in (Union, UnionType) else inner[:1]
        return f"a list of {' or '.join(map(_type_name, elements))}"
    if issubclass(kind, Mapping):
        return "dict"
    return str(kind.__name__)
