"""Conversion of token and log-probability arrays between their wire forms, without numpy."""

from __future__ import annotations

import sys
from array import array

Int32s = list[int] | bytes
"""Token ids: a list, or their little-endian bytes."""
Float32s = list[float] | bytes
"""Numbers: a list, or their little-endian bytes."""


def _little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def pack_int32s(values: list[int]) -> bytes:
    return _little_endian(array("i", values))


def pack_float32s(values: list[float]) -> bytes:
    return _little_endian(array("f", values))


def int32s(values: Int32s) -> list[int]:
    """Return the integers as a list.

    Raises: ValueError: the number of bytes is not a multiple of 4.
    """
    if isinstance(values, list):
        return values
    unpacked = array("i")
    _fill(unpacked, values)
    return unpacked.tolist()


def float32s(values: Float32s) -> list[float]:
    """Return the numbers as a list.

    Raises: ValueError: the number of bytes is not a multiple of 4.
    """
    if isinstance(values, list):
        return values
    unpacked = array("f")
    _fill(unpacked, values)
    return unpacked.tolist()


def length(values: Int32s | Float32s) -> int:
    return len(values) if isinstance(values, list) else len(values) // 4


def _fill(target: array[int] | array[float], data: bytes) -> None:
    target.frombytes(data)
    if sys.byteorder == "big":
        target.byteswap()
