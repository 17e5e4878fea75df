"""The rule by which a heap goes to NVMe and back: through host memory, or straight. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    HOST = "through host memory"
    STRAIGHT = "straight between the device and NVMe"


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are available for a heap's copy."""

    free_bytes: int
    """Host memory that nobody uses."""
    makeable_bytes: int
    """Host memory of copies and versions that may leave it."""
    nvme_bytes: int

    def choose(self, num_bytes: int, *, is_leaving: bool, needs_host: bool = False) -> Way:
        """Choose the way of a heap whose copy has no host memory now.

        1. Through host memory if it has room: the device is free after a copy at memory speed, and
           the disk is written later, if at all.
        2. A heap that leaves its device does not count room that must be made first, because the
           device would wait for it.
        3. Otherwise straight, if NVMe has room.
        4. Otherwise through host memory, which then refuses with the numbers.

        Args: is_leaving: whether the heap leaves the device; otherwise it enters.
              needs_host: whether part of the state is never on a device, or the copy has another
              layout than the heap.
        """
        host_bytes = self.free_bytes + (0 if is_leaving else self.makeable_bytes)
        if needs_host or num_bytes <= host_bytes or num_bytes > self.nvme_bytes:
            return Way.HOST
        return Way.STRAIGHT

    def __str__(self) -> str:
        return (
            f"host memory has {self.free_bytes} bytes free and can free {self.makeable_bytes}, "
            f"NVMe has {self.nvme_bytes} bytes"
        )
