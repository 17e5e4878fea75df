"""The Tinker API, as its unmodified SDK and as plain HTTP use it, on a whole mesh."""

from __future__ import annotations

import asyncio
import io
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from rich.console import Console

from phaseloom.cli import models
from phaseloom.cli.merging import merge
from phaseloom.common.contract.events import JobSubmitted
from tests.support.gateway import OTHER, Served, check_whole
from tests.support.jobs import TENANT, following
from tests.support.pretrained import loaded

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]
"""Those of `sdk_child.py`."""


@pytest.mark.parametrize(("part", "rank"), [("whole", 8), ("full", 0)])
async def test_sdk_trains_samples_saves_and_goes_on(served: Served, part: str, rank: int) -> None:
    async with following(served.mesh) as log:
        said = await served.sdk(part)
        await log.caught_up()
        jobs = {e.job.job: e.spec for e in log.events if isinstance(e, JobSubmitted)}
    assert said["models"] == ["tiny"]
    assert said["info"] == ["tiny", rank > 0, rank]
    check_whole(said)
    parse_source = "policy" if rank else "sampler"
    saved = await asyncio.to_thread(served.mesh.run_dir.glob, f"**/{parse_source}/*-*")
    names = {path.name for path in saved}
    assert any(name.endswith("-a_name") for name in names)
    assert not any(name.endswith("-gone") for name in names)
    adapters = [name for name in jobs if name.startswith("adapters-")]
    assert not rank or len(adapters) == 1, "one sampler for all models that train adapters"
    for spec in (spec for name, spec in jobs.items() if name.startswith("tinker-")):
        policy, *beside = spec.deployments
        assert [each.name for each in beside] == ["sampler"] * (policy.model.adapter is None)


async def test_teachers_likeliest_tokens_are_told_and_distilled(served: Served) -> None:
    said = await served.sdk("distilled")
    assert said["rows"] == [True, *[4] * 7]
    assert said["drawn_rows"] == [2, 2, 2]
    assert said["last"] == [[6, 7], [6, 7]]
    assert said["shape"] == [7, 4]
    for name in ("sorted", "own", "loss", "falls", "sparse", "is_sparse", "after"):
        assert said[name], name
    assert "columns" in said["mixed"]
    assert "ppo" in said["ppo"]


async def test_what_is_not_served_is_refused_and_the_program_goes_on(served: Served) -> None:
    """Another optimizer, weights that change under a sampling client, another base and the settings
    of another loss were passed over; a load that was refused left all later calls waiting."""
    said = await served.sdk("refused")
    for name in [*said][: [*said].index("dropped")]:
        assert name.partition(" ")[0] in said[name], (name, said[name])
    assert "are dropped" in said["dropped"]
    assert said["after"] > 0.0
    assert said["custom"][0] == said["custom"][1] > 0.0
    assert said["session"] == [{"note": "mine"}, "a name"]
    assert said["last"] == [True, None]
    assert said["page"] == [[True], 1, 0]


async def test_adapter_with_the_sdks_defaults_is_merged_and_served(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the output head, too, which is the embedding; merging was refused."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = await served.sdk("defaults")
    run, _, name = said["path"].removeprefix("tinker://").split("/")
    job = f"tinker-{run.replace(':train:', '-')}"
    checkpoints = served.mesh.run_dir / "checkpoints" / TENANT / job / "policy"
    (adapter,) = await asyncio.to_thread(lambda: [*checkpoints.glob(f"*-{name}")])
    base = served.mesh.run_dir.parent / "model"
    quiet = Console(file=io.StringIO())
    await asyncio.to_thread(merge, base, adapter, tmp_path / "merged", console=quiet)
    model = loaded(tmp_path / "merged")
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS[:-1]])).logits.log_softmax(-1)
    own = logits[0].gather(1, torch.tensor(TOKENS[1:]).unsqueeze(1)).squeeze(1).tolist()
    assert max(abs(a - b) for a, b in zip(own, said["logprobs"], strict=True)) < 1e-4

    add = partial(models.add, run=served.mesh.run_dir, console=quiet)
    await asyncio.to_thread(add, "merged", tmp_path / "merged")
    headers = {"Authorization": f"Bearer {served.key()}"}
    asked = {"model": "merged", "prompt": TOKENS[:2], "max_tokens": 6, "temperature": 0.0}
    async with (
        aiohttp.ClientSession(served.url, headers=headers) as http,
        http.post("/v1/completions", json={**asked, "return_token_ids": True}) as answer,
    ):
        assert (await answer.json())["choices"][0]["token_ids"] == said["sampled"]


@pytest.mark.parametrize("rank", [8, pytest.param(0, marks=pytest.mark.slow)])
async def test_reward_rises_through_the_sdk(served: Served, rank: int) -> None:
    rewards = (await served.sdk("reward", str(rank)))["rewards"]
    assert rewards[-1] > rewards[0] + 0.6, rewards


async def test_nothing_of_a_tenant_is_another_tenants(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:

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
        # A call that is refused keeps its number, or those behind it would wait for ever.
        calls: list[tuple[str, dict[str, Any], str]] = [
            ("save_weights", {"path": "/"}, "are not allowed"),
            (
                "optim_step",
                {"adam_params": {"lr": 1}},
                "AdamW has no parameter 'lr' (field adam_params)",
            ),
            ("optim_step", {}, "(field adam_params)"),
            ("load_weights", {"path": "tinker://a/weights/b"}, "there is no checkpoint"),
        ]
        for seq, (call, asked, why) in enumerate(calls, start=1):
            status, promise = await post(call, own, **model, seq_id=seq, **asked)
            status, refused = await post("retrieve_future", own, **promise)
            assert (status, refused["category"]) == (200, "user"), call
            assert why in refused["error"]
        async with http.post(
            "/api/v1/forward_backward", data=b"\xff\xfe", headers={"X-API-Key": own}
        ) as answer:
            assert answer.status == 400
        status, promise = await post(
            "optim_step", own, **model, seq_id=5, adam_params={"learning_rate": 1e-3}
        )
        status, stepped = await post("retrieve_future", own, **promise)
        assert (status, stepped["metrics"]["grad_norm:mean"]) == (200, 0.0)

        status, _ = await post(f"sessions/{session['session_id']}/finish", own)
        assert status == 200
        assert (await post("session_heartbeat", own, **session))[0] == 410


async def test_calls_out_of_order_run_in_order(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
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
