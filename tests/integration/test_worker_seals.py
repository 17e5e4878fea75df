"""Seals of a node's deployments: one that another node holds up holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phaseloom.common.contract.commands import FilesTicket, ReleaseVersions, SealState
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.events import Event, SealCommitted, SealFailed
from phaseloom.common.contract.ids import DeploymentKey, NodeId, VersionKey
from phaseloom.common.contract.operations import Outcome, PublishWeights
from phaseloom.common.contract.specs import Durability
from tests.support.node import NODE, STEP, TestNode, lesson, policy_spec, running_node

NOWHERE = NodeId("nowhere")
PATIENCE_S = 600.0


@dataclass
class Silent:
    """A node that takes connections, and says nothing."""

    endpoint: str = ""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    _may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.called.set()
        await self._may_end.wait()
        writer.close()

    def end(self) -> None:
        self._may_end.set()


@asynccontextmanager
async def silent_node() -> AsyncIterator[Silent]:
    silent = Silent()
    server = await asyncio.start_server(silent.hear, "127.0.0.1", 0)
    silent.endpoint = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield silent
    finally:
        silent.end()
        server.close()
        await server.wait_closed()


async def test_replica_that_says_nothing_holds_up_one_deployment_alone() -> None:
    """The one whose seal goes there; all others are sealed, run on, and let go of versions."""
    async with (
        silent_node() as silent,
        running_node(2, peer_timeout_s=PATIENCE_S) as node,
        node.fresh(),
    ):
        held, _ = await node.start_wpg(policy_spec(), job="held", devices=[0])
        other, _ = await node.start_wpg(policy_spec(), job="other", devices=[1])
        for policy in (held, other):
            await node.run(policy, 1, lesson())
            await node.run(policy, 2, STEP, 1)
            await node.run(policy, 3, PublishWeights(), 2)
        remote = {
            "durability": Durability.REMOTE,
            "replicas": {NOWHERE: silent.endpoint},
            "ticket": FilesTicket(held, 1, [str(NOWHERE)]),
        }
        await seal(node, held, **remote)
        await silent.called.wait()
        await seal(node, other)
        await node.log.until(lambda e: isinstance(e, SealCommitted) and e.deployment == other)
        for policy in (held, other):
            assert (await node.run(policy, 4, lesson(1), 3)).outcome is Outcome.COMPLETED
            assert version(node, policy).exists()
        released = [VersionKey(policy, 3) for policy in (held, other)]
        await node.command(ReleaseVersions, versions=released)
        await until_gone(version(node, other))
        assert version(node, held).exists()
        assert not any(is_sealed(event, held) for event in node.log.events)
        silent.end()
        await until_gone(version(node, held))
        # Its word comes another way than the file goes.
        failed = await node.log.until(lambda event: is_sealed(event, held))
        assert isinstance(failed, SealFailed)
        assert failed.error.code is Code.UNAVAILABLE


async def seal(node: TestNode, policy: DeploymentKey, **more: Any) -> None:
    await node.command(SealState, deployment=policy, incarnation=1, seq=3, versions=[3], **more)


def version(node: TestNode, policy: DeploymentKey) -> Path:
    """Where the seal has put it."""
    directory = node.directory / "nodes" / NODE / policy.tenant / policy.job / policy.deployment
    return directory / "version-3.state"


async def until_gone(path: Path) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(path.exists):
            await asyncio.sleep(0.01)


def is_sealed(event: Event, policy: DeploymentKey) -> bool:
    """Or has failed to be."""
    return isinstance(event, SealCommitted | SealFailed) and event.deployment == policy
