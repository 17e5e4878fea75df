"""What a caller does wrong is told as its API tells errors, whichever call it is; never a 5xx."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import aiohttp
import pytest

from phaseloom.gateway import openai, tinker
from tests.support.gateway import OTHER, Served

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
BODIES: list[bytes] = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b"\xff\xfe\x00",
    b'"' + b"x" * 70_000 + b'"',
    b"[" * 5000,
    b'{"session_id": 1, "model_id": [], "model": {}, "path": 7, "request_id": null}',
    b'{"session_id": "none", "model_id": "none", "model": "none", "path": "none"}',
    b'{"model": "tiny", "prompt": [-1, 1e9], "messages": [1], "token_ids": ["a"], "n": -1}',
    b'{"model": "tiny", "prompt": [], "messages": [{}], "token_ids": [], "max_tokens": -5}',
    b'{"model": "tiny", "prompt": {"a": 1}, "messages": [], "token_ids": [999999999999]}',
    b"\x0a\x04none\x10\x01\x1a\xff\xff\x01",
]


def calls() -> list[tuple[str, str]]:
    found = [(route.method, route.path) for route in [*tinker.routes, *openai.routes]]
    assert len(found) > 25
    return found


async def test_no_call_fails_for_what_its_body_says(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
        headers = {"X-API-Key": served.key()}

        async def refused(method: str, path: str, **more: Any) -> int:
            async with http.request(method, path, headers=headers, **more) as answer:
                text = await answer.text()
                assert answer.status < 500, (method, path, more, text)
                if answer.status >= 400:
                    said = json.loads(text)
                    assert said["detail"] if path.startswith("/api") else said["error"]["message"]
                return answer.status

        for method, route in calls():
            path = re.sub("{[^}]*}", "none", route)
            for body in BODIES:
                await refused(method, path, data=body)
            assert await refused("PATCH", path) == 405
        assert await refused("GET", "/api/v1/none") == 404
        assert await refused("GET", "/v1/none") == 404
        assert await refused("POST", "/v1/completions", data=io.BytesIO(bytes(65 * 2**20))) == 413


async def test_every_call_that_names_something_knows_only_its_own_tenants(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:

        async def call(method: str, where: str, key: str, **body: Any) -> tuple[int, Any]:
            headers = {"X-API-Key": key}
            async with http.request(method, where, json=body or None, headers=headers) as answer:
                return answer.status, await answer.json(content_type=None)

        own, other = served.key(), served.key(OTHER)
        post = "/api/v1/"
        _, session = await call("POST", post + "create_session", own)
        name = session["session_id"]
        asked = {"session_id": name, "model_seq_id": 0, "base_model": "tiny"}
        _, promise = await call("POST", post + "create_model", own, **asked)
        _, made = await call("POST", post + "retrieve_future", own, **promise)
        model = made["model_id"]
        save = {"model_id": model, "seq_id": 1, "path": "kept"}
        _, promise = await call("POST", post + "save_weights", own, **save)
        _, saved = await call("POST", post + "retrieve_future", own, **promise)
        path = saved["path"]
        sampling = {"session_id": name, "sampling_session_seq_id": 0, "base_model": "tiny"}
        _, sampler = await call("POST", post + "create_sampling_session", own, **sampling)
        drawn = {**sampler, "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}
        bodies: dict[str, dict[str, Any]] = {
            "create_model": asked,
            "get_info": {"model_id": model},
            "unload_model": {"model_id": model},
            "optim_step": {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1.0}},
            "save_weights": {**save, "seq_id": 2},
            "save_weights_for_sampler": {**save, "seq_id": 2},
            "load_weights": {"model_id": model, "seq_id": 2, "path": path},
            "create_sampling_session": {**sampling, "base_model": None, "model_path": path},
            "asample": drawn,
            "weights_info": {"tinker_path": path},
        }
        named = [("POST", post + each, body) for each, body in bodies.items()]
        for each in (path, sampler["sampling_session_id"]):
            some: dict[str, Any] = {"model": each, "prompt": [1], "token_ids": [1], "messages": []}
            named += [("POST", "/v1/completions", some), ("POST", "/v1/chat/completions", some)]
            named += [("POST", "/inference/v1/generate", some)]
        values = {"session": name, "run": model, "checkpoint": "weights/kept"}
        values |= {"sampler": sampler["sampling_session_id"]}
        for method, route in calls():
            if "{" in route:
                named.append((method, route.replace(":.+", "").format(**values), {}))
        for method, where, body in named:
            status, told = await call(method, where, other, **body)
            assert status == 404, (method, where, told)
        assert (await call("POST", post + "get_info", own, model_id=model))[0] == 200
        assert (await call("GET", f"{post}training_runs/{model}", own))[0] == 200
        _, kept = await call("GET", f"{post}training_runs/{model}/checkpoints", own)
        assert [each["tinker_path"] for each in kept["checkpoints"]] == [path]
