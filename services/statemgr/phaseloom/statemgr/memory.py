"""The host arena's memory: one memfd an extent, mapped once and kept.

The sizes are sealed, so that no rank can shrink what this daemon has mapped (reading it would be a
SIGBUS). Readers get a descriptor that was opened read-only. The mapping counts as shared memory of
this process, not as anonymous memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import xxhash

from phaseloom.common.errors import Code, ResourceError
from phaseloom.statemgr.core.arena import Arena, rounded

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_NAME = 200
"""The kernel takes 249 bytes; names are only shown in /proc."""


class Extent:
    """Zeroes until written."""

    def __init__(self, num_bytes: int, name: str) -> None:
        """Raises: OSError: the system has no descriptor or no memory to give."""
        self._num_bytes = rounded(num_bytes)
        self._map: mmap.mmap | None = None
        self.fd = os.memfd_create(name[:_MAX_NAME], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self._num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            self.read_only_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self.fd)
            raise

    def view(self, num_bytes: int) -> memoryview:
        """The first `num_bytes`, writable."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self._num_bytes)
        return memoryview(self._map)[:num_bytes]

    def close(self) -> None:
        """Give the memory up, once the last view on it is gone."""
        os.close(self.fd)
        os.close(self.read_only_fd)
        # Not closed by force: a thread may be reading a view. The last reference unmaps it.
        self._map = None


class HostMemory:
    """The arena's book-keeping together with its memory."""

    def __init__(self, budget_bytes: int) -> None:
        self.arena = Arena(budget_bytes)
        self._extents: dict[int, Extent] = {}

    def __getitem__(self, extent: int) -> Extent:
        return self._extents[extent]

    def reserve(self, num_bytes: int, what: str, pool: str = "") -> int:
        """Raises: ResourceError: RESOURCE_EXHAUSTED with the numbers."""
        grant = self.arena.reserve(num_bytes, what, pool)
        self._close(grant.evicted)
        if grant.is_new:
            try:
                self._extents[grant.extent] = Extent(num_bytes, f"phaseloom: {what}")
            except OSError as error:
                self.arena.free(grant.extent)
                raise ResourceError(
                    f"{num_bytes} bytes of host memory for {what} cannot be had: {error.strerror}",
                    code=Code.RESOURCE_EXHAUSTED,
                ) from error
        return grant.extent

    def free(self, extent: int) -> None:
        self._close([self.arena.free(extent)])

    def park(self, extent: int, pool: str) -> None:
        """Keep the extent, touched as it is, for the next one of `pool`."""
        self._close(self.arena.park(extent, pool))

    def drop_pool(self, pool: str) -> None:
        self._close(self.arena.drop_pool(pool))

    def close(self) -> None:
        self._close(list(self._extents))

    def _close(self, extents: list[int]) -> None:
        for extent in extents:
            self._extents.pop(extent).close()


def digest_of(view: memoryview) -> str:
    """xxh3-128 in hex. Long: run it in a thread; the hash releases the GIL."""
    return xxhash.xxh3_128(view).hexdigest()
