"""The base class of messages, and their encodings: JSON or MessagePack, by `Content-Type`."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from phaseloom.common.contract.errors import CallerError

JSON = "application/json"
MSGPACK = "application/msgpack"
CONTENT_TYPE = "Content-Type"

T = TypeVar("T")


def snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class Message(msgspec.Struct, frozen=True, tag=snake_case, tag_field="type", omit_defaults=True):
    """Base of every message that is part of a tagged union on the wire."""


def _number(value: Any) -> int | float:
    """Convert a scalar of another library, such as a numpy scalar or a zero-dimensional tensor.

    Raises: TypeError: the value is not a scalar number.
    """
    # An array with one element would convert silently.
    if getattr(value, "ndim", 0):
        raise TypeError(f"expected a scalar number, got {type(value).__name__}")
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


_json_encoder = msgspec.json.Encoder(enc_hook=_number)
_msgpack_encoder = msgspec.msgpack.Encoder(enc_hook=_number)


@lru_cache(maxsize=256)
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    # Cached: building a decoder of `Event` takes fifty times as long as decoding a message.
    return msgspec.json.Decoder(kind)


@lru_cache(maxsize=256)
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def content_type_of(headers: Mapping[str, str] | None) -> str:
    """Return the value of the `Content-Type` header, or JSON if the header is missing."""
    return (headers or {}).get(CONTENT_TYPE, JSON)


def encode(message: object, content_type: str = MSGPACK) -> bytes:
    """Encode a message.

    Raises: CallerError: a number has more than 64 bits, or a value has a type that messages cannot
            hold.
    """
    encoder = _json_encoder if content_type == JSON else _msgpack_encoder
    try:
        return encoder.encode(message)
    except OverflowError as error:
        raise CallerError(
            f"a number has more than 64 bits: {error}", remedy="use smaller numbers"
        ) from None
    except (TypeError, ValueError) as error:
        raise CallerError(
            f"a message cannot hold this value: {error}",
            remedy="use numbers, text, bytes, lists and dicts, and the messages of the contract",
        ) from None


def decode(payload: bytes, kind: Any, content_type: str = MSGPACK, *, field: str = "") -> Any:
    """Decode and validate a message.

    Args:   kind: the expected type or union.
            field: prefix of the field path in an error.
    Raises: CallerError: the payload does not have that type; the error names the field.
    """
    try:
        if content_type == JSON:
            return _json_decoder(kind).decode(payload)
        if content_type == MSGPACK:
            return _msgpack_decoder(kind).decode(payload)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        raise CallerError(
            text,
            field=(field + path.rstrip("`").removeprefix("$")).removeprefix("."),
            remedy="see the message contract",
        ) from None
    except RecursionError:
        raise CallerError(
            "the payload is nested too deeply", field=field, remedy="see the message contract"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallerError(
            f"the payload is not valid {content_type}: {error}",
            field=field,
            remedy=f"set the {CONTENT_TYPE} header to the payload's encoding: {JSON} or {MSGPACK}",
        ) from None
    raise CallerError(
        f"unknown content type {content_type!r}",
        field=f"headers.{CONTENT_TYPE}",
        remedy=f"use {JSON} or {MSGPACK}",
    )


MAX_CONTAINERS = 20_000
"""Maximum lists and objects of an API request. A model's config has some hundreds."""


def check_containers(payload: bytes, content_type: str) -> None:
    """Check that a message that may hold any values has few lists and objects.

    They take up to 50 times as much memory and time to decode as text of the same size.

    Raises: CallerError: there are too many, or the payload cannot be decoded.
    """
    num = 0
    open_values: list[list[Any] | dict[Any, Any]] = [[decode(payload, Any, content_type)]]
    while open_values:
        value = open_values.pop()
        num += 1
        values = value.values() if isinstance(value, dict) else value
        open_values += (v for v in values if isinstance(v, dict | list))
    if num > MAX_CONTAINERS:
        raise CallerError(
            f"a request may have at most {MAX_CONTAINERS} lists and objects, got {num}",
            remedy="send a smaller request",
        )
