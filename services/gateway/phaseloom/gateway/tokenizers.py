"""The tokenizer of a registered model: text to tokens and back, and its chat template."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from phaseloom.common.contract.errors import CallerError, Code

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


class ModelTokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(self, directory: Path) -> None:
        """Raises: CallerError: the directory has no `tokenizer.json`."""
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library's own errors are plain Exceptions
            raise CallerError(
                f"the model {directory.name!r} has no tokenizer that can be read: {error}",
                code=Code.FAILED_PRECONDITION,
                field="model",
                remedy="give tokens, or register the model with its tokenizer.json",
            ) from error
        config = _json(directory / _CONFIG)
        template = config.get("chat_template")
        if (directory / _TEMPLATE).is_file():
            template = (directory / _TEMPLATE).read_text()
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and value
        }
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(template) if isinstance(template, str) else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def token(self, token: int) -> str:
        """The vocabulary's spelling of a token."""
        return self._tokenizer.id_to_token(token) or ""

    def chat(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> list[int]:
        """The tokens of a conversation, up to where the assistant speaks.

        Args:   values: further values for the template.
        Raises: CallerError: the model has no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise CallerError(
                "the model has no chat template",
                code=Code.FAILED_PRECONDITION,
                field="messages",
                remedy="use /v1/completions, or register the model with one",
            )
        try:
            text = self._template.render(
                {"add_generation_prompt": True, **self._special, **values, "messages": messages}
            )
        except (TemplateError, TypeError) as error:
            raise CallerError(
                f"the chat template refuses: {error}",
                field="messages",
                remedy="give the roles and fields that the model's template knows",
            ) from error
        return self.encode(text)


@lru_cache(maxsize=64)
def tokenizer_of(directory: str) -> ModelTokenizer:
    return ModelTokenizer(Path(directory))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _raise(message: str) -> None:
    raise TemplateError(message)
