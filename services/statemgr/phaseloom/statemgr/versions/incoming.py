"""A weights version as others read it: whole, or block by block while it is still coming."""

from __future__ import annotations

import asyncio
from typing import Protocol

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.statemgr.core.dealing import Blocks
from phaseloom.statemgr.versions.wire import VersionDescription, digest_of_block


class Readable(Protocol):
    """What is served of a version."""

    description: VersionDescription

    async def block(self, block: int) -> tuple[memoryview, str]:
        """A verified block and its digest, as soon as it is there.

        Raises: ResourceError: it will not come.
        """


class Whole:
    """A committed version."""

    def __init__(self, description: VersionDescription, memory: memoryview) -> None:
        self.description = description
        self._memory = memory
        self._blocks = Blocks(description.num_bytes)

    async def block(self, block: int) -> tuple[memoryview, str]:
        memory = self._memory[self._blocks.span(block)]
        return memory, await asyncio.to_thread(digest_of_block, memory, block)


class Incoming:
    """A version that is being fetched."""

    def __init__(self, description: VersionDescription, memory: memoryview) -> None:
        self.description = description
        self.memory = memory
        self.blocks = Blocks(description.num_bytes)
        self._digests: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._is_given_up = False

    @property
    def is_whole(self) -> bool:
        return len(self._digests) == self.blocks.count

    def has(self, block: int) -> bool:
        return block in self._digests

    def missing(self) -> list[int]:
        return [block for block in range(self.blocks.count) if block not in self._digests]

    def span(self, block: int) -> memoryview:
        """Where the block belongs."""
        return self.memory[self.blocks.span(block)]

    def add(self, block: int, digest: str) -> None:
        """The block is there and verified."""
        self._digests[block] = digest
        self._announce()

    def forget(self) -> None:
        """What is there is not the version, though each block was as its sender said."""
        self._digests.clear()

    def give_up(self) -> None:
        """Nothing more will come."""
        self._is_given_up = True
        self._announce()

    async def block(self, block: int) -> tuple[memoryview, str]:
        while block not in self._digests:
            if self._is_given_up:
                raise ResourceError(f"block {block} did not come here", code=Code.UNAVAILABLE)
            await self._changed.wait()
        return self.span(block), self._digests[block]

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
