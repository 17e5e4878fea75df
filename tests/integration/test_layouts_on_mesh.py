"""A job whose policy is spread over the devices of a node, on the whole mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.events import WpgStarted
from phaseloom.common.contract.operations import AdamParams
from phaseloom.common.contract.specs import Layout
from tests.support.jobs import kill_rank, running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec

MESH = MeshConfig(
    nodes=[
        NodeConfig("rollout-0", "rollout", [8 * 2**20]),
        NodeConfig("train-0", "train", [16 * 2**20, 16 * 2**20]),
    ],
    seal_every=4,
)
ADAM = AdamParams(1e-2)


async def train(
    mesh_tenant: client.Mesh, name: str, layout: Layout, kill_in: Mesh | None = None
) -> tuple[list[float], list[list[int]]]:
    """The loss of each batch, and what the sampler draws greedily in the end.

    Args: kill_in: kill one of its ranks half-way.
    """
    job = await mesh_tenant.submit_job(name, [policy_spec(layout=layout), sampler_spec()])
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    losses = []
    for step in range(6):
        args = lesson(step)
        trained = await policy.forward_backward(args.batch, args.loss)
        await policy.optim_step(ADAM)
        losses.append(trained.metrics["loss:sum"])
        if kill_in is not None and step == 3:
            kill_rank(kill_in, f"{name}.policy")
    published = policy.publish_weights()
    await sampler.sync_weights(published)
    generated = await sampler.generate(
        [client.Prompt([1, 2, 3])], client.SamplingParams(5, temperature=0.0)
    )
    await job.finish()
    return losses, [list(s.tokens) for group in generated.sequences for s in group]


async def test_job_of_two_ranks_learns_what_one_of_one_does_also_after_a_kill(
    short_dir: Path,
) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        expected, _ = await train(connection, "one", Layout())
        got = await train(connection, "two", Layout(dp=2))
        assert got[0] == pytest.approx(expected, rel=1e-3)
        # In one layout it is the same to the bit, whatever dies.
        assert await train(connection, "killed", Layout(dp=2), kill_in=mesh) == got
        await log.caught_up()
        starts = [e for e in log.events if isinstance(e, WpgStarted)]
        of_two = [s for s in starts if str(s.deployment) == "demo.two.policy"]
        assert [sorted(s.devices) for s in of_two] == [[0, 1]]
        assert len([s for s in starts if str(s.deployment) == "demo.killed.policy"]) == 2
        assert log.failures() == []
