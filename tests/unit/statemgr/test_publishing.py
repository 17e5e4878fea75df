"""Weights versions that one incarnation of a policy makes after another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.ids import COPY_PREFIX, DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import VersionPart, VersionParts
from phaseloom.common.contract.state_rank import CommitParts, CreateVersion
from phaseloom.common.tensors.tensortable import EMPTY
from phaseloom.common.tensors.versionparts import part_of
from phaseloom.statemgr.node.node import Node
from phaseloom.statemgr.records.incarnations import Wpg
from phaseloom.statemgr.versions.weights import Publishing
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import state_directory

POLICY = DeploymentKey("acme", "job", "policy")
KEY = VersionKey(POLICY, 3)
PART = part_of(KEY, "0of1")
SLICES = part_of(KEY, f"{COPY_PREFIX}these")
ONE, OTHER = "1" * 32, "2" * 32


@dataclass
class World:
    node: Node
    publishing: Publishing

    def incarnation(self, incarnation: int) -> Wpg:
        """The next incarnation of the policy."""
        residency = self.node.records.residency
        replaced = residency.register(
            RegisterWpg([f"token{incarnation}"], POLICY, incarnation, [0], 0)
        )
        if replaced is not None:
            self.node.ranks.retire(replaced, "fenced")
        return residency.current(POLICY, incarnation)

    def have(self, key: VersionKey, digest: str, incarnation: int | None = None) -> None:
        """In host memory. Args: digest: empty: it is on its way."""
        extent = self.node.memory.reserve(64, "a version")
        version = self.node.records.versions.begin(key, 64, EMPTY, extent, incarnation)
        if digest:
            self.node.records.versions.commit(version, digest)

    def has(self, key: VersionKey) -> bool:
        return self.node.records.versions.find(key) is not None

    async def commit(self, incarnation: Wpg, digest: str) -> None:
        """A version of one part."""
        part = VersionPart(PART.part, 64, digest, b"")
        await self.publishing.commit_parts(incarnation, CommitParts(KEY, VersionParts("", [part])))


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    files = state_directory(directory)
    node = node_on(files, device_bytes=1, host_bytes=2**20)
    node.ledger.settled.set()
    yield World(node, parts_on(node).publishing)
    node.validate()
    node.close()


@pytest.mark.parametrize(
    ("key", "digest"),
    [(PART, ONE), (PART, ""), (SLICES, "of some rows"), (SLICES, "")],
    ids=["part", "part on its way", "slices", "slices on their way"],
)
async def test_what_came_here_of_an_earlier_lifes_version_goes_with_that(
    tmp_path: Path, key: VersionKey, digest: str
) -> None:
    """For a reader on this node, of a part that another one has written."""
    async with world(tmp_path) as w:
        await w.commit(w.incarnation(1), ONE)
        w.have(key, digest)
        later = w.incarnation(2)
        await w.commit(later, ONE)
        assert w.has(key), "the later incarnation came to the same bits"
        await w.commit(w.incarnation(3), OTHER)
        assert w.has(KEY)
        assert not w.has(key)


@pytest.mark.parametrize("is_ahead", [True, False])
async def test_a_version_that_its_policy_makes_here_goes_before_one_that_is_fetched_ahead(
    tmp_path: Path, *, is_ahead: bool
) -> None:
    """As it does after a loss, when it runs the publish again."""
    async with world(tmp_path) as w:
        policy = w.incarnation(1)
        w.have(KEY, "")
        fetched = w.node.records.versions.find(KEY)
        assert fetched is not None
        fetched.is_ahead = is_ahead
        made = CreateVersion(KEY, 64, EMPTY.packed)
        if is_ahead:
            await w.publishing.create(policy, made)
            assert fetched.is_dropped
        else:
            with pytest.raises(ResourceError, match="is being fetched here"):
                await w.publishing.create(policy, made)


async def test_a_part_that_this_incarnation_wrote_otherwise_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.commit(w.incarnation(1), ONE)
        later = w.incarnation(2)
        w.have(PART, OTHER, incarnation=2)
        with pytest.raises(CallerError) as caught:
            await w.commit(later, "3" * 32)
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        assert (w.has(KEY), w.has(PART)) == (True, True)
