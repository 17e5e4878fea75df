"""What a caller does wrong is told as its API tells errors, whichever call it is; never a 5xx."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import aiohttp
import numpy as np
import pytest

from phaseloom.gateway import openai, tinker
from phaseloom.gateway.core import wire
from tests.support.gateway import OTHER, Served

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
_TINKER = "/api/v1/"
_HUGE = 2**70
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
    b'{"model": "tiny", "prompt": [1], "messages": [], "unknown": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": [1], "messages": [], "unknown": "\xff"}',
    b'{"model": "tiny", "prompt": [1], "messages": [], "unknown": ' + b"[" * 5000 + b"}",
    b'{"model": "\\ud800", "session_id": "\\ud800", "model_id": "\\ud800", "path": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\\ud800", "messages": [{"content": "\\ud800"}]}',
    b'{"model": "tiny", "prompt": [1], "max_tokens": NaN, "temperature": 1e999}',
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


async def test_nothing_that_a_caller_sends_takes_the_gateway_along(served: Served) -> None:
    """A name of a few thousand characters cut all tenants' gateway off from the mesh, a number of
    samples filled its memory, and numbers above 64 bits failed it."""
    async with aiohttp.ClientSession(served.url) as http:

        async def call(path: str, key: str = "", /, **body: Any) -> tuple[int, dict[str, Any]]:
            headers = {"X-API-Key": key or served.key()}
            async with http.post(path, json=body, headers=headers) as answer:
                return answer.status, await answer.json(content_type=None)

        async def kept(promise: tuple[int, dict[str, Any]]) -> dict[str, Any]:
            assert promise[0] == 200, promise
            status, answer = await call(_TINKER + "retrieve_future", **promise[1])
            assert status == 200, answer
            return answer

        async def refused(promise: tuple[int, dict[str, Any]], why: str) -> None:
            answer = await kept(promise)
            assert answer["category"] == "user", answer
            assert why in answer["error"]

        _, session = await call(_TINKER + "create_session")
        asked = {**session, "base_model": "tiny", "lora_config": {"rank": 4}}
        create, sampling = _TINKER + "create_model", _TINKER + "create_sampling_session"
        for name in ("t" * 5000, "t" * 500_000, "a\r\nPING", "a.b"):
            told = await call(create, **{**asked, "base_model": name, "model_seq_id": 1})
            assert told[0] == 404
        notes = {"note": "x" * 900_000}
        told = await call(create, **asked, model_seq_id=1, user_metadata=notes)
        assert (told[0], told[1]["field"]) == (400, "user_metadata")
        told = await call(create, **asked, model_seq_id=10**30)
        assert (told[0], told[1]["field"]) == (400, "model_seq_id")
        for number, (lora, why) in enumerate(
            [({"rank": 10**9}, "rank must be from 1"), ({"rank": 4, "seed": _HUGE}, "64 bits")],
            start=2,
        ):
            made = await call(create, **{**asked, "lora_config": lora, "model_seq_id": number})
            await refused(made, why)

        _, sampler = await call(sampling, **session, sampling_session_seq_id=0, base_model="tiny")
        draw: dict[str, Any] = {
            **sampler,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 2},
        }
        wrongs: list[dict[str, Any]] = [
            {"num_samples": 10**9},
            {"num_samples": -1},
            {"prompt": {"chunks": 5}},
            {"prompt": {"chunks": [5]}},
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": "abc"}]}},
            {"sampling_params": {"seed": "x"}},
            {"sampling_params": {"max_tokens": "x"}},
            {"sampling_params": {"stop": [{}]}},
        ]
        for number, wrong in enumerate(wrongs):
            status, told_of = await call(_TINKER + "asample", **{**draw, **wrong}, seq_id=number)
            assert (status, bool(told_of["field"])) == (400, True), (wrong, told_of)
        for number, seed in enumerate((_HUGE, 2**63), start=100):
            params = {"max_tokens": 2, "seed": seed}
            asking = {**draw, "sampling_params": params, "seq_id": number}
            assert (await kept(await call(_TINKER + "asample", **asking)))["category"] == "user"

        model = await kept(await call(create, **asked, model_seq_id=9))
        step: dict[str, Any] = {
            "model_id": model["model_id"],
            "adam_params": {"learning_rate": 0.1},
        }
        for seq in (-1, 0, 2**63, _HUGE):
            assert (await call(_TINKER + "optim_step", **step, seq_id=seq))[0] == 400
        stepped = await kept(await call(_TINKER + "optim_step", **step, seq_id=1))
        assert stepped["type"] == "optim_step"

        said = [{"role": "user", "content": "w1"}]
        chat: dict[str, Any] = {"model": "tiny", "messages": said, "max_tokens": 2}
        for wrong in ({"seed": _HUGE}, {"top_k": _HUGE}, {"stop_token_ids": [_HUGE]}):
            assert (await call("/v1/chat/completions", **chat, **wrong))[0] == 400
        values = {"messages": [], "self": 1}
        assert (await call("/v1/chat/completions", **chat, chat_template_kwargs=values))[0] == 200
        assert (await call(_TINKER + "create_session", served.key(OTHER)))[0] == 200


async def test_tokens_that_are_none_are_refused_and_not_cut(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
        headers = {"X-API-Key": served.key()}

        async def post(call: str, **more: Any) -> dict[str, Any]:
            async with http.post(_TINKER + call, headers=headers, **more) as answer:
                assert answer.status == 200, await answer.text()
                said: dict[str, Any] = await answer.json(content_type=None)
                return said

        session = await post("create_session", json={})
        asked = {**session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        promise = await post("create_model", json=asked)
        model = (await post("retrieve_future", json=promise))["model_id"]
        long = [1] * 1000
        cases: list[tuple[list[int], list[Any], str, str]] = [
            ([1, 2], [2**40 + 5, 3], "<i8", "must be token ids"),
            ([1, 2], [2.5, 3.0], "<f4", "must be token ids"),
            ([1, 2], [float("nan"), 3.0], "<f4", "must be token ids"),
            (long, long, "<i8", "longer than the model's context"),
        ]
        for seq, (tokens, targets, dtype, why) in enumerate(cases, start=1):
            request = wire.ForwardBackwardRequest(
                model_id=model, seq_id=seq, loss_fn="cross_entropy"
            )
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
            tensor = datum.loss_fn_inputs["target_tokens"]
            tensor.dense = np.array(targets, dtype).tobytes()
            tensor.dtype = {"<i8": 2, "<f4": 1}[dtype]
            tensor.shape.append(len(targets))
            promise = await post("forward_backward", data=request.SerializeToString())
            told = await post("retrieve_future", json=promise)
            assert told["category"] == "user"
            assert why in told["error"]


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
            "save_weights_external": {**save, "seq_id": 2},
            "load_weights": {"model_id": model, "seq_id": 2, "path": path},
            "create_sampling_session": {**sampling, "base_model": None, "model_path": path},
            "asample": drawn,
            "weights_info": {"tinker_path": path},
        }
        named = [("POST", post + each, body) for each, body in bodies.items()]
        for each in (path, sampler["sampling_session_id"]):
            named.append(("POST", "/v1/completions", {"model": each, "prompt": [1]}))
            named.append(("POST", "/v1/chat/completions", {"model": each, "messages": []}))
            named.append(("POST", "/inference/v1/generate", {"model": each, "token_ids": [1]}))
        values = {"session": name, "run": model, "checkpoint": "weights/kept"}
        values |= dict.fromkeys(("sampler", "model"), sampler["sampling_session_id"])
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
