"""Seals: those in host memory, their headers, and the choice of those to delete."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.records.incarnations import Rank
from phaseloom.statemgr.records.stateheader import Section, SectionRef, StateHeader, data_loss


@dataclass(frozen=True, slots=True)
class HostSeal:
    """A seal in host memory: an extent with the bytes of a state file."""

    key: DeploymentKey
    seq: int
    extent: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The seal's name in errors."""
        return f"seal {self.seq} of {self.key} in host memory"


class HostSeals(dict[tuple[DeploymentKey, int], HostSeal]):
    """Seals in host memory, by deployment and seq."""

    def of(self, key: DeploymentKey) -> list[HostSeal]:
        return [seal for seal in self.values() if seal.key == key]


def seal_header(
    deployment: DeploymentKey,
    seq: int,
    sections: list[Section],
    *,
    rank_offset: int = 0,
    num_ranks: int = 0,
) -> StateHeader:
    """The header of a seal, or of a node's part of a checkpoint.

    Args: sections: the sections of this node's ranks, in order.
          rank_offset: the first of these ranks.
          num_ranks: ranks on all nodes; 0: this node has all of them.
    """
    header = StateHeader("seal", deployment, seq, sections)
    if num_ranks <= len(sections):
        return header
    return msgspec.structs.replace(header, rank_offset=rank_offset, num_ranks=num_ranks)


def section_of(rank: Rank, first: SectionRef) -> Section:
    """The section of a seal that belongs to a rank.

    Args:   first: the place of the seal's first section.
    Raises: ResourceError: DATA_LOSS: the file has another node's ranks. CallerError:
            FAILED_PRECONDITION, with the numbers: the deployment has another layout than the seal.
    """
    header, file, wpg = first.header, first.file, rank.wpg
    if not header.is_of(wpg.rank_offset, wpg.num_ranks):
        raise data_loss(
            file,
            f"it has ranks {header.rank_offset} and up of {header.num_ranks}; this node has ranks "
            f"{wpg.rank_offset} and up of {wpg.num_ranks}",
        )
    num_ranks, heap_bytes, tensors = len(wpg.ranks), rank.extent_bytes, rank.tensors
    parts = header.parts
    part = parts[rank.index] if len(parts) == num_ranks else None
    if part is not None and (part.num_bytes, part.tensors) == (heap_bytes, tensors):
        return part
    sealed_bytes = [part.num_bytes for part in parts]
    raise CallerError(
        f"{file} has another layout: {len(parts)} ranks with heaps of {sealed_bytes} bytes; "
        f"this is rank {rank.index} of {num_ranks} with a heap of {heap_bytes} bytes and "
        f"{len(tensors)} tensors",
        code=Code.FAILED_PRECONDITION,
        remedy="restore with the model, backend and layout that made the seal",
        details={
            "file": file,
            "sealed_ranks": len(parts),
            "ranks": num_ranks,
            "sealed_bytes": sum(sealed_bytes),
            "heap_bytes": heap_bytes,
        },
    )


def superseded_seals(seqs: list[int], written: int, committed: int) -> list[int]:
    """Seals that may be deleted after one was written: all but that one, the one before it, and the
    committed one.

    Seals above the written one were made by an earlier incarnation, whose history this one does not
    continue.
    """
    before = max((seq for seq in seqs if seq < written), default=0)
    return [seq for seq in sorted(seqs) if seq not in {written, before, committed}]
