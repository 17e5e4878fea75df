"""Who watches a `generate`: what it was told, what it cancels or stops, and what joins it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from phaseloom.common.contract.operations import DrawnTokens, Generate, GenerateResult
from phaseloom.worker.backends.base import AdapterVersion


class Looker:
    """A `Watch` that cancels or stops a request once so many of its tokens are done, or stops all
    once so few of their samples are open, and has others join once request 0 has so many tokens; by
    default none. New tokens are wanted every `tell_every`-th time that it is asked.
    `adapters` are what requests are generated with in place of the deployment's own weights."""

    def __init__(
        self,
        cancel_at: Mapping[int, int] | None = None,
        *,
        stop_at: Mapping[int, int] | None = None,
        stop_once_open: int = -1,
        join_at: Mapping[int, Sequence[Generate]] | None = None,
        tell_every: int = 1,
        adapters: Mapping[int, AdapterVersion] | None = None,
    ) -> None:
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self.open: dict[int, list[int]] = {}
        """By request: how many of its samples were open, whenever some had ended."""
        self.asked: set[int] = set()
        self.results: dict[int, GenerateResult | None] = {}
        """In the order in which they ended."""
        self.told: dict[int, list[DrawnTokens]] = {}
        """By request: what was told of those with `stream` while they ran."""
        self._tell_every = tell_every
        self._num_asked: Counter[int] = Counter()
        self._cancel_at = cancel_at or {}
        self._stop_at = stop_at or {}
        self._stop_once_open = stop_once_open
        self._join_at = dict(join_at or {})
        self._adapters = adapters or {}

    @property
    def ordered(self) -> list[GenerateResult | None]:
        """The results by the requests' places."""
        return [self.results[i] for i in sorted(self.results)]

    def joined(self) -> Sequence[Generate]:
        due = [at for at in self._join_at if self._done(0) >= at]
        return [args for at in due for args in self._join_at.pop(at)]

    def adapter(self, i: int) -> AdapterVersion | None:
        return self._adapters.get(i)

    def is_cancelled(self, i: int) -> bool:
        self.asked.add(i)
        return i in self._cancel_at and self._done(i) >= self._cancel_at[i]

    def is_stopped(self, i: int) -> bool:
        if i in self.open and self.open[i][-1] <= self._stop_once_open:
            return True
        return i in self._stop_at and self._done(i) >= self._stop_at[i]

    def stepped(self, tokens: int) -> None:
        pass

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        self.seen.setdefault(i, []).append((num_done, num_total))

    def wants_tokens(self, i: int) -> bool:
        self._num_asked[i] += 1
        return self._num_asked[i] % self._tell_every == 0

    def drawn(self, i: int, tokens: Sequence[DrawnTokens]) -> None:
        self.told.setdefault(i, []).extend(tokens)

    def still_open(self, i: int, num_samples: int) -> None:
        self.open.setdefault(i, []).append(num_samples)

    def ended(self, i: int, result: GenerateResult | None) -> None:
        assert i not in self.results
        self.results[i] = result

    def _done(self, i: int) -> int:
        return self.seen[i][-1][0] if i in self.seen else 0
