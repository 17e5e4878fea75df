"""Who watches a `generate`: what it was told, and what it cancels."""

from __future__ import annotations


class Looker:
    """A `Watch` that cancels a request once so many of its tokens are done; by default none."""

    def __init__(self, cancel_at: dict[int, int] | None = None) -> None:
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self.asked: set[int] = set()
        self._cancel_at = cancel_at or {}

    def is_cancelled(self, i: int) -> bool:
        self.asked.add(i)
        done = self.seen[i][-1][0] if i in self.seen else 0
        return i in self._cancel_at and done >= self._cancel_at[i]

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        self.seen.setdefault(i, []).append((num_done, num_total))
