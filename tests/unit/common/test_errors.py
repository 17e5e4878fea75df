"""Errors as they travel: bounded, whatever words they are made from."""

from __future__ import annotations

import pickle

from phaseloom.common.contract.errors import (
    MAX_MESSAGE_CHARS,
    CallerError,
    Code,
    InternalError,
    to_exception,
    unexpected_error,
)


def test_message_is_bounded_and_says_how_much_is_left_out() -> None:
    rest = 12_345
    error = CallerError("x" * (MAX_MESSAGE_CHARS + rest), field="args")
    assert error.info.message.startswith("x" * MAX_MESSAGE_CHARS)
    assert error.info.message.endswith(f"… and {rest} more characters")
    assert len(str(error)) < MAX_MESSAGE_CHARS + 100


def test_error_of_another_process_is_the_same_error() -> None:
    """Its text was taken for the message: `INVALID_ARGUMENT: INVALID_ARGUMENT: …`."""
    error = CallerError("too much", field="a", remedy="give less", details={"limit": 3})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CallerError
    assert again.info == error.info
    assert str(again) == str(error)


def test_message_that_fits_is_left_alone() -> None:
    message = "x" * MAX_MESSAGE_CHARS
    assert CallerError(message).info.message == message


def test_exception_of_another_library_becomes_an_internal_error_with_a_bounded_message() -> None:
    info = unexpected_error(ValueError("y" * 10**6))
    assert info.code is Code.INTERNAL
    assert info.message.startswith("ValueError: yyy")
    assert len(info.message) < MAX_MESSAGE_CHARS + 100
    assert isinstance(to_exception(info), InternalError)
