"""Chat templates, rendered as `transformers` renders them."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from phaseloom.common.contract.arrays import int32s
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.specs import ModelDirectory, ModelFile, RegisteredModel
from phaseloom.common.tensors.modelfiles import file_blake3
from phaseloom.common.text.codec import TextCodec
from phaseloom.common.text.files import TokenizerFacts, read_tokenizer
from phaseloom.gateway.core.templates import rendered
from phaseloom.gateway.tokenizers import Tokenizers

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "It's <b> & 'é'",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CALL = {"name": "look", "arguments": {"at": "it's"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <short>."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
]
TEMPLATE = """{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ tools | tojson(indent=2) }}{% endif %}
{% for message in messages %}
{% if loop.index > 3 %}{% break %}{% endif %}
{{ message.role + ':' + message.content }}
{% if message.tool_calls %}
{% generation %}
{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}
{% endgeneration %}
{% endif %}
{% endfor %}
{{ strftime_now('%Y')[:2] }}{% if add_generation_prompt %}assistant:{% endif %}"""


def chat(
    facts: TokenizerFacts, messages: list[dict[str, Any]], values: dict[str, Any]
) -> list[int]:
    text = rendered(facts.chat_templates, facts.special_tokens, messages, values)
    return TextCodec(facts).encode(text)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    vocabulary = {each: number for number, each in enumerate(["<s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    fast: Any = PreTrainedTokenizerFast
    saved = fast(tokenizer_object=tokenizer, bos_token="<s>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(tmp_path)
    return tmp_path


def test_template_is_rendered_as_transformers_does(directory: Path) -> None:
    factory: Any = PreTrainedTokenizerFast
    expected = factory.from_pretrained(directory).apply_chat_template(
        MESSAGES, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    tokenizer = read_tokenizer(directory)
    assert chat(tokenizer, MESSAGES, {"tools": TOOLS}) == expected
    # OpenAI's clients send parts of text, and the arguments of calls as JSON.
    as_sent: Any = [
        MESSAGES[0],
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {
            **MESSAGES[2],
            "tool_calls": [
                {"type": "function", "function": {**CALL, "arguments": '{"at": "it\'s"}'}}
            ],
        },
    ]
    assert chat(tokenizer, as_sent, {"tools": TOOLS}) == expected


def test_what_a_template_cannot_tell_is_refused(directory: Path) -> None:
    def refused(messages: list[dict[str, Any]], values: dict[str, Any], field: str) -> None:
        with pytest.raises(CallerError) as caught:
            chat(read_tokenizer(directory), messages, values)
        assert caught.value.info.field == field
        assert caught.value.info.remedy

    image = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    refused([{"role": "user", "content": image}], {}, "messages[0].content")
    call = {"function": {"name": "look", "arguments": "{"}}
    refused([*MESSAGES, {"tool_calls": [call]}], {}, "messages[3].tool_calls")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    refused(MESSAGES, {"tools": TOOLS}, "tools")
    (directory / "chat_template.jinja").write_text("{% if %}")
    refused(MESSAGES, {}, "messages")
    (directory / "chat_template.jinja").unlink()
    refused(MESSAGES, {}, "messages")


def test_tools_have_a_template_of_their_own_where_a_model_has_one(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    two = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b{{ tools }}"}]
    factory: Any = PreTrainedTokenizerFast
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": two}))
    expected = factory.from_pretrained(directory).apply_chat_template
    tokenizer = read_tokenizer(directory)
    for tools in (None, TOOLS):
        told = expected(MESSAGES, tools=tools, add_generation_prompt=True, return_dict=False)
        assert chat(tokenizer, MESSAGES, {"tools": tools} if tools else {}) == told


def test_text_has_the_tokens_that_begin_one_where_asked_for(directory: Path) -> None:
    tokenizer = TextCodec(read_tokenizer(directory))
    assert tokenizer.encode("a", special=True) == [0, *tokenizer.encode("a")]


PARTS = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
ITERATES = (
    "{{ bos_token + 'x' }}{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ said(m.content) }}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TRIMS = "{% for m in messages %}{{ m['content'] | trim + '.' }}{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}"


@pytest.mark.parametrize("template", [ITERATES, MACRO, PARTS_ONLY])
def test_template_that_goes_through_parts_gets_them(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    factory: Any = PreTrainedTokenizerFast
    theirs = factory.from_pretrained(directory).apply_chat_template
    tokenizer = read_tokenizer(directory)
    messages: list[dict[str, Any]] = [{"role": "user", "content": PARTS}]
    assert chat(tokenizer, messages, {}) == theirs(messages, return_dict=False)
    text = [{"role": "user", "content": "a b"}]
    in_one = [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]
    assert chat(tokenizer, text, {}) == theirs(in_one, return_dict=False)


@pytest.mark.parametrize("template", [TEXT_ONLY, TRIMS, AS_JSON, TEMPLATE])
def test_other_templates_get_one_text(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    factory: Any = PreTrainedTokenizerFast
    theirs = factory.from_pretrained(directory).apply_chat_template
    tokenizer = read_tokenizer(directory)
    joined = theirs(
        [{"role": "user", "content": " a \nb"}], add_generation_prompt=True, return_dict=False
    )
    assert chat(tokenizer, [{"role": "user", "content": PARTS}], {}) == joined


def registered(directory: Path) -> RegisteredModel:
    files = [ModelFile(path.name, 1, file_blake3(path)) for path in directory.iterdir()]
    return RegisteredModel("m", ModelDirectory(str(directory), files), {}, 0, [])


async def test_tokenizer_is_read_once_and_again_after_a_failure(directory: Path) -> None:
    base = registered(directory)
    content = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text("{")
    async with Tokenizers() as tokenizers:
        with pytest.raises(CallerError) as raised:
            await tokenizers.of(base)
        assert raised.value.info.field == "model"
        assert raised.value.info.code is Code.FAILED_PRECONDITION
        (directory / "tokenizer.json").write_text(content)
        first, second = await asyncio.gather(tokenizers.of(base), tokenizers.of(base))
        assert first is second
        (directory / "tokenizer.json").write_text(content + "\n")
        assert await tokenizers.of(registered(directory)) is not first, "its files differ"


async def test_files_that_differ_from_the_registered_ones_are_a_loss(directory: Path) -> None:
    """A gateway that starts later must not speak with other tokens."""
    model, file = registered(directory), directory / "tokenizer_config.json"
    file.write_text(file.read_text() + "\n")
    async with Tokenizers() as tokenizers:
        with pytest.raises(ResourceError, match=file.name) as lost:
            await tokenizers.of(model)
    assert lost.value.info.code is Code.DATA_LOSS


async def test_texts_are_encoded_and_decoded_as_in_one_process(directory: Path) -> None:
    codec = TextCodec(read_tokenizer(directory))
    texts = ["", "hello", "a b" * 9999, "\x00é"]
    async with Tokenizers() as tokenizers:
        tokenizer = await tokenizers.of(registered(directory))
        for special in (False, True):
            packed = await tokenizer.encode(texts, 99_999, "acme", special=special)
            assert [*map(int32s, packed)] == [codec.encode(t, special=special) for t in texts]
        tokens = [*codec.encode(texts[2], special=True), 10_000]
        for special in (False, True):
            assert tokenizer.decode(tokens, special=special) == codec.decode(
                tokens, special=special
            )
            assert tokenizer.visible(tokens, special=special) == codec.visible(
                tokens, special=special
            )
        with pytest.raises(CallerError, match="a prompt must have at most 9 tokens, got about"):
            await tokenizer.encode(texts, 9, "acme")


def processes_of(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


async def test_text_is_encoded_again_if_its_process_is_killed(directory: Path) -> None:
    base, text = registered(directory), "a b" * 300_000
    async with Tokenizers() as tokenizers:
        tokenizer = await tokenizers.of(base)
        (server,) = processes_of(os.getpid())
        for victims in (processes_of(server), [server]):
            encoding = asyncio.create_task(tokenizer.encode([text], len(text), "acme"))
            await tokenizer.encode(["a"], 9, "other")  # the long text's process works now
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            (packed,) = await encoding
            assert len(packed) == 4 * len(text)
        (server,) = processes_of(os.getpid())
        workers = [os.pidfd_open(pid) for pid in processes_of(server)]
        os.kill(server, signal.SIGKILL)
        for worker in workers:  # until it has ended, it knows the old tokenizer
            assert (await asyncio.to_thread(select.select, [worker], [], [], 60))[0]
            os.close(worker)
        file = directory / "tokenizer.json"
        file.write_text(file.read_text().replace('"a"', '"ä"'))
        with pytest.raises(ResourceError, match="differs") as lost:
            await tokenizer.encode(["a"], 9, "acme")
        assert lost.value.info.code is Code.DATA_LOSS


async def processor_s(work: Awaitable[object]) -> float:
    """The processor time that this process uses until some work is done: its loop cannot stand
    still for longer."""
    start_s = time.process_time()
    await work
    return time.process_time() - start_s


async def test_loop_runs_while_a_large_tokenizer_is_loaded(tmp_path: Path) -> None:
    vocabulary = {f"w{number:07}": number for number in range(150_000)}
    large = Tokenizer(models.WordLevel(vocabulary, unk_token="w0000000"))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    large.save(str(tmp_path / "tokenizer.json"))
    facts = TokenizerFacts(large.to_str(), {}, {}, False, False)
    async with Tokenizers() as tokenizers:
        used_s = await processor_s(tokenizers.of(registered(tmp_path)))
        tokenizer = await tokenizers.of(registered(tmp_path))
        assert tokenizer.decode([149_999]) == "w0149999"
    assert await processor_s(asyncio.to_thread(TextCodec, facts)) > 4 * used_s
