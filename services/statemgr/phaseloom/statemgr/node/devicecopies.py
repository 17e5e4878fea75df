"""Weights versions in device memory, so that ranks on one GPU sync without the host.

The rank that publishes a version hands over a descriptor of device memory with the same bytes. A
rank that opens the version on that device receives it. The daemon only holds descriptors and uses
no GPU itself.

Invariant: device copies never keep a deployment out, because heaps have priority in the budget.
They are a cache: the version itself is in host memory, and a kill of the daemon drops them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.transport.framing import close_fds
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.transfer.permission import check_reader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """The device memory of one version, as a descriptor."""

    device: int
    num_bytes: int
    fd: int


class DeviceCopies:
    """The device copies on this node, at most one per version."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._copies: dict[VersionKey, DeviceCopy] = {}
        """By version, oldest first."""

    def keep(self, rank: Rank, key: VersionKey, num_bytes: int, fds: list[int]) -> bool:
        """Hold a version's device memory if it fits next to the heaps on the device.

        Older device copies are dropped to make room. The method owns the descriptors and closes
        them if it refuses the copy.

        Returns: whether the copy is held.
        Raises:  CallerError: PERMISSION_DENIED: there is not exactly one descriptor, or the rank is
                 not the first one here of the version's policy.
        """
        if len(fds) != 1 or key.policy != rank.wpg.key or rank.index:
            close_fds(fds)
            raise CallerError(
                f"{rank} cannot share version {key}", code=Code.PERMISSION_DENIED, field="version"
            )
        self.drop(key)
        budget = self._residency.device_budget_bytes[rank.device]
        room = budget - self._residency.device_used_bytes(rank.device)
        if num_bytes > room:
            log.info("version %s has no room on device %d beside its policy", key, rank.device)
            close_fds(fds)
            return False
        self._drop_oldest(rank.device, until_bytes=room - num_bytes)
        self._copies[key] = DeviceCopy(rank.device, num_bytes, fds[0])
        return True

    def find(self, rank: Rank, key: VersionKey) -> int | None:
        """The descriptor of a version's device memory; None: there is none on the rank's device."""
        check_reader(rank.wpg, key, None)
        copy = self._copies.get(key)
        return copy.fd if copy is not None and copy.device == rank.device else None

    def make_way(self, rank: Rank) -> None:
        """Drop the oldest device copies that would not fit next to a rank's heap.

        Called before the rank is loaded, after everything that it displaces has left the device.
        """
        budget = self._residency.device_budget_bytes[rank.device]
        used_bytes = self._residency.device_used_bytes(rank.device) + rank.device_bytes
        self._drop_oldest(rank.device, until_bytes=budget - used_bytes)

    def used_bytes(self, device: int) -> int:
        return sum(copy.num_bytes for copy in self._copies.values() if copy.device == device)

    def drop(self, key: VersionKey) -> None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            os.close(copy.fd)

    def close(self) -> None:
        for key in [*self._copies]:
            self.drop(key)

    def _drop_oldest(self, device: int, until_bytes: int) -> None:
        """Drop the oldest copies on a device until the others need at most `until_bytes`."""
        for key in [key for key, copy in self._copies.items() if copy.device == device]:
            if self.used_bytes(device) <= until_bytes:
                break
            self.drop(key)
