"""A weights version whose host memory went bad: found out, and put out of service.

Who has the memory mapped keeps its pages; nobody is given it again, and it is no other version's
either. Host copies that are the same memory go to the one that is brought in its place; where none
can be had, the lives that have them are over, as of any bad host copy. So is the policy's life that
made the version, if no seal has that: it is rebuilt from its seal and the log, and makes it again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.statemgr.core.contents import Content
from phaseloom.statemgr.core.residency import State
from phaseloom.statemgr.core.versions import Version
from phaseloom.statemgr.node.node import Node

log = logging.getLogger(__name__)


@dataclass
class BadCopy:
    """What was taken out of service."""

    node: Node
    version: Version
    extent: int
    contents: list[Content]
    """Host copies that are this memory."""

    def replace(self, mended: Version) -> None:
        """The version is in host memory again."""
        log.info("version %s is whole again", mended.key)
        for content in self._theirs():
            is_same = (mended.digest, mended.num_bytes) == (content.digest, content.num_bytes)
            if not is_same or content.state is not State.HOST or mended.extent is None:
                self._end(content)
                continue
            self.node.memory.hold(mended.extent)
            self.node.memory.free(self.extent)
            content.extent = mended.extent

    def give_up(self) -> list[Version] | None:
        """It is to be had nowhere.

        Returns: where its policy makes it again, whose life is over then, the pieces of it that
        are on disk and have to go too. None: it does not, as what a seal has.
        """
        for content in self._theirs():
            self._end(content)
        node, version = self.node, self.version
        policy, key = version.key.policy, version.key.whole
        if version.is_on_disk or any(seal.seq >= key.seq for seal in node.seals.of(policy)):
            return None
        if version.key.is_copy or not node.residency.is_alive(policy, version.incarnation):
            return None
        whole = node.versions.find(key)
        pieces = [*([whole] if whole else []), *node.versions.parts_of(key)]
        for piece in pieces:
            node.drop_version(piece)
        maker = node.residency.find(policy)
        assert maker is not None
        node.retire(maker, f"{version}, which no seal has, is bad")
        return [piece for piece in pieces if piece.is_on_disk]

    def _theirs(self) -> list[Content]:
        """Those that are it still."""
        known = self.node.contents.is_known
        return [each for each in self.contents if known(each) and each.extent == self.extent]

    def _end(self, content: Content) -> None:
        for wpg in content.wpgs:
            self.node.retire(wpg, f"its host copy is the memory of {self.version}, which is bad")


class Remaking:
    """Versions that their policy is about to make again, until its next life begins here."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lost: dict[VersionKey, int] = {}
        """version → life of the policy that ended with it"""

    def begin(self, version: Version) -> None:
        assert version.incarnation is not None
        self._lost[version.key.whole] = version.incarnation

    def check(self, key: VersionKey) -> None:
        """Raises: ResourceError: UNAVAILABLE: it is here no more, and will be made again."""
        incarnation = self._lost.get(key.whole)
        if incarnation is None:
            return
        if self._node.residency.newest(key.policy) != incarnation:
            # Who is to read it is told by the scheduler to wait for that.
            del self._lost[key.whole]
            return
        raise ResourceError(
            f"version {key.whole} went bad in host memory before it was sealed: its policy is "
            "rebuilt, and makes it again",
            remedy="sync it again",
        )


async def discard_if_bad(node: Node, version: Version) -> BadCopy | None:
    """Verify what is in host memory of a committed version; where it is bad, the books know from
    now on of what is on disk only, if anything. None: it is good.

    Raises: ResourceError: ABORTED: it was dropped meanwhile.
    """
    extent = version.extent
    if extent is None:
        return None
    node.versions.acquire(version)
    try:
        memory = node.memory[extent].view(version.num_bytes)
        is_good = await asyncio.to_thread(digest_of, memory) == version.digest
        version.check_kept()
        if is_good:
            return None
        log.error("version %s is bad in host memory", version.key)
        version.is_bad = True
        contents = [each for each in node.contents.all() if each.extent == extent]
        node.drop_version(version)
        if version.is_on_disk:
            node.versions.add_from_disk(
                version.key, version.num_bytes, version.tensors, version.digest
            )
    finally:
        node.release_version(version)
    return BadCopy(node, version, extent, contents)


def lost(key: VersionKey, error: PhaseloomError) -> ResourceError:
    """The copy that was here is bad, and there is no other."""
    part = f"part {key.part} of version {key.whole}" if key.part else f"version {key}"
    return ResourceError(
        f"{part} went bad in host memory, and is to be had nowhere else: {error.info.message}",
        code=Code.DATA_LOSS,
        remedy="publish the weights again, as another version, and sync that",
        details={"version": str(key.whole), "part": key.part},
    )
