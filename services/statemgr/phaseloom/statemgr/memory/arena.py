"""Host memory of one node as a budget: extents handed out, and idle ones kept for reuse.

Invariant: the bytes of all extents, idle ones included, never exceed the budget.

Idle extents are kept because the first touch of fresh memory costs ten times a copy into touched
memory; they are given up, oldest first, before anything is refused. An extent is only ever reused
within its pool, so that no deployment is handed memory that another one may still have mapped. A
vacated extent keeps its number and its mappings, but has no memory until it is occupied again. An
extent with several holders is counted once, and stays until the last holder gives it up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseloom.common.contract.errors import Code, ResourceError

PAGE_BYTES = 4096
MAX_IDLE_PER_POOL = 2
"""Idle extents kept in one pool; older ones are given up."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a reservation: an extent, and what the shell has to do for it."""

    extent: int
    is_new: bool
    """Whether the shell has to make the extent's memory; False: it is an idle one of the pool."""
    evicted: list[int]
    """Idle extents given up for this one: the shell frees their memory first."""


def rounded(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages, in bytes; at least one page."""
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES


@dataclass(slots=True)
class Arena:
    """The record of all extents; the memory itself is in `HostMemory`."""

    budget_bytes: int
    used_bytes: int = 0
    """Bytes of all extents that have memory, idle ones included."""
    _last: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _idle: dict[int, str] = field(default_factory=dict)
    """extent → pool, oldest first"""
    _vacated: set[int] = field(default_factory=set)
    _more_holders: dict[int, int] = field(default_factory=dict)
    """extent → holders beside the first"""

    def reserve(self, num_bytes: int, what: str, pool: str = "") -> Grant:
        """Reserve an extent of at least `num_bytes`.

        Args:   what: the name of the memory in a refusal.
                pool: an idle extent of this pool is reused where one of the size is there.
        Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers; nothing has changed then.
        """
        size = rounded(num_bytes)
        for extent, owner in self._idle.items():
            if pool and owner == pool and self._sizes[extent] == size:
                del self._idle[extent]
                return Grant(extent, is_new=False, evicted=[])
        evicted = self._make_room(size, what)
        self._last += 1
        self._sizes[self._last] = size
        self.used_bytes += size
        return Grant(self._last, is_new=True, evicted=evicted)

    def vacate(self, extent: int) -> None:
        """Count the memory of an extent as free; its content is elsewhere."""
        assert extent not in self._idle
        assert extent not in self._vacated
        self._vacated.add(extent)
        self.used_bytes -= self._sizes[extent]

    def occupy(self, extent: int, what: str) -> list[int]:
        """Take memory for a vacated extent again; returns the idle extents given up for it.

        Raises: ResourceError: RESOURCE_EXHAUSTED, with the numbers; nothing has changed then.
        """
        evicted = self._make_room(self._sizes[extent], what)
        self._vacated.remove(extent)
        self.used_bytes += self._sizes[extent]
        return evicted

    def take_over(self, extent: int, num_bytes: int, *, is_vacated: bool = False) -> None:
        """Record an extent of the daemon before under its number.

        Raises: ResourceError: RESOURCE_EXHAUSTED: it does not fit the budget.
        """
        size = rounded(num_bytes)
        assert extent not in self._sizes
        if is_vacated:
            self._last = max(self._last, extent)
            self._sizes[extent] = size
            self._vacated.add(extent)
            return
        if self.used_bytes + size > self.budget_bytes:
            raise ResourceError(
                f"extent {extent} of {size} bytes: {self.used_bytes} of {self.budget_bytes} are "
                f"in use",
                code=Code.RESOURCE_EXHAUSTED,
            )
        self._last = max(self._last, extent)
        self._sizes[extent] = size
        self.used_bytes += size

    def hold(self, extent: int) -> None:
        """Count one more holder: so many `drop_holder` come before the extent is freed."""
        assert extent in self._sizes
        assert extent not in self._idle
        self._more_holders[extent] = self._more_holders.get(extent, 0) + 1

    def drop_holder(self, extent: int) -> bool:
        """Count one holder less, unless it is the last one.

        Returns: whether others still hold the extent; False: the caller frees or parks it.
        """
        others = self._more_holders.pop(extent, 0)
        if others > 1:
            self._more_holders[extent] = others - 1
        return others > 0

    def num_holders(self, extent: int) -> int:
        return 1 + self._more_holders.get(extent, 0)

    def size_of(self, extent: int) -> int:
        """The size of an extent in bytes, whole pages."""
        return self._sizes[extent]

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that can be had at once, those of idle extents included."""
        idle_bytes = sum(self._sizes[extent] for extent in self._idle)
        return self.budget_bytes - self.used_bytes + idle_bytes

    def _make_room(self, size: int, what: str) -> list[int]:
        """Give up idle extents until `size` bytes are free; returns them."""
        idle_bytes = sum(self._sizes[extent] for extent in self._idle)
        if self.used_bytes - idle_bytes + size > self.budget_bytes:
            raise ResourceError(
                f"{what} needs {size} bytes of host memory: {self.used_bytes - idle_bytes} of "
                f"{self.budget_bytes} are in use",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="raise the node's host memory budget, or finish jobs that use it",
                details={
                    "needed_bytes": str(size),
                    "used_bytes": str(self.used_bytes - idle_bytes),
                    "budget_bytes": str(self.budget_bytes),
                },
            )
        evicted = []
        while self.used_bytes + size > self.budget_bytes:
            oldest = next(iter(self._idle))
            evicted.append(self.free(oldest))
        return evicted

    def free(self, extent: int) -> int:
        """Give an extent up; returns it."""
        assert extent not in self._more_holders
        size = self._sizes.pop(extent)
        if extent in self._vacated:
            self._vacated.remove(extent)
        else:
            self.used_bytes -= size
        self._idle.pop(extent, None)
        return extent

    def park(self, extent: int, pool: str) -> list[int]:
        """Keep an extent for reuse in `pool`; returns the extents that were given up for it."""
        assert extent in self._sizes
        assert extent not in self._idle
        self._idle[extent] = pool
        same = [e for e, owner in self._idle.items() if owner == pool]
        return [self.free(e) for e in same[:-MAX_IDLE_PER_POOL]]

    def drop_pool(self, pool: str) -> list[int]:
        """Give up all idle extents of `pool`, which may no longer be reused; returns them."""
        return [self.free(e) for e in [e for e, owner in self._idle.items() if owner == pool]]

    def pools(self) -> set[str]:
        """The pools that have an idle extent."""
        return set(self._idle.values())

    def extents_in_use(self) -> set[int]:
        """The extents that have a holder, vacated ones included; idle ones have none."""
        return self._sizes.keys() - self._idle.keys()

    def validate(self) -> None:
        """Raises: AssertionError: an invariant does not hold."""
        held = self._sizes.keys() - self._vacated
        assert self.used_bytes == sum(self._sizes[extent] for extent in held)
        assert self._vacated <= self._sizes.keys() - self._idle.keys()
        assert 0 <= self.used_bytes <= self.budget_bytes
        assert self._idle.keys() <= self._sizes.keys()
        assert self._more_holders.keys() <= self.extents_in_use() - self._vacated
        assert all(number > 0 for number in self._more_holders.values())
