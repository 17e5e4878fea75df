"""Limits of a tenant on a mesh: refusals name the bound, other tenants go on, restarts keep it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import api
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.transport.services import call_api
from tests.support.jobs import running_mesh, tenant

SPEC = client.DeploymentSpec("policy", "train", "noop", client.ModelSpec({}), trainable=True)
SAMPLING = client.SamplingParams(1000, ignore_eos=True)


async def refusal(connection: client.Mesh, job: str) -> str:
    with pytest.raises(ResourceError) as refused:
        await connection.submit_job(job, [SPEC])
    assert refused.value.info.code is Code.RESOURCE_EXHAUSTED
    return refused.value.info.details["bound"]


@pytest.mark.usefixtures("noop_nodes")
async def test_jobs_beyond_a_limit_are_refused_also_after_a_restart(short_dir: Path) -> None:
    limits: dict[str, dict[str, int | float]] = {"demo": {"max_jobs": 2}}
    config = MeshConfig(tenants=["demo", "other"], tenant_limits=limits)
    async with (
        running_mesh(config, short_dir) as (mesh, _),
        tenant(mesh) as connection,
        tenant(mesh, "other") as others,
    ):
        jobs = [await connection.submit_job(name, [SPEC]) for name in ("a", "b")]
        assert await refusal(connection, "c") == "max_jobs"
        for name in ("a", "b", "c"):
            await others.submit_job(name, [SPEC])
        mesh.kill("scheduler")
        await mesh.ready()
        assert await refusal(connection, "c") == "max_jobs"
        await jobs[0].finish()
        await connection.submit_job("c", [SPEC])


@asynccontextmanager
async def connected(mesh: Mesh, name: str) -> AsyncIterator[Client]:
    """The connection of a tenant's program that is no client of ours."""
    password = mesh.credentials.tenants[name]
    wire = await nats.connect(
        mesh.url, user=name, password=password, inbox_prefix=f"_INBOX_{name}".encode()
    )
    try:
        yield wire
    finally:
        await wire.close()


@pytest.mark.usefixtures("noop_nodes")
async def test_calls_beyond_a_rate_are_refused_and_other_tenants_are_not(short_dir: Path) -> None:
    limits: dict[str, dict[str, int | float]] = {"demo": {"api_rate": 5, "api_burst": 10}}
    config = MeshConfig(tenants=["demo", "other"], tenant_limits=limits, routers=1)
    async with running_mesh(config, short_dir) as (mesh, _):
        for call, request, answer in (
            ("job.status", api.JobRequest("x"), api.JobStatus),
            ("result.get", api.ResultRequest("x", "policy", "1"), api.ResultReply),
        ):
            for name, expected in (("demo", {"api_rate"}), ("other", set[str]())):
                async with connected(mesh, name) as wire:
                    answers = await asyncio.gather(
                        *(call_api(wire, name, call, request, answer) for _ in range(40)),
                        return_exceptions=True,
                    )
                errors = [error for error in answers if isinstance(error, ResourceError)]
                assert {error.info.details["bound"] for error in errors} == expected, (call, name)


@pytest.mark.usefixtures("noop_nodes")
async def test_outcomes_count_as_bytes_also_after_a_restart(short_dir: Path) -> None:
    limits: dict[str, dict[str, int | float]] = {"demo": {"max_bytes": 5000}}
    config = MeshConfig(tenants=["demo", "other"], tenant_limits=limits, routers=1)
    spec = client.DeploymentSpec("sampler", "rollout", "noop", client.ModelSpec({}))
    async with (
        running_mesh(config, short_dir) as (mesh, _),
        tenant(mesh) as connection,
        tenant(mesh, "other") as others,
    ):
        sampler = (await connection.submit_job("a", [spec])).deployment("sampler")
        other = (await others.submit_job("a", [spec])).deployment("sampler")
        await until_outcomes_fill(sampler)
        for service in ("scheduler", "router-0"):
            mesh.kill(service)
        await mesh.ready()
        await until_outcomes_fill(sampler)
        await other.generate([client.Prompt([1])] * 10, SAMPLING)


async def until_outcomes_fill(sampler: client.Deployment) -> None:
    """Generate until the refusal says that outcomes use most of the tenant's bytes."""
    async with asyncio.timeout(30):
        while True:
            try:
                result = await sampler.generate([client.Prompt([1])] * 10, SAMPLING)
                assert len(result.sequences) == 10
            except ResourceError as error:
                if error.info.details["bound"] == "max_bytes" and "fewer" in error.info.remedy:
                    return
