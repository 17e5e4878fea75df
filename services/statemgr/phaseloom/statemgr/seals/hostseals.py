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


class HostSeals(dict[tuple[DeploymentKey, int], HostSeal]):
    """The seals in host memory, by deployment and seq."""

    def of(self, key: DeploymentKey) -> list[HostSeal]:
        return [seal for seal in self.values() if seal.key == key]
