"""OpenAI's API, as its unmodified client uses it, on a whole mesh; and what becomes of a session of
the Tinker API whose program is gone, for which this mesh does not wait long."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerFast
from yarl import URL

from phaseloom import client
from phaseloom.cli import models as registry
from tests.support.bytetokens import llama
from tests.support.directories import short_directory
from tests.support.gateway import OTHER, Served, serving
from tests.support.jobs import TENANT, tenant
from tests.support.pretrained import save_model

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
PROMPT = [1, 5, 9]
MESSAGES: Any = [{"role": "user", "content": "w1 w5"}, {"role": "user", "content": "w9"}]
IDS: dict[str, Any] = {"return_token_ids": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 4096}
        large = await asyncio.to_thread(save_model, directory / "large-model", **sizes)
        words = await asyncio.to_thread(save_model, directory / "words-model")
        llama().save(str(words / "tokenizer.json"))
        async with serving(directory, session_s=2.0, large=large, words=words) as running:
            yield running


def check_logprobs(choice: Any, *, num_top: int) -> None:
    """Check a completion's fields against its text."""
    fields = choice.logprobs
    assert "".join(fields.tokens) == choice.text
    for i, (text, likeliest) in enumerate(zip(fields.tokens, fields.top_logprobs, strict=True)):
        assert likeliest[text] == fields.token_logprobs[i]
        is_among = likeliest[text] in sorted(likeliest.values())[-num_top:]
        assert len(likeliest) == num_top + (not is_among)
        assert choice.text[fields.text_offset[i] :].startswith(text)


async def test_completions_are_what_the_mesh_draws(served: Served) -> None:
    """By tokens, by text and as a chat it is one prompt, with one answer."""
    async with (
        tenant(served.mesh) as mesh,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key()) as api,
    ):
        model = client.ModelSpec(registered="tiny")
        trainer = client.DeploymentSpec("trainer", "train", "fsdp", model, trainable=True)
        scorer_spec = client.DeploymentSpec("scorer", "rollout", "sampler", model)
        job = await mesh.submit_job("mine", [scorer_spec, trainer])
        scorer = job.deployment("scorer")
        sampling = client.SamplingParams(6, temperature=0.8, top_k=5)
        expected = (await scorer.generate([client.Prompt(PROMPT, seed=11)], sampling, 2)).sequences[
            0
        ]

        assert sorted(each.id for each in (await api.models.list()).data) == [
            "large",
            "tiny",
            "words",
        ]
        common: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0.8}
        common |= {"n": 2, "seed": 11}
        extra = {**IDS, "top_k": 5}
        answers: list[Any] = [
            await api.completions.create(prompt=prompt, logprobs=3, extra_body=extra, **common)
            for prompt in (PROMPT, "w1 w5 w9")
        ]
        for answer in answers:
            for choice, sequence in zip(answer.choices, expected, strict=True):
                tokens = client.int32s(sequence.tokens)
                assert choice.token_ids == tokens
                assert choice.prompt_token_ids == PROMPT
                assert choice.text.split() == [f"w{token}" for token in tokens]
                assert choice.logprobs.token_logprobs == client.float32s(sequence.logprobs)
                check_logprobs(choice, num_top=3)
                assert choice.finish_reason == sequence.stop_reason
            assert answer.usage.prompt_tokens == 3
            assert answer.usage.completion_tokens == 12
            drew = answer.system_fingerprint.removeprefix(f"{TENANT}.")
            assert (await mesh.status(drew)).state == "active"

        # The log-probabilities are those that the trainer finds.
        tokens = [*PROMPT, *client.int32s(expected[0].tokens)]
        scored = await job.deployment("trainer").forward([client.Datum(tokens[:-1], tokens[1:])])
        own = client.float32s(scored.logprobs[0])[len(PROMPT) - 1 :]
        told = answers[0].choices[0].logprobs.token_logprobs
        assert max(abs(a - b) for a, b in zip(own, told, strict=True)) <= 2e-6

        chat: Any = await api.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body=extra, **common
        )
        assert chat.prompt_token_ids == PROMPT
        for choice, sequence in zip(chat.choices, expected, strict=True):
            assert choice.token_ids == client.int32s(sequence.tokens)
            assert choice.message.role == "assistant"
            logprobs = [each.logprob for each in choice.logprobs.content]
            assert logprobs == client.float32s(sequence.logprobs)
            content = choice.logprobs.content
            assert [len(each.top_logprobs) for each in content] == [2] * 6
            assert (
                b"".join(bytes(each.bytes) for each in content).decode() == choice.message.content
            )

        headers = {"Authorization": f"Bearer {served.key()}"}
        params = {"n": 2, "seed": 11, "max_tokens": 6, "temperature": 0.8, "top_k": 5}
        asked = {"model": "tiny", "token_ids": PROMPT, "sampling_params": params}
        async with (
            aiohttp.ClientSession(served.url, headers=headers) as http,
            http.post("/inference/v1/generate", json=asked) as response,
        ):
            for choice, sequence in zip((await response.json())["choices"], expected, strict=True):
                assert choice["token_ids"] == client.int32s(sequence.tokens)
                values = [each["logprob"] for each in choice["logprobs"]["content"]]
                assert values == client.float32s(sequence.logprobs)

        several = await api.completions.create(prompt=[PROMPT, PROMPT[:2]], **common)
        assert [each.index for each in several.choices] == [0, 1, 2, 3]
        stopped: Any = await api.completions.create(
            prompt=PROMPT,
            model="tiny",
            max_tokens=6,
            temperature=0.0,
            extra_body={**IDS, "stop_token_ids": list(range(29))},
        )
        assert (len(stopped.choices[0].token_ids), stopped.choices[0].finish_reason) == (1, "stop")


