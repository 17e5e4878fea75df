"""The host arena's memory: one memfd an extent, mapped once and kept.

The sizes are sealed, so that no rank can shrink what this daemon has mapped (reading it would be a
SIGBUS). Readers get a descriptor that was opened read-only; what several jobs may read is sealed
against writing too, whatever descriptors of it there are. The mapping counts as shared memory of
this process, not as anonymous memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.tensors.hugepages import map_file, place_file
from phaseloom.statemgr.memory.arena import Arena, rounded

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAX_NAME = 200
"""The kernel takes 249 bytes; names are only shown in /proc."""


class Extent:
    """Zeroes until written."""

    def __init__(self, num_bytes: int, name: str, *, may_freeze: bool = False) -> None:
        """Raises: OSError: the system has no descriptor or no memory to give."""
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
    def adopt(cls, fd: int, num_bytes: int) -> Extent:
        """One that another process made; takes `fd`, except where it raises.

        Raises: OSError: it is none. ValueError: its size is another, or can change.
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
        self._num_bytes = rounded(num_bytes)
        self._map: tuple[mmap.mmap, int] | None = None
        self._read_only_map: mmap.mmap | None = None

    @property
    def is_frozen(self) -> bool:
        return bool(fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    def freeze(self) -> bool:
        """Nobody can write it from now on. Returns: False where somebody may have it mapped
        writable, or it was made for writing."""
        self._map = None
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
        except OSError:
            return False
        return True

    def readable(self, num_bytes: int) -> memoryview:
        """The first `num_bytes`, to read only: what is written there, nobody else sees."""
        if self._read_only_map is None:
            # Private: ctypes takes the address of writable mappings only, as `copy` does.
            fd, flags = self.read_only_fd, mmap.MAP_PRIVATE
            self._read_only_map = mmap.mmap(fd, self._num_bytes, flags=flags)
        return memoryview(self._read_only_map)[:num_bytes]

    def view(self, num_bytes: int) -> memoryview:
        """The first `num_bytes`, writable."""
        whole, start = self._mapped()
        return memoryview(whole)[start : start + num_bytes]

    def _mapped(self) -> tuple[mmap.mmap, int]:
        if self._map is None:
            self._map = map_file(self.fd, self._num_bytes)
        return self._map

    def vacate(self) -> None:
        """Free the memory under this and every other process's mapping; it reads as zeroes."""
        whole, start = self._mapped()
        whole.madvise(mmap.MADV_REMOVE, start, self._num_bytes)

    def close(self) -> None:
        """Give the memory up, once the last view on it is gone."""
        os.close(self.fd)
        os.close(self.read_only_fd)
        # Not closed by force: a thread may be reading a view. The last reference unmaps it.
        self._map = self._read_only_map = None


class HostMemory:
    """The arena's book-keeping together with its memory."""

    def __init__(self, budget_bytes: int) -> None:
        self.arena = Arena(budget_bytes)
        self._extents: dict[int, Extent] = {}

    def __contains__(self, extent: object) -> bool:
        """From any thread."""
        return extent in self._extents

    def __getitem__(self, extent: int) -> Extent:
        return self._extents[extent]

    def reserve(
        self, num_bytes: int, what: str, pool: str = "", *, may_freeze: bool = False
    ) -> int:
        """Raises: ResourceError: RESOURCE_EXHAUSTED with the numbers."""
        grant = self.arena.reserve(num_bytes, what, pool)
        self._close(grant.evicted)
        if grant.is_new:
            try:
                name = f"phaseloom: {what}"
                self._extents[grant.extent] = Extent(num_bytes, name, may_freeze=may_freeze)
            except OSError as error:
                self.arena.free(grant.extent)
                raise ResourceError(
                    f"{num_bytes} bytes of host memory for {what} cannot be had: {error.strerror}",
                    code=Code.RESOURCE_EXHAUSTED,
                    remedy="lower the node's host memory budget, or free memory on its machine",
                ) from error
        return grant.extent

    def vacate(self, extent: int) -> None:
        """What was in it is elsewhere."""
        self._extents[extent].vacate()
        self.arena.vacate(extent)

    def occupy(self, extent: int, what: str) -> None:
        """Memory for a vacated one again. Raises: ResourceError: RESOURCE_EXHAUSTED."""
        self._close(self.arena.occupy(extent, what))

    def adopt(
        self, extent: int, fd: int, num_bytes: int, what: str, *, is_vacated: bool = False
    ) -> None:
        """Take an extent of the daemon before over, and `fd` with it, except where it raises.

        Raises: ResourceError: above the budget, or it is not such an extent.
        """
        self.arena.adopt(extent, num_bytes, is_vacated=is_vacated)
        try:
            self._extents[extent] = Extent.adopt(fd, num_bytes)
            if is_vacated:
                self._extents[extent].vacate()
        except (OSError, ValueError) as error:
            self.arena.free(extent)
            raise ResourceError(f"the memory for {what} cannot be taken over: {error}") from error

    def handles(self) -> dict[int, int]:
        """extent → descriptor, the idle ones included."""
        return {number: extent.fd for number, extent in self._extents.items()}

    def hold(self, extent: int) -> None:
        """One holder more, who `free`s or `park`s it too."""
        self.arena.hold(extent)

    def free(self, extent: int) -> None:
        """One holder gives it up; the last one frees it."""
        if not self.arena.let_go(extent):
            self._close([self.arena.free(extent)])

    def park(self, extent: int, pool: str) -> None:
        """Keep it, touched as it is, for the next one of `pool`, unless somebody else holds it."""
        if not self.arena.let_go(extent):
            self._close(self.arena.park(extent, pool))

    def drop_pool(self, pool: str) -> None:
        self._close(self.arena.drop_pool(pool))

    def close(self) -> None:
        self._close(list(self._extents))

    def _close(self, extents: list[int]) -> None:
        for extent in extents:
            self._extents.pop(extent).close()


def joined(first: Extent, first_bytes: int, second: Extent, second_bytes: int) -> memoryview:
    """The beginning of one extent and that of another as one piece of memory, copying nothing.

    Args:   first_bytes: whole pages.
    Raises: OSError: the system maps no more.
    """
    assert first_bytes % mmap.PAGESIZE == 0
    num_bytes = first_bytes + rounded(second_bytes)
    # Whoever drops it last unmaps what is placed into it too.
    whole = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof((ctypes.c_char * num_bytes).from_buffer(whole))
    place_file(address, first.fd, first_bytes)
    place_file(address + first_bytes, second.fd, rounded(second_bytes))
    return memoryview(whole)[: first_bytes + second_bytes]


def copy(target: memoryview, source: memoryview) -> None:
    """Long: run it in a thread; it releases the interpreter, which slice assignment does not."""
    assert len(target) == len(source)
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view))
