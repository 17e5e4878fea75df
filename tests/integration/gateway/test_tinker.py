"""The Tinker API, as its unmodified SDK and as plain HTTP use it, on a whole mesh."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from phaseloom.common.contract.events import JobSubmitted
from tests.support.gateway import OTHER, SDK_CHILD, serving, told
from tests.support.jobs import following, tenant

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(("part", "rank"), [("whole", 8), ("full", 0)])
async def test_sdk_trains_samples_saves_and_goes_on(short_dir: Path, part: str, rank: int) -> None:
    async with serving(short_dir) as served, following(served.mesh) as log:
        said = await served.sdk(part)
        await log.caught_up()
        specs = [event.spec for event in log.events if isinstance(event, JobSubmitted)]
    assert said["models"] == ["tiny"]
    assert said["info"] == ["tiny", rank > 0, rank]
    assert said["losses"][0] == said["before"]
    assert said["losses"][-1] < 0.01 * said["before"]
    assert said["shapes"] == [[7]]
    assert said["sampled"] == said["named"] == said["earlier"] == [9, 2, 7, 3, 11, 4]
    assert said["newer"] == said["sampled"]
    assert said["base"] != said["sampled"]
    assert said["difference"] <= 1e-6
    assert len(said["drawn"]) == 3
    assert len(set(said["loaded"])) == 1
    own, with_optimizer, without = said["went_on"]
    assert own == with_optimizer != without
    assert said["custom"]["mine"] == 1.0
    assert said["ppo"]["num_tokens:sum"] == 7
    assert "there is no loss 'kto'" in said["refused"]
    assert "of a part of the batch, are dropped" in said["partial"]
    assert said["after"] > 0.0
    assert said["runs"] == 4
    assert said["listed"] == said["paths"]
    assert "NotFoundError" in said["gone"]
    assert said["both"] == [said["newer"], said["base"]]
    deployments = [sorted(each.name for each in spec.deployments) for spec in specs]
    # The base's sampler, and that of all models' adapters; or each model has one.
    assert deployments.count(["sampler"]) == (2 if rank else 1)
    assert deployments.count(["policy"] if rank else ["policy", "sampler"]) == 4
    saved_by = "policy" if rank else "sampler"
    names = {path.name for path in await asyncio.to_thread(short_dir.glob, f"**/{saved_by}/*-*")}
    assert any(name.endswith("-a_name") for name in names)
    assert not any(name.endswith("-gone") for name in names)
    assert "there is no model 'none'" in said["unknown_model"]
    assert "NotFoundError" in said["unknown_path"]


async def test_reward_rises_through_the_sdk(short_dir: Path) -> None:
    async with serving(short_dir) as served:
        rewards = (await served.sdk("reward"))["rewards"]
    assert rewards[-1] > rewards[0] + 0.3, rewards


async def test_losses_are_the_same_bits_whoever_is_killed(short_dir: Path) -> None:
    async with serving(short_dir) as served:
        quiet = await served.sdk("steps")
        disturbed = await served.start_sdk(str(SDK_CHILD), "steps")
        assert disturbed.stderr is not None
        victims = {"begun": "gateway", "step 8": "worker-train-0", "step 20": "router-0"}
        victims |= {"step 25": "gateway", "step 35": "scheduler", "step 45": "gateway"}
        while victims and (line := (await disturbed.stderr.readline()).decode()):
            if service := victims.pop(line.strip(), None):
                for pid in served.mesh.pids(service):
                    os.kill(pid, signal.SIGKILL)
        assert not victims, "the program ended before all were killed"
        assert await told(disturbed) == quiet


async def test_nothing_of_a_tenant_is_another_tenants(short_dir: Path) -> None:
    async with serving(short_dir) as served, aiohttp.ClientSession(served.url) as http:

        async def post(call: str, key: str, **body: Any) -> tuple[int, dict[str, Any]]:
            headers = {"X-API-Key": key}
            async with http.post(f"/api/v1/{call}", json=body, headers=headers) as answer:
                return answer.status, await answer.json()

        own, other = served.key(), served.key(OTHER)
        status, session = await post("create_session", own)
        assert status == 200
        assert (await post("session_heartbeat", own, **session))[0] == 200
        assert (await post("session_heartbeat", other, **session))[0] == 410
        asked = {**session, "model_seq_id": 0, "base_model": "tiny"}
        assert (await post("create_model", other, **asked))[0] == 404
        status, promise = await post("create_model", own, **asked)
        assert status == 200
        assert await post("create_model", own, **asked) == (200, promise), "asked for again"
        status, made = await post("retrieve_future", own, **promise)
        assert (status, made["type"]) == (200, "create_model")
        assert (await post("retrieve_future", other, **promise))[0] == 410
        model = {"model_id": made["model_id"]}
        assert (await post("get_info", own, **model))[0] == 200
        status, refused = await post("get_info", other, **model)
        assert (status, refused["field"]) == (404, "model")
        status, refused = await post("create_session", "tml-nobody")
        assert (status, refused["detail"]) == (401, "there is no such API key")

        # What makes no sense is the caller's mistake, told with the field, and takes no harm.
        status, refused = await post("optim_step", own, **model, seq_id="one", adam_params={})
        assert (status, refused["field"]) == (400, "seq_id")
        status, refused = await post("optim_step", own, **model, seq_id=1, adam_params={"lr": 1})
        assert (status, refused["field"]) == (400, "adam_params")
        for path in ("", "a/b"):
            status, refused = await post("save_weights", own, **model, seq_id=1, path=path or "/")
            assert (status, refused["field"]) == (400, "path")
        async with http.post(
            "/api/v1/forward_backward", data=b"\xff\xfe", headers={"X-API-Key": own}
        ) as answer:
            assert answer.status == 400
        status, promise = await post(
            "optim_step", own, **model, seq_id=1, adam_params={"learning_rate": 1e-3}
        )
        status, stepped = await post("retrieve_future", own, **promise)
        assert (status, stepped["metrics"]["grad_norm:mean"]) == (200, 0.0)

        status, _ = await post(f"sessions/{session['session_id']}/finish", own)
        assert status == 200
        assert (await post("session_heartbeat", own, **session))[0] == 410


async def test_calls_out_of_order_run_in_order(short_dir: Path) -> None:
    async with serving(short_dir) as served, aiohttp.ClientSession(served.url) as http:
        headers = {"X-API-Key": served.key()}

        async def post(call: str, **body: Any) -> dict[str, Any]:
            async with http.post(f"/api/v1/{call}", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                told: dict[str, Any] = await answer.json()
                return told

        session = await post("create_session")
        promise = await post("create_model", **session, model_seq_id=0, base_model="tiny")
        model = {"model_id": (await post("retrieve_future", **promise))["model_id"]}
        second = await post("save_weights", **model, seq_id=2, path="after")
        waiting = asyncio.create_task(post("retrieve_future", **second))
        first = await post("optim_step", **model, seq_id=1, adam_params={"learning_rate": 1e-3})
        assert "metrics" in await post("retrieve_future", **first)
        assert (await waiting)["path"] == f"tinker://{model['model_id']}/weights/after"
        assert await post("save_weights", **model, seq_id=2, path="after") == second


async def test_models_of_a_program_that_is_gone_are_ended(short_dir: Path) -> None:
    async with (
        serving(short_dir, session_s=2.0) as served,
        tenant(served.mesh) as mesh,
        aiohttp.ClientSession(served.url, headers={"X-API-Key": served.key()}) as http,
    ):

        async def post(call: str, **body: Any) -> tuple[int, dict[str, Any]]:
            async with http.post(f"/api/v1/{call}", json=body) as answer:
                return answer.status, await answer.json()

        _, session = await post("create_session")
        _, promise = await post("create_model", **session, model_seq_id=0, base_model="tiny")
        making = asyncio.create_task(post("retrieve_future", **promise))
        while not making.done():
            assert (await post("session_heartbeat", **session))[0] == 200
            await asyncio.sleep(0.1)
        _, made = await making
        job = f"tinker-{session['session_id']}-0"
        while (await mesh.status(job)).state != "done":
            await asyncio.sleep(0.1)
        # Its models are ended first, so that a gateway that dies between goes on with it.
        while (await post("session_heartbeat", **session))[0] != 410:
            await asyncio.sleep(0.1)
        status, refused = await post(
            "optim_step", model_id=made["model_id"], seq_id=1, adam_params={"learning_rate": 1.0}
        )
        assert (status, "is done" in refused["detail"]) == (400, True), refused
