"""A job in bfloat16 whose policy and sampler are on different nodes, on a mesh of real processes:
each version but the first comes to the sampler's node as a delta of the one that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.common.contract.operations import AdamParams
from phaseloom.common.contract.specs import Layout, ModelSpec
from tests.support.jobs import running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec
from tests.support.tinymodel import config

MESH = MeshConfig(
    nodes=[
        NodeConfig("rollout-0", "rollout", [8 * 2**20]),
        NodeConfig("train-0", "train", [16 * 2**20] * 2),
    ],
)
MODEL = ModelSpec(config(dtype="bfloat16"), init_seed=7)
STEPS = 4
_DELTAS = re.compile(r"(\d+) of them as deltas of (\d+) bytes")


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_versions_come_as_deltas_and_the_sampler_has_the_policys_weights(
    short_dir: Path, num_ranks: int
) -> None:
    """One rank writes versions whole, two write them in parts."""
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        policy_of = replace(policy_spec(layout=Layout(dp=num_ranks)), model=MODEL)
        job = await connection.submit_job(
            "close", [policy_of, replace(sampler_spec(), model=MODEL)]
        )
        policy, sampler = job.deployment("policy"), job.deployment("sampler")
        for step in range(STEPS):
            args = lesson(step)
            await policy.forward_backward(args.batch, args.loss)
            await policy.optim_step(AdamParams(1e-5))
            await sampler.sync_weights(policy.publish_weights())
        saved = [await each.save_state("end") for each in (policy, sampler)]
        await job.finish()
        assert saved[0].weights_sha256 == saved[1].weights_sha256
        assert log.failures() == []
    # A manifest of parts, which has their digests, differs too much.
    as_deltas = [(whole, deltas) for whole, deltas in _fetched(short_dir) if deltas]
    assert len(as_deltas) >= STEPS - 1
    assert all(deltas < whole / 4 for whole, deltas in as_deltas)


def _fetched(directory: Path) -> list[tuple[int, int]]:
    """(bytes that deltas made, bytes of the deltas) of all fetches that the logs tell of."""
    told = "".join(path.read_text() for path in directory.rglob("*.log"))
    return [(int(whole), int(deltas)) for whole, deltas in _DELTAS.findall(told)]
