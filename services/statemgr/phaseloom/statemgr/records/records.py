"""All records of one node.

Pure: the bytes that the records describe are in `node/stores.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from phaseloom.common.contract.ids import JobKey
from phaseloom.statemgr.records.incarnations import HostCopy
from phaseloom.statemgr.records.layouts import Layouts
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.records.seals import HostSeals
from phaseloom.statemgr.records.snapshots import Snapshots
from phaseloom.statemgr.records.versions import Versions


class Records:
    def __init__(
        self, device_budget_bytes: list[int], frozen_bases: Mapping[str, str] | None = None
    ) -> None:
        """Args: frozen_bases: the frozen bases that tenants may share, as BLAKE3 → name."""
        self.residency = Residency(device_budget_bytes, frozen_bases)
        self.host_copies = self.residency.copies
        self.versions = Versions()
        self.layouts = Layouts()
        self.snapshots = Snapshots()
        self.seals = HostSeals()

    def has_job(self, job: JobKey) -> bool:
        """Whether a deployment of the job lives here."""
        return any(wpg.key.job_key == job for wpg in self.residency.alive())

    def extents(self) -> list[int]:
        """The extents that the records refer to, once for each reference."""
        return [
            *self.residency.extents(),
            *self.versions.extents(),
            *self.host_copies.extents(),
            *(extent for snapshot in self.snapshots.values() for extent in snapshot.extents),
            *(seal.extent for seal in self.seals.values()),
        ]

    def owned_bytes(self) -> tuple[int, int]:
        """Count the bytes of host copies and versions in host memory and on NVMe.

        Returns: the bytes counted once for each owner, and the bytes that are really in use.
        """
        owned = sum(d.host_bytes + d.nvme_bytes for d in self.residency.deployments())
        owned += sum(v.num_bytes for v in self.versions.known() if v.extent is not None)
        twice = sum(c.num_bytes * (self._num_owners(c) - 1) for c in self.host_copies.all())
        return owned, owned - twice

    def _num_owners(self, copy: HostCopy) -> int:
        version = self.versions.find(copy.version) if copy.version else None
        is_shared = version is not None and version.extent == copy.extent is not None
        return len(copy.users) + is_shared

    def validate(self) -> None:
        """Raises: AssertionError: the records contradict themselves."""
        self.residency.validate()
        self.versions.validate()
        self.host_copies.validate()
