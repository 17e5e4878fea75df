"""Host memory: one memfd per extent, mapped once and kept, under one budget.

Sizes are sealed, so that no rank can shrink memory that this daemon has mapped: reading it would be
a SIGBUS. Readers get a descriptor that was opened read-only. Memory that several jobs may read is
also sealed against writing through any descriptor. The mappings count as shared memory of this
process, not as anonymous memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import Counter
from collections.abc import Iterable

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.tensors.hugepages import map_file, map_file_at
from phaseloom.statemgr.records.layouts import exhausted, rounded

MAX_IDLE_PER_POOL = 2
"""Idle extents to keep per pool; the oldest ones are released."""
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAX_NAME = 200
"""Longest memfd name; the kernel accepts 249 bytes. Names are only shown in /proc."""


class Extent:
    """The memory of one extent: a memfd, zero-filled until it is written."""

    def __init__(self, num_bytes: int, name: str, *, may_freeze: bool = False) -> None:
        """Args: may_freeze: whether `freeze` may be used later. Raises: OSError: the system has no
        descriptor or no memory left."""
        fd = os.memfd_create(name[:_MAX_NAME], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, rounded(num_bytes))
            last = 0 if may_freeze else fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | last)
            self._open(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def take_over(cls, fd: int, num_bytes: int) -> Extent:
        """Adopt an extent that another process made. Owns `fd` from here on, unless it raises.

        Raises: OSError: the descriptor is not a memfd. ValueError: its size is wrong or not sealed.
        """
        if os.fstat(fd).st_size != rounded(num_bytes):
            raise ValueError(f"it has {os.fstat(fd).st_size} bytes, not {rounded(num_bytes)}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
            raise ValueError("its size is not sealed")
        extent = cls.__new__(cls)
        extent._open(fd, num_bytes)
        return extent

    def _open(self, fd: int, num_bytes: int) -> None:
        self.read_only_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.fd = fd
        self.num_bytes = rounded(num_bytes)
        self.num_holders = 1
        self.is_vacated = False
        self._map: tuple[mmap.mmap, int] | None = None
        self._read_only_map: mmap.mmap | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the memory is sealed against writing."""
        return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    def freeze(self) -> bool:
        """Seal the memory against writing, permanently.

        Returns: False: a process may have it mapped writable, or it was made without `may_freeze`.
        """
        self._map = None
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError:
            return False
        return True

    def readable(self, num_bytes: int) -> memoryview:
        """The first `num_bytes`, read-only by convention: writes to this view are private to it."""
        if self._read_only_map is None:
            # Private: `copy` needs the address, which ctypes gives only of writable mappings.
            fd, flags = self.read_only_fd, mmap.MAP_PRIVATE
            self._read_only_map = mmap.mmap(fd, self.num_bytes, flags=flags)
        return memoryview(self._read_only_map)[:num_bytes]

    def view(self, num_bytes: int) -> memoryview:
        """The first `num_bytes`, writable."""
        mapping, start = self._mapped()
        return memoryview(mapping)[start : start + num_bytes]

    def _mapped(self) -> tuple[mmap.mmap, int]:
        if self._map is None:
            self._map = map_file(self.fd, self.num_bytes)
        return self._map

    def vacate(self) -> None:
        """Give the extent's pages back to the system, under the mappings of every process.

        The extent reads as zeroes afterwards.
        """
        mapping, start = self._mapped()
        mapping.madvise(mmap.MADV_REMOVE, start, self.num_bytes)

    def close(self) -> None:
        """Close the descriptors. The memory is freed with the last view of it."""
        os.close(self.fd)
        os.close(self.read_only_fd)
        # The maps are not closed here because a thread may be reading a view. The last reference
        # unmaps them.
        self._map = self._read_only_map = None