async def test_text_and_stop_strings_are_those_of_transformers(served: Served) -> None:
    """The decoder drops a leading space, tokens are parts of characters, and others have no
    text."""
    factory: Any = PreTrainedTokenizerFast
    theirs = factory(tokenizer_object=llama())
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key()) as api:
        common: dict[str, Any] = {"model": "words", "prompt": "a", "seed": 2, "max_tokens": 24}

        def text_of(tokens: list[int]) -> str:
            before = theirs.decode(prompt, skip_special_tokens=True)
            text = theirs.decode([*prompt, *tokens], skip_special_tokens=True)
            return str(text[len(before) :])

        whole: Any = (await api.completions.create(extra_body=IDS, **common)).choices[0]
        prompt, tokens = whole.prompt_token_ids, whole.token_ids
        assert prompt == theirs("a")["input_ids"]
        assert whole.text == text_of(tokens)
        starts = [i for i in range(1, len(whole.text) - 3) if "\ufffd" not in whole.text[i : i + 3]]
        assert starts
        for stop in {whole.text[i : i + 3] for i in starts[::2]}:
            answer: Any = await api.completions.create(stop=["zz", stop], extra_body=IDS, **common)
            stopped = answer.choices[0]
            lengths = range(1, len(tokens) + 1)
            length = next(n for n in lengths if stop in text_of(tokens[:n]))
            assert stopped.token_ids == tokens[:length]
            assert (stopped.text, stopped.finish_reason) == (whole.text.split(stop)[0], "stop")


async def test_streamed_logprobs_and_stop_strings_are_those_of_the_whole_answer(
    served: Served,
) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key()) as api:
        common: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "seed": 4, "max_tokens": 8}
        whole: Any = (await api.completions.create(logprobs=0, **common)).choices[0]
        assert [[*top] for top in whole.logprobs.top_logprobs] == [
            [t] for t in whole.logprobs.tokens
        ]
        words = whole.text.split()
        stop = f" {words[2]}"
        end = whole.text.index(stop)
        for included in (False, True):
            extra = {"include_stop_str_in_output": included}
            stopped: dict[str, Any] = {"stop": ["never", stop], "extra_body": extra, "logprobs": 2}
            one: Any = (await api.completions.create(**stopped, **common)).choices[0]
            assert one.finish_reason == "stop"
            assert one.text == whole.text[: end + len(stop) * included]
            stream: Any = await api.completions.create(stream=True, **stopped, **common)
            chunks = [chunk.choices[0] async for chunk in stream]
            assert "".join(chunk.text for chunk in chunks) == one.text
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                parts = [getattr(chunk.logprobs, name) for chunk in chunks]
                assert [*chain.from_iterable(parts)] == getattr(one.logprobs, name)


async def test_model_that_no_device_has_room_for_is_refused_at_once(served: Served) -> None:
    """It was told as a lack of room at the moment (429), so that clients asked again by themselves,
    and each time its ranks were started anew."""
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key()) as api:
        assert api.max_retries > 0
        with pytest.raises(openai.BadRequestError, match="device 0, which has 16777216") as caught:
            await api.completions.create(model="large", prompt=PROMPT)
    assert caught.value.param == "model"
    assert "raise `devices` of the node" in str(caught.value)
    [name] = re.findall(r"(\S+) needs \d+ bytes", str(caught.value))
    log = (served.mesh.run_dir / "logs" / "worker-rollout-0.log").read_text()
    starts = [line for line in log.splitlines() if name in line and "starts, pid" in line]
    assert len(starts) == 1


