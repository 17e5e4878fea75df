"""A registered model's tokenizer and chat template."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import web
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.common.process.diewithparent import launcher
from phaseloom.common.tensors.modelfiles import check_companions, is_companion
from phaseloom.common.text import files
from phaseloom.common.text.codec import TextCodec
from phaseloom.common.text.files import DEFAULT_TEMPLATE, TokenizerFacts

_MAX_TOKENIZERS = 64
_READ_S = 120.0
_WITH_TOOLS = "tool_use"
"""Name of the chat template for requests with tools, if a model has several."""


class ModelTokenizer(TextCodec):
    """The tokenizer and the chat templates of one model."""

    def __init__(self, facts: TokenizerFacts) -> None:
        super().__init__(facts)
        self._templates = facts.chat_templates
        self._special = facts.special_tokens

    def chat(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> list[int]:
        """Render and encode a conversation, up to where the assistant speaks.

        Args:   values: additional values for the template.
        Raises: CallerError: the model has no chat template, the template does not support the given
                 tools, or it refuses the messages.
        """
        tools = values.get("tools")
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else DEFAULT_TEMPLATE
        if name not in self._templates:
            raise CallerError(
                "the model has no chat template",
                code=Code.FAILED_PRECONDITION,
                field="messages",
                remedy="use /v1/completions, or register the model with one",
            )
        plain_messages = [
            _plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)
        ]
        try:
            template, variables = _compiled(self._templates[name])
            form = _content_form(self._templates[name], tuple(self._special.items()))
            if tools and "tools" not in variables:
                raise CallerError(
                    "the model's chat template does not support tools",
                    code=Code.FAILED_PRECONDITION,
                    field="tools",
                    remedy="tell of them in a message, or register the model with a template that "
                    "does",
                )
            text = template.render(
                {
                    "add_generation_prompt": True,
                    **self._special,
                    **values,
                    "messages": [{**m, **_content(m, form)} for m in plain_messages],
                }
            )
        except (TemplateError, TypeError) as error:
            raise CallerError(
                f"the chat template refused the messages: {error}",
                field="messages",
                remedy="use the roles and fields that the model's template expects",
            ) from error
        return self.encode(text)


class Tokenizers:
    """The tokenizers of models. Each is read once, by a process of its own."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[str, ...], ModelTokenizer] = {}
        self._locks: defaultdict[tuple[str, ...], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, base: RegisteredModel) -> ModelTokenizer:
        """Raises: CallerError: FAILED_PRECONDITION: the tokenizer cannot be read. ResourceError:
        DATA_LOSS: its files are not those that were registered."""
        hashes = (file.blake3 for file in base.directory.files if is_companion(file.name))
        key = (base.directory.path, *hashes)
        async with self._locks[key]:
            if key not in self._tokenizers:
                tokenizer = await _read(base)
                # After the reading: a change before it or meanwhile is found.
                await asyncio.to_thread(check_companions, base)
                if len(self._tokenizers) == _MAX_TOKENIZERS:
                    del self._tokenizers[next(iter(self._tokenizers))]
                self._tokenizers[key] = tokenizer
        return self._tokenizers[key]


TOKENIZERS = web.AppKey("tokenizers", Tokenizers)


async def _read(base: RegisteredModel) -> ModelTokenizer:
    process = await asyncio.create_subprocess_exec(
        *launcher([sys.executable, "-m", files.__name__, base.directory.path]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_READ_S):
            output, errors = await process.communicate()
        if process.returncode:
            raise ValueError(errors.decode(errors="replace").strip().rpartition("\n")[2])
        facts = msgspec.json.decode(output, type=TokenizerFacts)
        # The library raises plain Exceptions, and parsing a large file takes it a second.
        return await asyncio.to_thread(ModelTokenizer, facts)
    except Exception as error:
        raise CallerError(
            f"the tokenizer of model {base.name!r} cannot be read: {error or 'it takes too long'}",
            code=Code.FAILED_PRECONDITION,
            field="model",
            remedy="send tokens, or register the model with its tokenizer.json",
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _raise(message: str) -> None:
    raise TemplateError(message)


def _plain_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Convert JSON arguments of tool calls to objects.

    Raises: CallerError: a part of the content is not text, or arguments are not JSON.
    """
    message = dict(message)
    if isinstance(message.get("content"), list):
        for part in message["content"]:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise CallerError(
                    "only text is supported",
                    field=f"{field}.content",
                    remedy="remove images, sound and files",
                )
    if isinstance(message.get("tool_calls"), list):
        calls_field = f"{field}.tool_calls"
        message["tool_calls"] = [_call(part, calls_field) for part in message["tool_calls"]]
    return message


def _content(message: dict[str, Any], form: ContentForm) -> dict[str, Any]:
    """Return the field `content` of a message, if any, in a form that the template accepts."""
    content = message.get("content")
    if isinstance(content, list) and not form.has_parts:
        return {"content": "\n".join(part["text"] for part in content)}
    if isinstance(content, list):
        return {"content": [{**part, "type": "text"} for part in content]}
    if isinstance(content, str) and not form.has_text:
        return {"content": [{"type": "text", "text": content}]}
    return {}


def _call(call: Any, field: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise CallerError(
            f"the arguments of a tool call are not JSON: {error}",
            field=field,
            remedy="send them as the model produced them, or remove the call",
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


class _Generation(Extension):
    """Lets templates mark the assistant's own words with `{% generation %}`."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ContentForm:
    """The forms of a message's content that a chat template renders."""

    has_text: bool
    has_parts: bool
    """Whether it renders a list of parts, part by part."""


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[Template, set[str]]:
    """Compile a chat template as `transformers` does, and return it with the variables it reads.

    Raises: TemplateError: it is invalid.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json_text  # Jinja's own `tojson` escapes for HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source), find_undeclared_variables(environment.parse(source))


@lru_cache(maxsize=64)
def _content_form(source: str, special: tuple[tuple[str, str], ...]) -> ContentForm:
    """Render both forms of a content, to see which of them the template supports."""
    template, _ = _compiled(source)
    words = ["Ostrava", "Liberec"]
    parts = [{"type": "text", "text": word} for word in words]

    def renders(content: object) -> bool:
        message = {"role": "user", "content": content}
        with suppress(Exception):  # templates raise errors of any type
            values = {**dict(special), "messages": [message], "add_generation_prompt": True}
            text = template.render(values)
            # Written as a whole, a list would appear with its keys.
            keys = "'type':'text'" in text.replace('"', "'").replace(" ", "")
            return all(word in text for word in words) and not keys
        return False

    has_parts = renders(parts)
    return ContentForm(not has_parts or renders(" ".join(words)), has_parts)


def _json_text(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
