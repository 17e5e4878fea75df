"""Seals that are in host memory alone: which there are, and the extent that holds each."""

from __future__ import annotations

from dataclasses import dataclass

from phaseloom.common.contract.ids import DeploymentKey


@dataclass(frozen=True, slots=True)
class HostSeal:
    """A seal in host memory: an extent with the bytes of a state file."""

    key: DeploymentKey
    seq: int
    extent: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The name of the seal's memory, in errors."""
        return f"seal {self.seq} of {self.key} in host memory"


class HostSeals:
    def __init__(self) -> None:
        self._seals: dict[tuple[DeploymentKey, int], HostSeal] = {}

    def add(self, seal: HostSeal) -> HostSeal | None:
        """Add a seal. Returns: the seal that it replaces, whose extent is to be freed."""
        replaced = self._seals.get((seal.key, seal.seq))
        self._seals[seal.key, seal.seq] = seal
        return replaced

    def find(self, key: DeploymentKey, seq: int) -> HostSeal | None:
        return self._seals.get((key, seq))

    def pop(self, key: DeploymentKey, seq: int) -> HostSeal | None:
        return self._seals.pop((key, seq), None)

    def of(self, key: DeploymentKey) -> list[HostSeal]:
        return [seal for seal in self._seals.values() if seal.key == key]

    def every(self) -> list[HostSeal]:
        return sorted(self._seals.values(), key=lambda seal: (seal.key, seal.seq))

    def extents(self) -> list[int]:
        return [seal.extent for seal in self._seals.values()]
