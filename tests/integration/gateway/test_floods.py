"""Long texts, large bodies, large tokenizers, templates without bounds, and floods of operations:
nobody else waits for them, and no event loop stands still.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from loadtest.hostile import floods
from phaseloom.client import connect
from tests.support.directories import short_directory
from tests.support.gateway import OTHER, Served, serving
from tests.support.jobs import TENANT
from tests.support.pretrained import save_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]
TEMPLATES = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "huge": "{{ 'a' * 10**10 }}",
    "long": "{% for i in range(9999) %}{{ 'a' * 2000 }}{% endfor %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "type": "{{ 1 + 'a' }}",
    "zero": "{{ 1 / 0 }}",
    "none": "{{ messages.none.none }}",
    "deep": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "syntax": "{% for %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "surrogate": "{{ '\\ud800' }}",
    "json": "{{ messages | tojson(indent=10**10) }}",
    "unsafe": "{{ ''.__class__.__mro__ }}",
}
LARGE = "large"
"""A model whose tokenizer takes long to load."""
MAX_PAUSE_S = 1.0
LOOPS = ("gateway", "router", "scheduler")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        models: dict[str, Any] = {}
        for name, template in TEMPLATES.items():
            models[name] = await asyncio.to_thread(save_model, directory / name, torch.float32)
            (models[name] / "chat_template.jinja").write_text(template)
        models[LARGE] = await asyncio.to_thread(save_model, directory / LARGE, torch.float32)
        words = {f"w{number}": number for number in range(150_000)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = Whitespace()
        tokenizer.save(str(models[LARGE] / "tokenizer.json"))
        async with serving(directory, **models) as running:
            yield running
            assert stalls(running) == []


def stalls(served: Served) -> list[str]:
    """What services have logged of callbacks that used more than 50 ms of their event loop."""
    files = [f for f in (served.mesh.run_dir / "logs").iterdir() if f.name.startswith(LOOPS)]
    assert len({f.name.partition("-")[0].partition(".")[0] for f in files}) == len(LOOPS), files
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if "a callback used" in line]


class Caller:
    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}"}

    async def __call__(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        async with self._http.post(path, data=io.BytesIO(content), headers=headers) as answer:
            return answer.status, await answer.json()


async def longest_pause_s(caller: Caller, done: asyncio.Event) -> float:
    """The longest time of a call of another tenant, until something is done."""
    longest = 0.0
    while not done.is_set():
        start_s = time.monotonic()
        status, _ = await caller("/api/v1/weights_info", {"tinker_path": "none"})
        assert status == 404
        longest = max(longest, time.monotonic() - start_s)
        await asyncio.sleep(0.01)
    return longest


async def test_long_inputs_are_refused_and_nobody_waits(served: Served) -> None:
    text = "w1 w2 w3 " * 100
    nested = b"[" * 2_000_000 + b"]" * 2_000_000
    user = {"role": "user", "content": text * 8000}
    sampler = {"sampling_session_id": "none", "seq_id": 1, "sampling_params": {}}
    chunk = {"type": "encoded_text", "tokens": [1] * 1_000_000}
    wrongs: list[tuple[str, Any, str]] = [
        ("/v1/completions", {"model": "tiny", "prompt": text * 1000}, "at most"),
        ("/v1/completions", {"model": "tiny", "prompt": text * 17_000}, "bytes of text"),
        ("/v1/completions", {"model": "tiny", "prompt": [text] * 3000}, "at most 2048 prompts"),
        ("/v1/completions", {"model": "tiny", "prompt": [1] * 3_000_000}, "must have 1 to 63"),
        ("/v1/completions", {"model": "tiny", "prompt": [[2**40] * 200_000]}, "int32"),
        ("/v1/completions", {"model": "tiny", "prompt": [1], "stop": [text] * 400}, "stop"),
        ("/v1/completions", b'{"model": "tiny", "prompt": ' + nested + b"}", "recursion"),
        ("/v1/completions", b'{"model": "tiny", "prompt": [1], "x": ' + nested + b"}", "recursion"),
        ("/v1/completions", b'{"model": "tiny", ' + b'"x": 1, ' * 500_000 + b'"y": 1}', "x"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [user]}, "at most"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{}] * 100_000}, "1 to 63"),
        ("/inference/v1/generate", {"model": "tiny", "token_ids": [1] * 2_000_000}, "1 to 63"),
        ("/api/v1/create_session", {"user_metadata": {"a": "b" * 5_000_000}}, "user_metadata"),
        ("/api/v1/asample", {**sampler, "prompt": {"chunks": [chunk]}}, "1 to 63"),
    ]
    async with aiohttp.ClientSession(served.url) as http:
        flood, victim = Caller(http, served.key()), Caller(http, served.key(OTHER))
        warm = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}
        assert (await flood("/v1/chat/completions", warm))[0] == 200
        done = asyncio.Event()
        watching = asyncio.create_task(longest_pause_s(victim, done))
        answers = [await flood(path, body) for path, body, _ in wrongs]
        path, body, _ = wrongs[1]
        at_once = await asyncio.gather(*(flood(path, body) for _ in range(4)))
        assert [status for status, _ in at_once] == [400] * 4
        done.set()
        for (path, _, why), (status, answer) in zip(wrongs, answers, strict=True):
            assert (status in (400, 404), why in str(answer)) == (True, True), (path, why, answer)
        assert await watching < MAX_PAUSE_S


@pytest.mark.parametrize("name", TEMPLATES)
async def test_template_without_bounds_is_the_callers_error(served: Served, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}
    async with aiohttp.ClientSession(served.url) as http:
        flood, victim = Caller(http, served.key()), Caller(http, served.key(OTHER))
        # The first call reads the tokenizer. It is refused, so no rank starts for this model.
        too_long = {"model": name, "prompt": "w1 " * 1000}
        assert (await flood("/v1/completions", too_long))[0] == 400
        done = asyncio.Event()
        watching = asyncio.create_task(longest_pause_s(victim, done))
        status, answer = await flood("/v1/chat/completions", body)
        done.set()
        assert (status, "template" in answer["error"]["message"]) == (400, True), answer
        assert await watching < MAX_PAUSE_S


async def test_nobody_waits_for_a_large_tokenizer_or_many_short_requests(served: Served) -> None:
    too_long = {"model": LARGE, "prompt": "w149999 " * 70}
    # Sessions of their own: one limits the connections of both.
    sessions = aiohttp.ClientSession(served.url), aiohttp.ClientSession(served.url)
    async with sessions[0] as flooding, sessions[1] as other:
        flood, victim = Caller(flooding, served.key()), Caller(other, served.key(OTHER))
        done = asyncio.Event()
        watching = asyncio.create_task(longest_pause_s(victim, done))
        answers = await asyncio.gather(*(flood("/v1/completions", too_long) for _ in range(1000)))
        done.set()
        assert {(status, "got 70" in str(answer)) for status, answer in answers} == {(400, True)}
        assert await watching < 2 * MAX_PAUSE_S
    assert stalls(served) == []


async def test_floods_of_operations_stop_no_event_loop(served: Served) -> None:
    mesh, job = served.mesh, "flooding"
    arguments = (mesh.url, TENANT, mesh.credentials.tenants[TENANT], job)
    async with connect(*arguments[:3]) as connection:
        await connection.submit_job(job, [floods.spec("train")])
    for flood, number in ((floods.bulk_generate, 1000), (floods.large_json, 6)):
        async with floods.Flooder.connected(*arguments) as flooder:
            assert await flood(flooder, number) == number
            await flooder.ended(flooder.next_seq + number - 1)
    async with floods.Flooder.connected(*arguments) as flooder:
        assert await floods.many_prompts(flooder, 4) == 4
        await flooder.ended(flooder.next_seq + 3)
    async with floods.Flooder.connected(*arguments) as flooder:
        assert await floods.behind_a_gap(flooder, 1000) == 1000
        await floods.show_status(flooder)
    assert stalls(served) == []
