"""The text of a sample, given in parts while its tokens are drawn.

The parts joined are the text of all tokens. Text is held back in two cases, until more tokens come:
where the last character lacks some of its bytes, and where the end may be the beginning of a stop
string. A stop string, and all that follows it, is never given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
"""The character that a tokenizer writes for bytes that are no character, or not yet a whole one."""


class TextParts:
    """The text of one sample, as far as it is certain; a new part comes with each `take`."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        """Args: decode: makes text of tokens. stops: the stop strings; empty ones do not count."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._space_before: list[int] = []
        """The newest tokens whose text was given. They are decoded again with the next ones,
        because the text of a token depends on those before it: a space, for one."""
        self._open: list[int] = []
        """The tokens after `_told`, whose text was not given yet."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._is_stopped = False

    def take(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """The text that has become certain with these tokens. Args: is_last: whether no more tokens
        come."""
        if self._is_stopped:
            return ""
        self._open += tokens
        before = self._decode(self._space_before)
        text = self._decode([*self._space_before, *self._open])
        if is_last or not text.endswith(_BROKEN):
            new = text[len(before) :]
            # A token without text, as a special one, says nothing of the space behind it.
            self._space_before, self._open = (
                self._open if new else self._space_before + self._open,
                [],
            )
            self._held += new
        return self._release(is_last)

    def _release(self, is_last: bool) -> str:
        matches = [at for at in map(self._held.find, self._stops) if at >= 0]
        if matches:
            self._is_stopped = True
            return self._held[: min(matches)]
        num_held = (
            0 if is_last else max((_begun(self._held, stop) for stop in self._stops), default=0)
        )
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return text


def _begun(text: str, stop: str) -> int:
    """The length of the longest end of the text with which the stop string begins; 0: there is
    none."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
