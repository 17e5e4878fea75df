"""Ranks without a model that publish and sync weights in parts, in this process: each holds its
rows of some arrays, as the training backend lays them out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phaseloom.common.contract.commands import Permit
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey, VersionKey
from phaseloom.common.contract.specs import CommandId
from phaseloom.common.contract.state_layout import TensorSlot, VersionParts
from phaseloom.common.tensors.resharding import holding_of
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.layout import plan, shard
from phaseloom.worker.backends.noop import NoopBackend
from phaseloom.worker.rank.executor import Executor
from phaseloom.worker.rank.weightsync import FetchedVersion, RankWeights
from phaseloom.worker.rank.wire import RankConfig
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap
from tests.support.meshcerts import ticket
from tests.support.node import policy_spec
from tests.support.statedaemon import POLICY, Daemon

SHAPES = {"a": [1027, 64], "b": [3], "c": [5, 1000], "scale": [1], "z": [2048, 128]}
"""Rows that two and three ranks share unevenly, and one of which most ranks have nothing."""


_numbers = itertools.count(1)


def arrays(
    seed: int, shapes: dict[str, list[int]] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    chance = np.random.default_rng(seed)
    return {
        name: chance.random(shape, dtype=np.float32)
        for name, shape in sorted((shapes or SHAPES).items())
    }


class Rows(NoopBackend):
    """A rank's rows of the arrays, or all of them."""

    def __init__(
        self, group: RankGroup, *, is_sharded: bool, shapes: dict[str, list[int]] | None = None
    ) -> None:
        self._shapes = shapes or SHAPES
        self._group = group if is_sharded else RankGroup()
        layout = plan(self._shapes, trainable=False, ranks=self._group)
        self.heap = Heap(layout.heap_bytes)
        self.slots = layout.slots
        self.version_slots = plan(self._shapes, trainable=False).slots
        each = [RankGroup(rank, group.world_size) for rank in range(group.world_size)]
        self.holdings = [
            holding_of(plan(self._shapes, trainable=False, ranks=at).slots)
            for at in (each if is_sharded else [RankGroup()] * group.world_size)
        ]

    def fill(self, content: dict[str, np.ndarray[Any, Any]]) -> None:
        for slot in self.slots:
            self._place(slot)[:] = self._mine(content, slot.name)

    def holds(self, content: dict[str, np.ndarray[Any, Any]]) -> bool:
        return all(
            np.array_equal(self._place(slot), self._mine(content, slot.name)) for slot in self.slots
        )

    def _mine(self, content: dict[str, np.ndarray[Any, Any]], name: str) -> np.ndarray[Any, Any]:
        rows = shard(self._shapes[name], self._group).rows
        return content[name][rows.start : rows.stop]

    def _place(self, slot: TensorSlot) -> np.ndarray[Any, Any]:
        memory = self.heap.buffer[slot.offset : slot.offset + slot.num_bytes]
        return np.frombuffer(memory, np.float32).reshape(slot.shape)


@dataclass
class PartRank:
    backend: Rows
    client: RankStateClient
    weights: RankWeights = field(init=False)
    settings: RankConfig
    applied: int = 0

    def __post_init__(self) -> None:
        executor = Executor(self.settings, self.backend)
        self.weights = RankWeights(self.settings, self.client.versions, executor)

    async def bring(
        self, version: VersionKey, *sources: str, permitted: CommandId | None = None
    ) -> FetchedVersion:
        shown = permit(version, self.settings, sources, permitted or new_permit())
        return await self.weights.fetch(version, shown)

    async def sync(
        self, version: VersionKey, *sources: str, permitted: CommandId | None = None
    ) -> str:
        """As a `sync_weights`; the version's digest.

        Args: permitted: the permit's id, which ranks of one deployment share; None: a new one.
        """
        brought = await self.bring(version, *sources, permitted=permitted)
        await self.weights.apply(brought)
        return brought.digest


def new_permit() -> CommandId:
    """The id of another permit: each attempt at an operation has one of its own."""
    return CommandId(next(_numbers), 1)


def permit(
    version: VersionKey, settings: RankConfig, sources: Sequence[str], permitted: CommandId
) -> Permit:
    key = settings.deployment
    return Permit(
        id=permitted,
        node=NodeId(settings.node),
        revision=1,
        operation=OperationKey(key.tenant, key.job, key.deployment, "1"),
        operation_id="id",
        kind="sync_weights",
        incarnation=1,
        epoch=1,
        prev=0,
        sources=list(sources),
        ticket=ticket(version, key.deployment, *{settings.node, *settings.nodes}),
    )


async def start_part_ranks(
    daemons: Sequence[Daemon],
    key: DeploymentKey,
    num_ranks: int,
    *,
    incarnation: int = 1,
    is_sharded: bool = True,
    shapes: dict[str, list[int]] | None = None,
) -> list[PartRank]:
    """A deployment's ranks, as many on each node, rank i on device i of its node."""
    each = num_ranks // len(daemons)
    nodes = [NodeId(d.environment["PHASELOOM_STATEMGR_NODE"]) for d in daemons]
    started: list[PartRank] = []
    for at, d in enumerate(daemons):
        ranks = range(at * each, (at + 1) * each)
        tokens = [f"{key} {incarnation} {rank}" for rank in ranks]
        await d.agent.register_wpg(tokens, key, incarnation, list(range(each)), 0)
        for token, rank in zip(tokens, ranks, strict=True):
            backend = Rows(RankGroup(rank, num_ranks), is_sharded=is_sharded, shapes=shapes)
            client = await RankStateClient.connect(
                d.socket, token, applied=lambda: 0, on_loaded=lambda: None
            )
            d.ranks.append(client)
            await client.register_heap(backend.heap, backend.slots)
            await client.commit_initial()
            settings = RankConfig(
                token=token,
                deployment=key,
                incarnation=incarnation,
                spec=policy_spec(),
                node=nodes[at],
                device=0,
                agent_socket="",
                state_socket="",
                rank=rank,
                num_ranks=num_ranks,
                nodes=nodes if len(nodes) > 1 else [],
            )
            started.append(PartRank(backend, client, settings))
    return started


async def switch_in(d: Daemon, key: DeploymentKey, epoch: int = 1, incarnation: int = 1) -> None:
    await d.agent.switch_in(key, incarnation, epoch, [])


async def publish(
    ranks: Sequence[PartRank], version: VersionKey, content: dict[str, np.ndarray[Any, Any]]
) -> str:
    """As a `publish_weights` of these ranks, which hold this; the version's digest."""
    for rank in ranks:
        rank.backend.fill(content)
    manifest = await write(ranks, version)
    digests = {
        (await rank.client.versions.commit_parts(version, manifest)).digest for rank in ranks
    }
    (digest,) = digests
    return digest


async def write(ranks: Sequence[PartRank], version: VersionKey) -> VersionParts:
    """Every rank its part; the manifest is yet to be committed."""
    written = [await rank.weights.write(version) for rank in ranks]
    return ranks[0].weights.manifest(written)


VERSION = VersionKey(POLICY, 2)
