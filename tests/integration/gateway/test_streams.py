"""Streams of OpenAI's API, as its unmodified client reads them, on a whole mesh."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from phaseloom.common.contract.events import CancelRequested, OperationFinished, QueuedOperation
from phaseloom.common.contract.operations import Outcome
from tests.support.bytetokens import save_tokenizer
from tests.support.directories import short_directory
from tests.support.gateway import TEMPLATE, Served, serving
from tests.support.jobs import following
from tests.support.pretrained import save_model
from tests.support.tinymodel import VOCAB

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
LONG = 300
"""New tokens of a sample: long enough to be told in several parts."""
BYTES = sorted(set("aé中😀 bcdefghijkl".encode()))
TOKENS = [bytes([byte]) for byte in BYTES] + [b"%d" % i for i in range(VOCAB - len(BYTES))]
"""The model says more broken characters than whole ones."""
TEXT = "aé中"


def model(directory: Path) -> Path:
    saved = save_model(directory, torch.float32, max_position_embeddings=20_000)
    save_tokenizer(saved, TOKENS)
    (saved / "chat_template.jinja").write_text(TEMPLATE)
    return saved


class Joined:
    """What the chunks of a stream say of each choice."""

    def __init__(self) -> None:
        self.text: dict[int, str] = defaultdict(str)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.ends: dict[int, str] = {}
        self.num_chunks = 0
        self.usage: Any = None

    async def read(self, stream: AsyncIterator[Any]) -> Joined:
        async for chunk in stream:
            self.num_chunks += 1
            assert self.usage is None, "the usage comes last"
            self.usage = chunk.usage
            for choice in chunk.choices:
                at = choice.index
                assert at not in self.ends
                if hasattr(choice, "delta"):
                    assert (choice.delta.role == "assistant") == (at not in self.text)
                    self.text[at] += choice.delta.content
                    self.logprobs[at] += [each.logprob for each in choice.logprobs.content]
                else:
                    self.text[at] += choice.text
                    self.logprobs[at] += choice.logprobs.token_logprobs
                    assert len(choice.logprobs.top_logprobs) == len(choice.token_ids)
                self.tokens[at] += choice.token_ids
                if choice.finish_reason:
                    self.ends[at] = choice.finish_reason
        return self

    def check(self, whole: Any) -> None:
        """It is what the answer without a stream says."""
        for choice in whole.choices:
            at = choice.index
            is_chat = hasattr(choice, "message")
            assert self.text[at] == (choice.message.content if is_chat else choice.text)
            assert self.tokens[at] == choice.token_ids
            assert self.ends[at] == choice.finish_reason
            own = (
                [each.logprob for each in choice.logprobs.content]
                if is_chat
                else choice.logprobs.token_logprobs
            )
            assert self.logprobs[at] == pytest.approx(own, abs=1e-4)
        assert len(whole.choices) == len(self.ends)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        saved = await asyncio.to_thread(model, directory / "long")
        async with serving(directory, long=saved) as running:
            yield running


async def test_streams_send_what_the_whole_answer_has_while_it_is_drawn(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key(), max_retries=0) as api:
        ids = {"return_token_ids": True}
        common: dict[str, Any] = {"model": "long", "n": 2, "seed": 5, "max_tokens": LONG}
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        asked = {**common, "prompt": [TEXT, "bcd"], "logprobs": 2, "extra_body": ids}

        whole = await api.completions.create(**asked)
        streamed = await Joined().read(await api.completions.create(**asked, **usage))
        streamed.check(whole)
        assert streamed.num_chunks > 8, "tokens come while they are drawn"
        assert streamed.usage == whole.usage
        said = whole.choices[0].text

        # Nothing of a stop string is told, be it cut over tokens and chunks or not.
        stop = next(
            said[at : at + 3] for at in range(40, LONG) if "\ufffd" not in said[at : at + 3]
        )
        stopped = {**asked, "stop": ["never said", stop]}
        whole = await api.completions.create(**stopped)
        assert whole.choices[0].text == said[: said.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        (await Joined().read(await api.completions.create(**stopped, stream=True))).check(whole)

        messages: Any = [{"role": "user", "content": TEXT}]
        asked = {**common, "messages": messages, "logprobs": True, "extra_body": ids}
        chat = await api.chat.completions.create(**asked)
        streamed = await Joined().read(await api.chat.completions.create(**asked, **usage))
        streamed.check(chat)
        assert streamed.usage == chat.usage

        headers = {"Authorization": f"Bearer {served.key()}"}
        tokens = {"model": "long", "token_ids": [3, 1], "stream": True}
        tokens |= {"sampling_params": {"max_tokens": LONG, "seed": 5}}
        async with (
            aiohttp.ClientSession(served.url, headers=headers) as http,
            http.post("/inference/v1/generate", json=tokens) as response,
        ):
            lines = [line.removeprefix(b"data: ").strip() async for line in response.content]
        assert lines[-2:] == [b"[DONE]", b""]
        events = [msgspec.json.decode(line) for line in lines[:-2] if line]
        plain: Any = await api.completions.create(
            model="long", prompt=[3, 1], seed=5, max_tokens=LONG, extra_body=ids
        )
        drawn = [token for each in events for token in each["choices"][0]["token_ids"]]
        assert drawn == plain.choices[0].token_ids
        assert events[-1]["choices"][0]["finish_reason"] == plain.choices[0].finish_reason


async def test_who_hangs_up_cancels_and_a_refusal_has_its_status(served: Served) -> None:
    async with (
        following(served.mesh) as log,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key(), max_retries=0) as api,
    ):
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await api.completions.create(model="long", prompt=[VOCAB], stream=True)

        endless: dict[str, Any] = {"model": "long", "prompt": TEXT, "max_tokens": 19_000}
        endless["extra_body"] = {"ignore_eos": True}
        stream = await api.completions.create(**endless, stream=True)
        async for _ in stream:
            break
        await stream.close()
        ended = await log.until(
            lambda event: (
                isinstance(event, OperationFinished) and event.outcome is Outcome.CANCELLED
            )
        )
        assert isinstance(ended, OperationFinished)

        # Who waits for a whole answer, too.
        waiting = asyncio.create_task(api.completions.create(**endless))
        queued = await log.until(
            lambda event: (
                isinstance(event, QueuedOperation)
                and event.kind == "generate"
                and (event.key.seq or 0) > (ended.key.seq or 0)
            )
        )
        assert isinstance(queued, QueuedOperation)
        waiting.cancel()
        await asyncio.wait([waiting])
        await log.until(
            lambda event: isinstance(event, CancelRequested) and event.key == queued.key
        )


async def test_sample_that_the_sdk_cancels_is_ended(served: Served) -> None:
    """The SDK says so when nobody waits for a sample any more, and was told that there is no such
    call."""
    headers = {"X-API-Key": served.key()}
    async with (
        following(served.mesh) as log,
        aiohttp.ClientSession(served.url, headers=headers) as http,
    ):

        async def post(call: str, **body: Any) -> Any:
            async with http.post(f"/api/v1/{call}", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        session = await post("create_session")
        asked = {**session, "sampling_session_seq_id": 0, "base_model": "long"}
        sampler = await post("create_sampling_session", **asked)
        await log.caught_up()
        earlier = {each.key for each in log.events if isinstance(each, QueuedOperation)}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        endless = {"max_tokens": 19_000, "stop": []}
        promise = await post("asample", **sampler, seq_id=0, prompt=prompt, sampling_params=endless)
        queued = await log.until(
            lambda event: (
                isinstance(event, QueuedOperation)
                and event.kind == "generate"
                and event.key not in earlier
            )
        )
        assert isinstance(queued, QueuedOperation)
        await post("cancel_future", request_id=promise["request_id"])
        await post("cancel_future", request_id="nothing")
        ended = await log.until(
            lambda event: isinstance(event, OperationFinished) and event.key == queued.key
        )
        assert isinstance(ended, OperationFinished)
        assert ended.outcome is Outcome.CANCELLED
        told = await post("retrieve_future", request_id=promise["request_id"])
        assert "error" in told


async def test_who_hangs_up_is_no_error_of_the_gateway(served: Served) -> None:
    """Each one left an exception in its log that nobody had looked at."""
    async with aiohttp.ClientSession(served.url) as http:
        asked = {"model": "tiny", "prompt": [1], "max_tokens": 40, "ignore_eos": True}
        headers = {"X-API-Key": served.key()}

        async def hang_up(seed: int) -> None:
            body = {**asked, "seed": seed, "stream": True}
            async with http.post("/v1/completions", json=body, headers=headers) as answer:
                await answer.content.readany()

        await asyncio.gather(*map(hang_up, range(64)))
        _, cut = await asyncio.open_connection("127.0.0.1", served.port)
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"X-API-Key: {served.key()}"]
        lines += ["Content-Length: 9", "", "{"]
        cut.write("\r\n".join(lines).encode())
        await cut.drain()
        cut.close()
        async with http.post("/v1/completions", json=asked, headers=headers) as answer:
            assert answer.status == 200
    files = (served.mesh.run_dir / "logs").glob("gateway-*.log")
    said = "".join([file.read_text() for file in files])
    assert '"level": "ERROR"' not in said
