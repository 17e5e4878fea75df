"""Who brings which block of a weights version over a slow link: each block once.

The daemon that has a version deals its blocks out to the fetches of one *group*: those of the
nodes of one other site, or one fetch alone. Whoever is given a block gets it from here and serves
it to the rest of the group, which learn of it by the news. A block is given again only after the
one that was to bring it has failed. The fastest brings the most; who comes late finds all there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_BLOCK_BYTES = 4 * 1024 * 1024
_SMALL_BYTES = 64 * 1024
_MIN_BLOCKS = 64


class Fetcher(NamedTuple):
    """One fetch of one daemon."""

    endpoint: str
    """Where it serves what it gets."""
    session: str


@dataclass
class Deal:
    """The blocks of one version for one group."""

    num_blocks: int
    _given: list[Fetcher | None] = field(init=False)
    _news: list[int] = field(default_factory=list)
    """Blocks in the order in which they were given; given again, they stand here again."""
    _next: int = 0

    def __post_init__(self) -> None:
        self._given = [None] * self.num_blocks

    def take(self, fetcher: Fetcher) -> int | None:
        """A block that nobody was given yet, for this one to bring; None: there is none left."""
        while self._next < self.num_blocks and self._given[self._next] is not None:
            self._next += 1
        if self._next == self.num_blocks:
            return None
        self._give(self._next, fetcher)
        return self._next

    def again(self, block: int, failed: str, fetcher: Fetcher) -> str | None:
        """This one could not get a block from the endpoint that was to have it.

        Returns: the endpoint that is to have it by now; None: this one brings it itself.
        """
        holder = self._given[block]
        if holder is not None and holder.endpoint not in {failed, fetcher.endpoint}:
            return holder.endpoint
        self._give(block, fetcher)
        return None

    def news(self, seen: int, fetcher: Fetcher) -> tuple[int, list[tuple[int, str]]]:
        """(how many there are, blocks that other fetches were given since `seen` of them)."""
        since = [(block, self._given[block]) for block in self._news[seen:]]
        told = [(b, holder.endpoint) for b, holder in since if holder and holder != fetcher]
        return len(self._news), told

    def _give(self, block: int, fetcher: Fetcher) -> None:
        self._given[block] = fetcher
        self._news.append(block)


@dataclass(frozen=True)
class Blocks:
    """How a version is cut for a transfer; both ends reckon it from the size alone."""

    num_bytes: int

    @property
    def size(self) -> int:
        """Small enough that several streams and nodes have something to do."""
        wanted = -(-self.num_bytes // _MIN_BLOCKS)
        steps = -(-wanted // _SMALL_BYTES)
        return min(_BLOCK_BYTES, max(1, steps) * _SMALL_BYTES)

    @property
    def count(self) -> int:
        return -(-self.num_bytes // self.size)

    def span(self, block: int) -> slice:
        return slice(block * self.size, min(self.num_bytes, (block + 1) * self.size))
