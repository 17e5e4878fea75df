"""The parts that all features of the state manager share, built and connected.

Features receive the parts that they use. Only `main` and tests hold a `Node`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.state_rank import StateMessage
from phaseloom.common.transport.framing import Peer
from phaseloom.statemgr.disk.files import StateDirectory
from phaseloom.statemgr.node.background import Background
from phaseloom.statemgr.node.digests import Digests
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ledger import Ledger
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.node.stores import DeviceCopies, HostCopyStore, HostSealStore, VersionStore
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.records.manifest import manifest_of
from phaseloom.statemgr.records.records import Records


class Node:
    def __init__(
        self,
        name: NodeId,
        directory: StateDirectory,
        device_budget_bytes: list[int],
        host_budget_bytes: int,
        transfer_timeout_s: float,
        *,
        frozen_bases: Mapping[str, str] | None = None,
        endpoint: Callable[[], str] = lambda: "",
    ) -> None:
        """Args: transfer_timeout_s: a rank that takes longer for one copy is lost.
        frozen_bases: the frozen bases that tenants may share, as BLAKE3 → name.
        endpoint: returns the host:port at which this daemon serves weights versions.
        """
        self.directory = directory
        self.records = Records(device_budget_bytes, frozen_bases)
        self.memory = HostMemory(host_budget_bytes)
        self.ledger = Ledger(name, self.memory, lambda: manifest_of(self.records, endpoint()))
        self.background = Background()
        residency, change = self.records.residency, self.ledger.change
        self.digests = Digests(self.background, residency, self.memory, change)
        self.device_copies = DeviceCopies(residency)
        connected: dict[Rank, Peer[StateMessage]] = {}
        shared = self.ledger, self.records, self.memory
        self.copies = HostCopyStore(*shared, directory, self.background)
        self.versions = VersionStore(*shared, self.device_copies, connected.keys())
        self.seals = HostSealStore(self.records, self.memory)
        self.ranks = Ranks(
            self.ledger,
            residency,
            self.memory,
            self.copies,
            self.versions,
            connected=connected,
            transfer_timeout_s=transfer_timeout_s,
        )

    def validate(self) -> None:
        """Raises: AssertionError: the records contradict themselves, one another, or memory."""
        self.records.validate()
        self.memory.validate()
        self.memory.check_holders(self.records.extents())

    def close(self) -> None:
        self.device_copies.close()
        self.ledger.close()
        self.memory.close()