async def test_mistakes_are_told_as_openai_tells_them(served: Served) -> None:
    async with (
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="tml-x", max_retries=0) as stranger,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key(), max_retries=0) as api,
    ):
        with pytest.raises(openai.AuthenticationError, match="no such API key"):
            await stranger.models.list()
        for model in ("none", "", "../tiny", "tinker://a/sampler_weights/b", "a b"):
            with pytest.raises(openai.NotFoundError) as unknown:
                await api.completions.create(model=model, prompt=PROMPT)
            assert isinstance(unknown.value.body, dict)
            assert unknown.value.body["type"] == "not_found_error"
        bad: list[dict[str, Any]] = [
            {"prompt": [1] * 64},
            {"prompt": []},
            {"prompt": [29]},
            {"prompt": [-1]},
            {"prompt": PROMPT, "n": 0},
            {"prompt": PROMPT, "temperature": -1.0},
            {"prompt": PROMPT, "top_p": 2.0},
            {"prompt": PROMPT, "max_tokens": -1},
            {"prompt": PROMPT, "echo": True},
            {"prompt": PROMPT, "extra_body": {"stop": 5}},
            {"prompt": PROMPT, "extra_body": {"min_p": "much"}},
        ]
        for fields in bad:
            with pytest.raises(openai.BadRequestError) as refused:
                await api.completions.create(model="tiny", **fields)
            assert isinstance(refused.value.body, dict)
            assert refused.value.body["message"], fields
        again: list[tuple[dict[str, Any], str]] = [
            ({"n": 0}, "n"),
            ({"max_tokens": 0}, "args.sampling.max_tokens"),
        ]
        for fields, name in again:
            with pytest.raises(openai.BadRequestError) as refused:
                await api.completions.create(model="tiny", prompt=PROMPT, **fields)
            assert refused.value.param == name
        with pytest.raises(openai.BadRequestError, match="messages"):
            await api.chat.completions.create(model="tiny", messages=5)  # type: ignore[call-overload]
        good = await api.completions.create(model="tiny", prompt=PROMPT, max_tokens=2)
        assert good.usage is not None
        assert good.usage.completion_tokens == 2


async def test_what_is_not_served_is_refused_by_its_name(served: Served) -> None:
    """It was passed over: who asked for JSON, or for a token never to be said, was answered as if
    that had been done."""
    shared: dict[str, Any] = {
        "logit_bias": {"5": -100},
        "frequency": 1.0,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "stream_options": {"continuous_usage_stats": True},
        "structured_outputs": {"choice": ["w1", "w2"]},
    }
    chats: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "functions": [{"name": "look"}],
        "modalities": ["audio"],
        "reasoning_effort": "high",
        "top_logprobs": 2,
        "web_search_options": {},
        "store": True,
        "continue_final_message": True,
    }
    texts: dict[str, Any] = {"suffix": "w1", "best_of": 3, "echo": True, "max_completion_tokens": 2}
    nothing: dict[str, Any] = {
        "logit_bias": {},
        "user": "me",
        "n": None,
        "stream": None,
        "seed": None,
        "stop": None,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "stream_options": {"include_usage": False, "include_obfuscation": False},
    }
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key(), max_retries=0) as api:

        async def completed(**more: Any) -> Any:
            asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
            return await api.completions.create(**asked, extra_body=more)

        async def chatted(**more: Any) -> Any:
            asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
            return await api.chat.completions.create(**asked, extra_body=more)

        for call, fields in ((completed, shared | texts), (chatted, shared | chats)):
            for name, value in fields.items():
                with pytest.raises(openai.BadRequestError) as refused:
                    await call(**{name: value})
                param = refused.value.param or ""
                assert param.partition(".")[0] == name
                assert isinstance(refused.value.body, dict)
                assert f"(field {param})" in refused.value.body["message"]
            assert (await call(**nothing)).usage.completion_tokens == 2
        unused = {"tools": chats["tools"], "tool_choice": "none", "parallel_tool_calls": True}
        assert (await chatted(**unused)).usage.completion_tokens == 2
        parts = [{"role": "user", "content": [{"type": "text", "text": "w1 w5"}]}]
        in_parts: Any = await chatted(messages=[*parts, MESSAGES[1]], **IDS)
        assert in_parts.prompt_token_ids == PROMPT
        assert (await api.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("none")

    headers = {"Authorization": f"Bearer {served.key()}"}
    asked: dict[str, Any] = {"model": "tiny", "token_ids": PROMPT}
    async with aiohttp.ClientSession(served.url, headers=headers) as http:

        async def generated(**params: Any) -> tuple[int, Any]:
            body = {**asked, "sampling_params": {"max_tokens": 2, **params}}
            async with http.post("/inference/v1/generate", json=body) as answer:
                return answer.status, await answer.json()

        status, told = await generated(prompt_logprobs=1)
        assert (status, told["error"]["param"]) == (400, "sampling_params.prompt_logprobs")
        status, told = await generated(logprobs=3, min_tokens=0)
        [choice] = told["choices"]
        assert [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]] == [3, 3]


