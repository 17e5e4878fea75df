"""Renders chat templates as `transformers` does. Pure, but a template may need any time and memory:
the gateway renders them in worker processes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.text.files import DEFAULT_TEMPLATE
from phaseloom.gateway.core.bodies import MAX_TEXT_BYTES, decoded

_WITH_TOOLS = "tool_use"
"""Name of the chat template for requests with tools, if a model has several."""


class _Conversation(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def rendered_json(
    templates: dict[str, str], special: dict[str, str], conversation: bytes, with_tools: bool
) -> str:
    """Render a conversation as `rendered`.

    Args: conversation: as in `Body`.
          with_tools: whether the model may call the tools.
    """
    given = decoded(conversation, _Conversation)
    values = {**(given.chat_template_kwargs or {})}
    if given.tools and with_tools:
        values["tools"] = given.tools
    return rendered(templates, special, given.messages, values)


def rendered(
    templates: dict[str, str],
    special: dict[str, str],
    messages: list[dict[str, Any]],
    values: dict[str, Any],
) -> str:
    """Render a conversation, up to where the assistant speaks.

    Args:   templates, special: of the model's `TokenizerFacts`.
            values: additional values for the template.
    Raises: CallerError: the model has no chat template, the template does not support the given
            tools, or it refuses the messages or fails.
    """
    tools = values.get("tools")
    name = _WITH_TOOLS if tools and _WITH_TOOLS in templates else DEFAULT_TEMPLATE
    if name not in templates:
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
        template, variables = _compiled(templates[name])
        form = _content_form(templates[name], tuple(special.items()))
        if tools and "tools" not in variables:
            raise CallerError(
                "the model's chat template does not support tools",
                code=Code.FAILED_PRECONDITION,
                field="tools",
                remedy="tell of them in a message, or register the model with a template that does",
            )
        text = template.render(
            {
                "add_generation_prompt": True,
                **special,
                **values,
                "messages": [{**m, **_content(m, form)} for m in plain_messages],
            }
        )
        num_bytes = len(text.encode())
    except (CallerError, MemoryError):
        raise
    except Exception as error:  # a template may raise errors of any type
        raise CallerError(
            f"the chat template {name!r} refused the messages: "
            + (str(error) if isinstance(error, TemplateError) else repr(error)),
            field="messages",
            remedy="use the roles and fields that the model's template expects",
        ) from error
    if num_bytes > MAX_TEXT_BYTES:
        raise CallerError(
            f"the chat template {name!r} must render at most {MAX_TEXT_BYTES} bytes, "
            f"got {num_bytes}",
            field="messages",
            remedy="shorten the messages",
        )
    return text


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
