"""A registered model's tokenizer and chat template."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from phaseloom.common.contract.errors import CallerError, Code

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
"""Names of a model's chat templates, if it has several."""


class ModelTokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(self, directory: Path) -> None:
        """Raises: CallerError: the directory has no `tokenizer.json`."""
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exceptions
            raise CallerError(
                f"the tokenizer of model {directory.name!r} cannot be read: {error}",
                code=Code.FAILED_PRECONDITION,
                field="model",
                remedy="send tokens, or register the model with its tokenizer.json",
            ) from error
        config = _json(directory / _CONFIG)
        templates = config.get("chat_template") or []
        if (directory / _TEMPLATE).is_file():
            templates = (directory / _TEMPLATE).read_text()
        several = (
            [{"name": _DEFAULT, "template": templates}] if isinstance(templates, str) else templates
        )
        self._templates: dict[str, str] = {entry["name"]: entry["template"] for entry in several}
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and value
        }

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Encode a text. Args: special: add special tokens, such as the initial one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def token(self, token: int) -> str:
        """Return the vocabulary's spelling of a token."""
        return self._tokenizer.id_to_token(token) or ""

    def chat(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> list[int]:
        """Render and encode a conversation, up to where the assistant speaks.

        Args:   values: additional values for the template.
        Raises: CallerError: the model has no chat template, the template does not support the given
                 tools, or it refuses the messages.
        """
        tools = values.get("tools")
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT
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
                    "messages": plain_messages,
                }
            )
        except (TemplateError, TypeError) as error:
            raise CallerError(
                f"the chat template refused the messages: {error}",
                field="messages",
                remedy="use the roles and fields that the model's template expects",
            ) from error
        return self.encode(text)


@lru_cache(maxsize=64)
def tokenizer_of(directory: str) -> ModelTokenizer:
    return ModelTokenizer(Path(directory))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _raise(message: str) -> None:
    raise TemplateError(message)


def _plain_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Convert a message for chat templates: its content to one text, and JSON arguments of tool
    calls to objects.

    Raises: CallerError: a part of the content is not text, or arguments are not JSON.
    """
    message = dict(message)
    if isinstance(message.get("content"), list):
        parts = [part.get("text") for part in message["content"] if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(message["content"]):
            raise CallerError(
                "only text is supported",
                field=f"{field}.content",
                remedy="remove images, sound and files",
            )
        message["content"] = "\n".join(texts)
    if isinstance(message.get("tool_calls"), list):
        calls_field = f"{field}.tool_calls"
        message["tool_calls"] = [_call(part, calls_field) for part in message["tool_calls"]]
    return message


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
