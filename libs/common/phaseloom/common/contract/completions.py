"""Reads completions on event loops that do not need their results."""

from __future__ import annotations

import msgspec

from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.operations import Completion, Outcome

_LARGE_BYTES = 32 * 1024


class _Ended(msgspec.Struct, frozen=True):
    id: str
    outcome: Outcome
    error: ErrorInfo | None = None


def decode_outcome(payload: bytes, content_type: str) -> Completion:
    """Decode a stored completion, without its result if that is large.

    The results that services read, such as those of `save_state`, are small.
    """
    if len(payload) <= _LARGE_BYTES:
        completion: Completion = decode(payload, Completion, content_type)
        return completion
    ended: _Ended = decode(payload, _Ended, content_type)
    return Completion(ended.id, ended.outcome, error=ended.error)
