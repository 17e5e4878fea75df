"""Suspects: weights versions that a reader found bad in host memory. They are verified, and dropped
where they are bad.

One rule holds for all of them: bad bytes are dropped, and the version is fetched again, or rebuilt
from seal and log. A rank that has the memory mapped keeps its pages; the memory is given to no
other reader. Incarnations whose host copy is that memory are over. The version itself is read again
from disk or fetched from another node. Where neither has the version and no seal does, the
incarnation of its policy is over, too, and the next incarnation makes the version again.
"""

from __future__ import annotations

import asyncio
import logging

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.statemgr.node.digests import has_digest
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.versions.versions import Version

log = logging.getLogger(__name__)


class Suspects:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._lost: dict[VersionKey, int] = {}
        """The versions that their policy is about to make again, each with the incarnation of the
        policy that ended with it."""

    async def drop_if_bad(self, version: Version) -> bool:
        """Verify the bytes of a committed version in host memory, and drop them if they are bad.

        Returns: whether they were bad; the version is then on this node's disk only, if at all.
        """
        node, extent = self._node, version.extent
        if extent is None:
            return False
        with node.using(version):
            is_good = await has_digest(node.memory_of(version), version.digest)
            version.check_kept()
            if is_good:
                return False
            log.error("version %s is bad in host memory", version.key)
            version.is_bad = True
            host_copies = [each for each in node.shared_copies.all() if each.extent == extent]
            node.drop_version(version)
            if version.is_on_disk:
                node.versions.add_from_disk(
                    version.key, version.num_bytes, version.tensors, version.digest
                )
            for wpg in {wpg for each in host_copies for wpg in each.wpgs}:
                node.retire(wpg, f"its host copy is the memory of {version}, which is bad")
        return True

    async def rebuild(self, version: Version) -> None:
        """End the incarnation that made a bad version which no node has, so that the next one makes
        it again; do nothing where a seal has it. All pieces of the version here are dropped."""
        node, policy, key = self._node, version.key.policy, version.key.whole
        if version.is_on_disk or any(seal.seq >= key.seq for seal in node.seals.of(policy)):
            return
        if version.key.is_copy or not node.residency.is_alive(policy, version.incarnation):
            return
        whole = node.versions.find(key)
        pieces = [*([whole] if whole else []), *node.versions.parts_of(key)]
        for piece in pieces:
            node.drop_version(piece)
        maker = node.residency.find(policy)
        assert maker is not None
        node.retire(maker, f"{version}, which no seal has, is bad")
        self._lost[key] = maker.incarnation
        directory = node.directory
        paths = [directory.version(piece.key) for piece in pieces if piece.is_on_disk]
        await asyncio.to_thread(directory.discard, *paths)

    def check(self, key: VersionKey) -> None:
        """Check that a version is not one that its policy is about to make again.

        Raises: ResourceError: UNAVAILABLE: it is.
        """
        incarnation = self._lost.get(key.whole)
        if incarnation is None:
            return
        if self._node.residency.newest(key.policy) != incarnation:
            # The scheduler tells the readers to wait for the next incarnation.
            del self._lost[key.whole]
            return
        raise ResourceError(
            f"version {key.whole} went bad in host memory before it was sealed: its policy is "
            "rebuilt, and makes it again",
            remedy="sync it again",
        )


def lost(key: VersionKey, error: PhaseloomError) -> ResourceError:
    """The error where the copy of a version here was bad, and no other node has one."""
    part = f"part {key.part} of version {key.whole}" if key.part else f"version {key}"
    return ResourceError(
        f"{part} went bad in host memory, and is to be had nowhere else: {error.info.message}",
        code=Code.DATA_LOSS,
        remedy="publish the weights again, as another version, and sync that",
        details={"version": str(key.whole), "part": key.part},
    )