async def test_models_of_a_program_that_is_gone_are_ended(served: Served) -> None:
    async with (
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


HUB_NAME = "Org/Tiny-1.5:v1"


async def test_model_with_a_hub_id_is_served_by_it(served: Served) -> None:
    run_dir = served.mesh.run_dir
    directory = Path(served.mesh.config.models["tiny"])
    await asyncio.to_thread(registry.add, HUB_NAME, directory, run=run_dir)
    async with (
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key()) as api,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {served.key()}"}) as http,
    ):
        assert HUB_NAME in [model.id for model in (await api.models.list()).data]
        for path, status in (
            ("Org/Tiny-1.5:v1", 200),
            ("Org%2FTiny-1.5%3Av1", 200),
            ("org/Tiny-1.5:v1", 404),
            ("Org.Tiny-1.5:v1", 404),
            ("Org=2FTiny-1=2E5=3Av1", 404),
            ("x/..%2FOrg%2FTiny-1.5:v1", 404),
        ):
            url = URL(f"{served.url}/v1/models/{path}", encoded=True)
            async with http.get(url) as answer:
                assert (answer.status, path) == (status, path)
        common: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, "seed": 3}
        texts = [
            (await api.chat.completions.create(model=name, **common)).choices[0].message.content
            for name in (HUB_NAME, "tiny")
        ]
        assert texts[0] == texts[1]
    await asyncio.to_thread(registry.remove, HUB_NAME, run=run_dir)


async def test_checkpoints_of_controllers_are_listed_and_sampled(served: Served) -> None:
    model = client.ModelSpec(registered="tiny")
    adapted = client.ModelSpec(registered="tiny", adapter=client.Adapter(rank=2))
    common: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0}
    async with (
        tenant(served.mesh) as mesh,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key()) as api,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key(OTHER)) as stranger,
    ):

        async def sampled(name: str) -> list[int]:
            answer: Any = await api.completions.create(model=name, extra_body=IDS, **common)
            tokens: list[int] = answer.choices[0].token_ids
            return tokens

        job = await mesh.submit_job(
            "native",
            [
                client.DeploymentSpec("whole", "train", "fsdp", model, trainable=True),
                client.DeploymentSpec("adapter", "train", "fsdp", adapted, trainable=True),
                client.DeploymentSpec("scorer", "rollout", "sampler", model),
            ],
        )

        async def save(name: str, tokens: list[int], rate: float, **options: Any) -> None:
            trained = job.deployment(name)
            lesson = client.Datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))
            for _ in range(3):
                trained.forward_backward([lesson], "cross_entropy")
                trained.optim_step(client.AdamParams(rate))
            await trained.save_state("best", **options)

        await save("whole", [*PROMPT, 2, 7, 3, 8], 0.1)
        await save("adapter", [*PROMPT, 2, 7, 3, 8], 0.1)
        names = [f"checkpoint:native/{name}/best" for name in ("whole", "adapter")]
        listed = [each.id for each in (await api.models.list()).data]
        assert {*names} <= {*listed}
        assert not [each for each in listed if ":base-" in each], "the gateway's own samplers"
        scorer = job.deployment("scorer")

        async def expected() -> list[int]:
            scorer.load_state("best", source="native/whole", optimizer=False)
            greedy = client.SamplingParams(6, temperature=0.0)
            drawn = await scorer.generate([client.Prompt(PROMPT, seed=1)], greedy)
            return client.int32s(drawn.sequences[0][0].tokens)

        base = await sampled("tiny")
        first = await sampled(names[0])
        assert first == await expected() != base
        assert await sampled(names[1]) != base

        # Another checkpoint of the same name has other weights.
        await save("whole", [*PROMPT, 8, 8, 8, 8], 0.3, overwrite=True)
        assert await sampled(names[0]) == await expected() != first

        others = [each.id for each in (await stranger.models.list()).data]
        assert others == [each for each in listed if not each.startswith("checkpoint:")]
        for name in (*names, "checkpoint:native/whole/none", "checkpoint:../x/y", "checkpoint:"):
            for caller in (stranger, *([] if name in names else [api])):
                with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                    await caller.completions.create(model=name, **common)
        await job.finish()
