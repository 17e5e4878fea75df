"""Checkpoints as the Tinker SDK and plain HTTP list, keep, overwrite, delete and download them.

Two replicas serve at one port, so that some calls are passed on.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from tests.support.directories import short_directory
from tests.support.gateway import OTHER, Served, serving

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        async with serving(directory, replicas=2) as running:
            yield running


def saved_files(served: Served) -> list[Path]:
    return [*served.mesh.run_dir.glob("checkpoints/*/tinker-*/*/*/*.safetensors")]


async def test_sdk_manages_checkpoints_and_nothing_is_left_of_those_it_deletes(
    served: Served,
) -> None:
    said = await served.sdk("saved")
    assert "exists" in said["taken"]
    assert "are not allowed" in said["slash"]
    assert "are not allowed" in said["percent"]
    assert "ttl_seconds must be greater than 0" in said["no_ttl"]
    assert said["loaded"] == [True, True, True]
    assert said["expires"] == [True, True]
    assert said["kept"] is said["again"] is said["step"] is True
    assert said["odd"] == [""] * 5
    assert said["drawn"] == 1
    assert said["count"] == 6
    assert said["page"] == [2, 6]
    assert said["left"] == []
    assert "NotFoundError" in said["gone"]
    (left,) = {path.parent.name for path in await asyncio.to_thread(saved_files, served)}
    assert left.endswith("-kept")

    path = said["kept_path"].removeprefix("tinker://")
    run, _, checkpoint = path.partition("/")
    of_run = f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}"
    own, other = ({"X-API-Key": served.key(*names)} for names in ((), (OTHER,)))

    async def call(
        method: str, url: str, headers: dict[str, str], **body: Any
    ) -> tuple[int, bytes]:
        # A connection for each call, so that any replica may get it.
        async with (
            aiohttp.ClientSession(served.url) as http,
            http.request(method, url, headers=headers, json=body or None) as answer,
        ):
            return answer.status, await answer.read()

    for _ in range(4):
        status, told = await call("GET", f"{of_run}/archive", own)
        assert status == 200
        url = URL(json.loads(told)["url"])
        assert str(url).startswith(served.url)
        status, content = await call("GET", str(url.relative()), {})
        assert status == 200
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            (name,) = {member.name.partition("/")[0] for member in tar.getmembers()}
            assert f"{name}/adapter_model.safetensors" in tar.getnames()
            assert name.endswith("-kept")
        status, _ = await call("GET", str(url.relative())[:-1] + "x", {})
        assert status == 401
        late = url.update_query(expires="1").relative()
        assert (await call("GET", str(late), {}))[0] == 401
        assert (await call("GET", str(late), other))[0] == 404
    for method, rest, body in (
        ("GET", "/archive", {}),
        ("PUT", "/ttl", {"ttl_seconds": 1}),
        ("DELETE", "", {}),
    ):
        assert (await call(method, of_run + rest, other, **body))[0] == 404
    for ttl in (0, -1, "soon", 1e12):
        assert (await call("PUT", f"{of_run}/ttl", own, ttl_seconds=ttl))[0] == 400
    for query in ("limit=-1", "offset=x", "limit=99999999999"):
        assert (await call("GET", f"/api/v1/checkpoints?{query}", own))[0] == 400

    # What has expired is as if it were deleted, and the mesh removes its files.
    assert (await call("PUT", f"{of_run}/ttl", own, ttl_seconds=0.01))[0] == 200
    while (await call("GET", f"{of_run}/archive", own))[0] != 404:
        pass
    async with asyncio.timeout(120):
        while await asyncio.to_thread(saved_files, served):
            await asyncio.sleep(0.1)
