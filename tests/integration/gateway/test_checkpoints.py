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


async def fetched(
    served: Served, url: URL, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, bytes]:
    """A call on a connection of its own, so that any replica may get it."""
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


def saved_as(served: Served, path: str) -> Path:
    """The directory of a checkpoint `out`."""
    job = f"tinker-{path.removeprefix('tinker://').split('/')[0].replace(':train:', '-')}"
    (directory,) = served.mesh.run_dir.glob(f"checkpoints/*/{job}/policy/*-out")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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


async def test_weights_are_downloaded_file_by_file(served: Served) -> None:
    said = await served.sdk("external")
    assert said["type"] == "external"
    assert said["expires"] is True
    assert said["tokens"][0] == said["tokens"][1]
    assert len(said["drawn"]) == 6
    assert said["after"] > 0.0
    assert "exists" in said["taken"]
    assert "age_encryption_recipients" in said["key"]
    urls = {name: URL(url) for name, url in said["urls"].items()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
    assert not {name for name in urls if name.startswith(("training", "operation"))}
    on_disk = await asyncio.to_thread(contents, saved_as(served, said["path"]))
    files = {name: await fetched(served, url) for name, url in urls.items()}
    for name, (status, content) in files.items():
        assert status == 200
        assert content == on_disk[name], name

    url, other = urls["adapter_config.json"], {"X-API-Key": served.key(OTHER)}
    path = str(url.path).removesuffix("adapter_config.json")
    for status, wrong in (
        (401, url.with_path(f"{path}adapter_model.safetensors", keep_query=True)),
        (401, url.update_query(expires="1")),
        (401, url.with_query(None)),
    ):
        assert (await fetched(served, wrong))[0] == status, wrong
    own = {"X-API-Key": served.key()}
    for name in ("operation.json", "training.safetensors", "none", "../out/config.json"):
        absent = URL(f"{served.url}{path}{name}", encoded=True)
        assert (await fetched(served, absent, own))[0] in (401, 404), name
    assert (await fetched(served, url.with_query(None), other))[0] == 404

    run, checkpoint = said["path"].removeprefix("tinker://").split("/", 1)
    of_run = URL(f"{served.url}/api/v1/training_runs/{run}/checkpoints/")
    state = said["state"].split("/", 3)[3]
    signing = URL(f"{of_run}{state}/external_weights_urls")
    assert (await fetched(served, signing, own))[0] == 400
    assert (await fetched(served, URL(f"{of_run}{checkpoint}/external_weights_urls"), other))[
        0
    ] == 404
    for method in ("POST", "DELETE"):
        for headers, status in ((own, 501), ({}, 401)):
            publish = URL(f"{of_run}{checkpoint}/publish")
            told = await fetched(served, publish, headers, method=method)
            assert told[0] == status
        assert (
            b"publishing checkpoints is not supported"
            in (await fetched(served, publish, own, method=method))[1]
        )
    assert (await fetched(served, URL(f"{of_run}{checkpoint}"), own, method="DELETE"))[0] == 200
    assert (await fetched(served, url))[0] == 404


async def test_weights_for_recipients_are_encrypted(served: Served) -> None:
    pyrage = pytest.importorskip("pyrage")
    identity, second = (pyrage.x25519.Identity.generate() for _ in range(2))
    said = await served.sdk("external", *(str(i.to_public()) for i in (identity, second)))
    assert "expected an age or SSH public key" in said["key"]
    name = "adapter_model.safetensors.age"
    assert all(name.endswith(".age") for name in said["urls"])
    on_disk = await asyncio.to_thread(contents, saved_as(served, said["path"]))
    for each in (identity, second):
        status, content = await fetched(served, URL(said["urls"][name]))
        assert status == 200
        plain = pyrage.decrypt(content, [each])
        assert plain == on_disk[name.removesuffix(".age")]
    run, checkpoint = said["path"].removeprefix("tinker://").split("/", 1)
    archive = f"{served.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    own = {"X-API-Key": served.key()}
    assert (await fetched(served, URL(archive), own))[0] == 400
