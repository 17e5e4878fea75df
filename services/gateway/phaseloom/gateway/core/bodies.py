"""The bodies of OpenAI's calls, and of the Tinker API's samples. Pure.

Large bodies are read by worker processes, so everything that a caller may make long leaves `read`
as bytes: prompts as texts or packed tokens, a conversation as JSON.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from phaseloom.client.batches import pack_prompt
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import Prompt

MAX_PROMPTS = 2048
MAX_TEXT_BYTES = 8 * 2**20
"""Maximum bytes of all texts of a request."""
_MAX_FIELDS_BYTES = 2**20
"""Maximum bytes of all other fields of a request."""
WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "user", "safety_identifier", "cache_salt"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("include_obfuscation", "detokenize", "spaces_between_special_tokens"),
    }
)
"""Fields that never change an answer and are ignored."""
NOTHING_ASKED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "continuous_usage_stats": (False,),
    "echo": (False,),
    "functions": ([],),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
}
"""Values, besides null, with which an unsupported field requests nothing."""
_Fields = dict[str, msgspec.Raw]
T = TypeVar("T")


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class Asked(msgspec.Struct, frozen=True):
    """Fields that completions and chat completions share."""

    model: str
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class Complete(Asked, frozen=True, kw_only=True):
    logprobs: int | None = None
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a text, such as the one at the beginning."""


class Chat(Asked, frozen=True, kw_only=True):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None


class TokenSampling(Asked, frozen=True, kw_only=True):
    """The `sampling_params` of a token request."""

    model: str = ""
    logprobs: int | None = None


class Tokens(msgspec.Struct, frozen=True):
    model: str
    sampling_params: TokenSampling = TokenSampling()
    request_id: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None


class GivenPrompt(msgspec.Struct, frozen=True):
    tokens: bytes = b""
    text: str | None = None
    """None: the prompt has tokens."""


class Body(msgspec.Struct, frozen=True):
    """A request: its short fields, and those that may be long."""

    fields: bytes
    """The request in JSON, whose numbers may have any size, without the long fields."""
    prompts: list[GivenPrompt] = []
    conversation: bytes = b""
    """A JSON object with `messages`, `tools` and `chat_template_kwargs`, not validated."""


_INNER: dict[str, type[msgspec.Struct]] = {
    "sampling_params": TokenSampling,
    "stream_options": StreamOptions,
}
"""Types of the fields that are objects themselves."""
_KINDS: dict[str, type[msgspec.Struct]] = {kind.__name__: kind for kind in (Complete, Chat, Tokens)}
_HAS_LONG: dict[type[msgspec.Struct], set[str]] = {
    Complete: {"prompt"},
    Chat: {"messages", "tools", "chat_template_kwargs"},
    Tokens: {"token_ids"},
}
"""The fields of each type that a caller may make long."""


def decoded(content: bytes, kind: type[T]) -> T:
    """Decode a JSON object. Raises: CallerError: it is invalid; names the field."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        message, _, location = str(error).partition(" - at `$")
        raise CallerError(message, field=location.strip("`.")) from error


def read(content: bytes, kind: str) -> Body:
    """Read the body of a request.

    Args:   kind: the name of its type, `Complete`, `Chat` or `Tokens`.
    Raises: CallerError: it is invalid or too large, or requests something unsupported; names the
            field.
    """
    of = _KINDS[kind]
    fields = _served(decoded(content or b"{}", _Fields), of, "")
    long = {name: fields.pop(name) for name in _HAS_LONG[of] & fields.keys()}
    short = msgspec.json.encode(decoded(msgspec.json.encode(fields), of))
    check_short(short, fields)
    if kind == "Chat":
        return Body(short, conversation=msgspec.json.encode(long))
    field = "prompt" if kind == "Complete" else "token_ids"
    return Body(short, _prompts(long.get(field), field))


def check_short(content: bytes, fields: dict[str, Any]) -> None:
    """Raises: CallerError: the fields of a request are too large together; names the largest."""
    if len(content) > _MAX_FIELDS_BYTES:
        largest = max(fields, key=lambda name: len(msgspec.json.encode(fields[name])))
        raise CallerError(
            f"the fields of a request must have at most {_MAX_FIELDS_BYTES} bytes, "
            f"got {len(content)}",
            field=largest,
            remedy=f"shorten {largest}",
        )


def fields_of(content: bytes, module: str, name: str) -> bytes:
    """Read the body of a request of the Tinker API. Returns: it in JSON.

    Args:   module, name: its type.
    Raises: CallerError: it is invalid or too large; names the field.
    """
    request = decoded(content, getattr(importlib.import_module(module), name))
    short = msgspec.json.encode(request)
    check_short(short, msgspec.structs.asdict(request))
    return short


def _prompts(raw: msgspec.Raw | None, field: str) -> list[GivenPrompt]:
    """Return the prompts of a request.

    Raises: CallerError: the field is neither a prompt nor a list of prompts, or has too many.
    """
    if raw is None:
        raise CallerError(
            f"Object missing required field `{field}`", field=field, remedy=f"send `{field}`"
        )
    prompt = decoded(bytes(raw), object)
    single: Any = str | list[int] if field == "prompt" else list[int]
    kinds: tuple[Any, ...] = (single, list[str], list[list[int]])
    for kind in kinds[: 3 if field == "prompt" else 1]:
        with suppress(msgspec.ValidationError):
            prompts: Any = msgspec.convert(prompt, kind)
            return _packed([prompts] if kind is single else prompts, field)
    raise CallerError(
        "expected a list of tokens"
        + (", a text, or a list of one of these" if field == "prompt" else ""),
        field=field,
        remedy="give token ids, which are integers",
    )


def _packed(prompts: list[str | list[int]], field: str) -> list[GivenPrompt]:
    num_bytes = sum(len(prompt.encode()) for prompt in prompts if isinstance(prompt, str))
    if len(prompts) > MAX_PROMPTS or num_bytes > MAX_TEXT_BYTES:
        raise CallerError(
            f"a request must have at most {MAX_PROMPTS} prompts and {MAX_TEXT_BYTES} bytes of "
            f"text, got {len(prompts)} prompts and {num_bytes} bytes",
            field=field,
            remedy="send several requests, or shorten the text",
        )
    return [
        GivenPrompt(text=prompt)
        if isinstance(prompt, str)
        else GivenPrompt(bytes(pack_prompt(Prompt(prompt), field).tokens))
        for prompt in prompts
    ]


def _served(given_fields: _Fields, kind: type[msgspec.Struct], prefix: str) -> dict[str, Any]:
    """Return the supported fields of an object that are not null.

    Args:   kind: the type of the object.
            prefix: prefix of its fields' names in errors.
    Raises: CallerError: an unsupported field requests something.
    """
    names = {*kind.__struct_fields__, *_HAS_LONG.get(kind, ())}
    fields: dict[str, Any] = {}
    for name, value in given_fields.items():
        field = prefix + name
        if bytes(value) == b"null" or name in WITHOUT_EFFECT:
            continue
        if name in _INNER and name in names:
            fields[name] = _served(decoded(bytes(value), _Fields), _INNER[name], f"{field}.")
        elif name in names:
            fields[name] = value
        elif decoded(bytes(value), object) not in NOTHING_ASKED.get(name, ()):
            raise CallerError(
                f"{field} is not supported",
                field=field,
                remedy="omit it; docs/gateway.md lists the supported arguments",
            )
    return fields