class HostMemory:
    """The node's host memory as a budget: extents in use, and idle ones kept for reuse.

    Invariant (`validate`): the bytes of all extents, including idle ones, never exceed the budget,
    except for those that are counted elsewhere (`reserve_uncounted`).

    Idle extents are kept because the first touch of fresh memory costs ten times a copy into
    touched memory. They are released, oldest first, before a reservation is refused. An extent is
    only reused within its pool, so that no deployment gets memory that another one may still have
    mapped. A vacated extent keeps its number and its mappings, but has no memory until it is
    occupied again. An extent with several holders counts once and stays until its last holder frees
    it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        """Bytes of all extents that have memory, including idle ones, and without those of
        `reserve_uncounted`."""
        self.unrecorded: set[int] = set()
        """Extents that are being filled for a record that does not exist yet."""
        self._last = 0
        self._extents: dict[int, Extent] = {}
        self._uncounted: set[int] = set()
        self._idle: dict[int, str] = {}
        """Pool of each idle extent, oldest first."""

    def __getitem__(self, extent: int) -> Extent:
        return self._extents[extent]

    def reserve(
        self, num_bytes: int, label: str, pool: str = "", *, may_freeze: bool = False
    ) -> int:
        """Reserve an extent of at least `num_bytes`.

        Args:    label: the name of the memory in /proc and in errors.
                 pool: reuse an idle extent of this pool if it has the size.
                 may_freeze: whether a new extent can be made immutable later.
        Returns: the number of the extent.
        Raises:  ResourceError: RESOURCE_EXHAUSTED with the numbers.
        """
        size = rounded(num_bytes)
        number = self._take_idle(size, pool)
        if number is None:
            self._make_room(size, label)
            number = self._create(num_bytes, label, may_freeze=may_freeze)
            self.used_bytes += size
        return number

    def reserve_uncounted(self, num_bytes: int, label: str, pool: str) -> int:
        """Reserve an extent that takes the place in the budget of one that is device memory now.

        The budget counts it once it is parked; it is freed instead if there is no room.
        Args, Returns: as in `reserve`. Raises: ResourceError: the system has no memory.
        """
        number = self._take_idle(rounded(num_bytes), pool)
        if number is None:
            number = self._create(num_bytes, label)
        else:
            self.used_bytes -= self._extents[number].num_bytes
        self._uncounted.add(number)
        return number

    def _take_idle(self, size: int, pool: str) -> int | None:
        for number, owner in self._idle.items():
            if pool and owner == pool and self._extents[number].num_bytes == size:
                del self._idle[number]
                self._extents[number].num_holders = 1
                return number
        return None

    def _create(self, num_bytes: int, label: str, *, may_freeze: bool = False) -> int:
        try:
            extent = Extent(num_bytes, f"phaseloom: {label}", may_freeze=may_freeze)
        except OSError as error:
            raise ResourceError(
                f"{num_bytes} bytes of host memory for {label} are not available: {error.strerror}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="lower the node's host memory budget, or free memory on its machine",
                details={"num_bytes": str(num_bytes)},
            ) from error
        self._last += 1
        self._extents[self._last] = extent
        return self._last

    def reserve_vacated(self, num_bytes: int, label: str) -> int:
        """Reserve an extent that has no memory until it is occupied."""
        number = self._create(num_bytes, label)
        self._extents[number].is_vacated = True
        return number

    def vacate(self, extent: int) -> None:
        """Give back the memory of an extent whose bytes are elsewhere."""
        vacated = self._extents[extent]
        assert extent not in self._idle
        assert not vacated.is_vacated
        vacated.vacate()
        vacated.is_vacated = True
        self.used_bytes -= vacated.num_bytes

    def occupy(self, extent: int, label: str) -> None:
        """Reserve memory for a vacated extent again."""
        vacated = self._extents[extent]
        assert vacated.is_vacated
        self._make_room(vacated.num_bytes, label)
        vacated.is_vacated = False
        self.used_bytes += vacated.num_bytes

    def take_over(
        self,
        extent: int,
        fd: int,
        num_bytes: int,
        label: str,
        *,
        is_vacated: bool = False,
        is_uncounted: bool = False,
    ) -> None:
        """Adopt an extent of the previous daemon. Owns `fd` from here on, unless it raises.

        Raises: ResourceError: the extent exceeds the budget, or `fd` is not that extent.
        """
        assert extent not in self._extents
        size = 0 if is_vacated or is_uncounted else rounded(num_bytes)
        if self.used_bytes + size > self.budget_bytes:
            raise ResourceError(
                f"extent {extent} needs {size} bytes: {self.used_bytes} of {self.budget_bytes} are "
                f"in use",
                code=Code.RESOURCE_EXHAUSTED,
            )
        try:
            adopted = Extent.take_over(fd, num_bytes)
            if is_vacated:
                adopted.vacate()
        except (OSError, ValueError) as error:
            raise ResourceError(f"the memory for {label} cannot be taken over: {error}") from error
        adopted.is_vacated = is_vacated
        self._extents[extent] = adopted
        self._uncounted |= {extent} if is_uncounted else set()
        self._last = max(self._last, extent)
        self.used_bytes += size

    def handles(self) -> dict[int, int]:
        """The descriptor of each extent, including idle ones, by number."""
        return {number: extent.fd for number, extent in self._extents.items()}

    def hold(self, extent: int) -> None:
        """Add a holder of an extent. Each holder calls `free` or `park` once."""
        assert extent not in self._idle
        self._extents[extent].num_holders += 1

    def free(self, extent: int) -> None:
        """Remove a holder of an extent; frees it if it was the last one."""
        if self._is_left(extent):
            self._give_up(extent)

    def park(self, extent: int, pool: str) -> None:
        """Remove a holder of an extent. If it was the last one, keep the touched memory for the
        next reservation in `pool`."""
        if self._is_left(extent):
            if extent in self._uncounted:
                size = self._extents[extent].num_bytes
                if self.used_bytes + size > self.budget_bytes:
                    self._give_up(extent)
                    return
                self._uncounted.discard(extent)
                self.used_bytes += size
            self._idle[extent] = pool
            for number in self._idle_of(pool)[:-MAX_IDLE_PER_POOL]:
                self._give_up(number)

    def _is_left(self, extent: int) -> bool:
        assert extent not in self._idle
        self._extents[extent].num_holders -= 1
        return not self._extents[extent].num_holders

    def drop_pool(self, pool: str) -> None:
        """Release all idle extents of `pool`, which must no longer be reused."""
        for number in self._idle_of(pool):
            self._give_up(number)

    def pools(self) -> set[str]:
        """The pools that have an idle extent."""
        return set(self._idle.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that are available at once, including those of idle extents."""
        idle_bytes = sum(self._extents[extent].num_bytes for extent in self._idle)
        return self.budget_bytes - self.used_bytes + idle_bytes

    def extents_in_use(self) -> set[int]:
        """Extents that have a holder, including vacated ones. Idle ones have none."""
        return self._extents.keys() - self._idle.keys()

    def close(self) -> None:
        for number in [*self._extents]:
            self._give_up(number)

    def validate(self) -> None:
        """Raises: AssertionError: an invariant does not hold."""
        assert self._uncounted <= self.extents_in_use()
        assert self.used_bytes == sum(map(self._counted_bytes, self._extents))
        assert 0 <= self.used_bytes <= self.budget_bytes
        assert self._idle.keys() <= self._extents.keys()
        for number, extent in self._extents.items():
            assert (extent.num_holders == 0) == (number in self._idle)
            assert not extent.is_vacated or extent.num_holders == 1

    def check_holders(self, recorded: Iterable[int]) -> None:
        """Check that every extent in use has as many holders as records refer to it.

        Args:   recorded: the extents that the records refer to, once for each reference.
        Raises: AssertionError: the two differ.
        """
        references = Counter([*recorded, *self.unrecorded])
        assert set(references) == self.extents_in_use(), "an extent without an owner"
        for extent, number in references.items():
            assert number == self._extents[extent].num_holders, "an owner that holds nothing"

    def _idle_of(self, pool: str) -> list[int]:
        return [extent for extent, owner in self._idle.items() if owner == pool]

    def _make_room(self, size: int, label: str) -> None:
        if size > self.free_bytes:
            used_bytes = self.budget_bytes - self.free_bytes
            raise ResourceError(
                f"{label} needs {size} bytes of host memory: {used_bytes} of {self.budget_bytes} "
                "are in use",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="raise the node's host memory budget, or finish jobs that use it",
                details=exhausted(size, used_bytes, self.budget_bytes),
            )
        while self.used_bytes + size > self.budget_bytes:
            self._give_up(next(iter(self._idle)))

    def _give_up(self, number: int) -> None:
        self.used_bytes -= self._counted_bytes(number)
        self._idle.pop(number, None)
        self._uncounted.discard(number)
        self._extents.pop(number).close()

    def _counted_bytes(self, number: int) -> int:
        extent = self._extents[number]
        return 0 if extent.is_vacated or number in self._uncounted else extent.num_bytes


def joined(first: Extent, first_bytes: int, second: Extent, second_bytes: int) -> memoryview:
    """The beginning of one extent followed by that of another, as one view without copying.

    Args:   first_bytes: bytes of the first extent, whole pages.
    Raises: OSError: the system cannot map more.
    """
    assert first_bytes % mmap.PAGESIZE == 0
    num_bytes = first_bytes + rounded(second_bytes)
    # The mapping owns both files' pages; its last reference unmaps them.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof((ctypes.c_char * num_bytes).from_buffer(mapping))
    map_file_at(address, first.fd, first_bytes)
    map_file_at(address + first_bytes, second.fd, rounded(second_bytes))
    return memoryview(mapping)[: first_bytes + second_bytes]
