"""A frozen reference model of two jobs on one node, with real workers: one copy of it."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from blake3 import blake3
from rich.console import Console

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.state import state
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import Datum
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.contract.state_agent import StatusReport
from phaseloom.common.contract.streams import state_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import request_reply
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.state.heap import Heap
from tests.support.jobs import running_mesh, tenant
from tests.support.node import model_spec

REFERENCE = DeploymentSpec("reference", "rollout", "sampler", model_spec(hidden_size=64))
ALL = [
    DeploymentSpec("policy", "train", "fsdp", model_spec(hidden_size=64), trainable=True),
    DeploymentSpec("sampler", "rollout", "sampler", model_spec(hidden_size=64)),
    REFERENCE,
]
TENANTS = ["acme", "umbrella"]
BATCH = [Datum([1, 2, 3, 4], [2, 3, 4, 5])]
LESSON = [Datum([1, 2, 3, 4], [2, 3, 4, 5], weights=[1.0] * 4)]


@pytest.fixture(scope="module")
def weights() -> bytes:
    """What a rank of the reference holds."""
    factory = backend_factory(REFERENCE.backend)
    heap = Heap(factory.plan(REFERENCE).heap_bytes)
    factory(REFERENCE, heap).close()
    return bytes(heap.buffer)


def config(bases: dict[str, list[str]] | None = None) -> MeshConfig:
    return MeshConfig(tenants=TENANTS, frozen_bases=bases or {})


async def report_of(mesh: Mesh, node: str) -> StatusReport:
    bus = await Bus.open(mesh.credentials.bus, "test")
    try:
        subject = state_subject(NodeId(node))
        message = await request_reply(bus.client, subject, b"", timeout_s=20.0, headers={})
        report: StatusReport = decode(message.data, StatusReport)
        return report
    finally:
        await bus.close()


async def report_with(mesh: Mesh, num_copies: int) -> StatusReport:
    """Of the rollout node, once so many copies are held there."""
    async with asyncio.timeout(60):
        while len((report := await report_of(mesh, "rollout-0")).shared_copies) != num_copies:
            pass
    return report


async def test_two_tenants_hold_one_copy_of_a_registered_reference_model(
    weights: bytes, short_dir: Path
) -> None:
    bases = {"tiny": [blake3(weights).hexdigest()]}
    async with running_mesh(config(bases), short_dir) as (mesh, _):
        answers = []
        for name in TENANTS:
            async with tenant(mesh, name) as connection:
                job = await connection.submit_job("grpo", [REFERENCE])
                answers.append((await job.deployment("reference").forward(BATCH)).logprobs)
        assert answers[0] == answers[1]
        report = await report_with(mesh, 1)
        (copy,) = report.shared_copies
        assert copy.users == ["acme.grpo.reference", "umbrella.grpo.reference"]
        assert (copy.base, copy.hash) == ("tiny", bases["tiny"][0])
        assert copy.num_bytes == len(weights)
        assert report.held_bytes == len(weights)
        assert report.owned_bytes / report.held_bytes == 2.0
        console = Console(width=200, file=io.StringIO())
        assert await asyncio.to_thread(state, run=short_dir, console=console) == 0
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        assert "(2.00 to 1)" in shown
        assert f"tiny ({copy.hash[:12]})" in shown


async def test_sampler_reference_and_version_of_a_job_are_what_their_bytes_are(
    weights: bytes, short_dir: Path
) -> None:
    """At first sampler and reference are one; then the sampler is the version it synced."""
    async with (
        running_mesh(config(), short_dir) as (mesh, _),
        tenant(mesh, "acme") as connection,
    ):
        job = await connection.submit_job("grpo", ALL)
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        reference = job.deployment("reference")
        before = (await reference.forward(BATCH)).logprobs
        assert (await sampler.forward(BATCH)).logprobs == before
        report = await report_with(mesh, 1)
        assert report.held_bytes == len(weights)
        await policy.forward_backward(LESSON, client.Loss.CROSS_ENTROPY)
        await policy.optim_step(client.AdamParams(1e-2))
        await sampler.sync_weights(policy.publish_weights())
        after = (await sampler.forward(BATCH)).logprobs
        assert after != before
        assert (await reference.forward(BATCH)).logprobs == before
        report = await report_with(mesh, 2)
        assert report.held_bytes == 2 * len(weights)
        assert report.owned_bytes == 3 * len(weights)
        versions = [copy.version for copy in report.shared_copies]
        assert [version is not None for version in versions].count(True) == 1
        assert (await sampler.forward(BATCH)).logprobs == after
