"""Configuration: one frozen struct per service, read from a TOML file and the environment.

Only this module reads the environment. A value has three sources, and later ones win: the field's
default; the table `[<section>]` of the TOML file named by PHASELOOM_CONFIG; the variable
PHASELOOM_<SECTION>_<FIELD>. A key without a field is an error, so that typos are noticed.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import textwrap
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.sizes import SIZE, parse_size

PREFIX = "PHASELOOM_"
FILE_VARIABLE = "PHASELOOM_CONFIG"
LAST_PORT = 65_535

T = TypeVar("T", bound=msgspec.Struct)


def load(
    kind: type[T],
    section: str,
    environ: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
) -> T:
    """Load the configuration of one service.

    Args:   kind: a frozen struct whose fields are the keys.
            section: name of the table in the file, and middle part of the variable names. If empty,
                no file is read, the variables are PHASELOOM_<FIELD>, and other variables with that
                prefix are ignored.
            environ: the environment to read; None: that of this process.
            file: a TOML file to read instead of the one named by PHASELOOM_CONFIG. It must not have
                other tables, since no other service reads it.
    Raises: CallerError: a key is unknown, or a value is missing or invalid; the error names the key
            and the remedy.
    """
    environ = os.environ if environ is None else environ
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    hints = get_type_hints(kind)
    if file is not None:
        _check_alone(section, file)
    elif environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    values = _read_section(section, file, fields)
    sources = {name: f"[{section}] {name}" for name in values}
    prefix = f"{PREFIX}{section.upper()}_" if section else PREFIX
    for variable, text in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in fields:
            if not section:
                continue
            raise _unknown(variable, [f"{prefix}{field.upper()}" for field in fields])
        # Text fields take the variable literally, so that a password such as `123` stays text.
        values[name] = text if _is_text(hints[fields[name].name]) else _parse(text)
        sources[name] = variable
    for name, field in fields.items():
        if field.required and name not in values:
            raise CallerError(
                f"the {section or 'top-level'} setting {name!r} is missing",
                field=f"{prefix}{name.upper()}",
                remedy=f"set {prefix}{name.upper()}, or {name} in [{section}] of {FILE_VARIABLE}",
            )
    annotations = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        _check_finite(value, sources[name])
        values[name] = _with_sizes(value, annotations[fields[name].name], sources[name])
    return _convert(kind, values, sources)


def check_bounds(
    settings: msgspec.Struct, section: str, bounds: Mapping[str, tuple[float, float]]
) -> None:
    """Check the numbers of a section against their bounds.

    Args:   bounds: field → minimum and maximum. The maximum may be infinite, but a value may not.
    Raises: CallerError: a number is out of bounds, or NaN.
    """
    for name, (minimum, maximum) in bounds.items():
        value = getattr(settings, name)
        if not (minimum <= value <= maximum and value != math.inf):  # also false for NaN
            is_open_ended = maximum == math.inf
            limits = f"finite, at least {minimum}" if is_open_ended else f"{minimum} to {maximum}"
            raise CallerError(
                f"{name} must be {limits}, got {value}",
                field=f"{section}.{name}",
                remedy=f"use {minimum} or more" if is_open_ended else f"use {minimum} to {maximum}",
            )


def description_of(kind: type[msgspec.Struct], field: str) -> str:
    """Return the docstring of a setting in one line, for `--help`.

    Python does not keep the strings below fields, so this reads the source of the class.
    """
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(declared, ast.ClassDef)
    for statement, text in pairwise(declared.body):
        match statement, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(docstring))),
            ) if name == field:
                return " ".join(docstring.split())
    raise AssertionError(f"{kind.__name__}.{field} has no docstring")


def is_configured(section: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment names a configuration file or sets a variable of the section.

    Args:   environ: the environment to read; None: that of this process.
    """
    environ = os.environ if environ is None else environ
    prefix = f"{PREFIX}{section.upper()}_"
    return bool(environ.get(FILE_VARIABLE)) or any(name.startswith(prefix) for name in environ)


def is_set(
    section: str, field: str, file: Path | None, environ: Mapping[str, str] | None = None
) -> bool:
    """Whether a file or the environment sets a field that `load` has read with these arguments."""
    environ = os.environ if environ is None else environ
    if f"{PREFIX}{section}_{field}".upper() in {name.upper() for name in environ}:
        return True
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    return file is not None and field in _tables(file, FILE_VARIABLE).get(section, {})


def inherited(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of the environment for starting a child process."""
    return dict(os.environ if environ is None else environ)


def unset_for_children(section: str, field: str) -> None:
    """Remove a variable from the environment of processes that this one starts later."""
    os.environ.pop(f"{PREFIX}{section.upper()}_{field.upper()}", None)


def set_for_children(variable: str, value: str) -> None:
    """Set a variable for processes that this one starts later."""
    os.environ[variable] = value


def _read_section(section: str, file: Path | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    if file is None or not section:
        return {}
    table = _tables(file, FILE_VARIABLE).get(section, {})
    if not isinstance(table, dict):
        raise CallerError(
            f"{section} in {file} is not a table", field=section, remedy=f"write [{section}]"
        )
    for name in table:
        if name not in fields:
            raise _unknown(f"[{section}] {name}", sorted(fields))
    return dict(table)


def _check_alone(section: str, file: Path) -> None:
    """Reject a file of one section that has other keys or tables, which no service would read."""
    field = f"--{section}-file"
    for name in _tables(file, field):
        if name != section:
            raise CallerError(
                f"expected only the table [{section}] in {file}, got {name!r} too",
                field=field,
                remedy=f"correct the name; settings of services belong in {PREFIX}… variables or "
                f"in the file named by {FILE_VARIABLE}",
            )


def _tables(file: Path, field: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:   field: the option or variable that names the file, for errors.
    Raises: CallerError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise CallerError(
            f"cannot read {file}: {error.strerror}",
            field=field,
            remedy="name a readable TOML file",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CallerError(
            f"{file} is not valid TOML: {error}", field=field, remedy="correct the file"
        ) from None


def _check_finite(value: Any, source: str) -> None:
    """Reject infinities and NaN, which TOML allows. No setting gives them a meaning, and JSON,
    which passes settings to services, cannot hold them.

    Raises: CallerError: the value is or contains one.
    """
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_finite(inner, source)
    elif isinstance(value, float) and not math.isfinite(value):
        raise CallerError(
            f"{source} must be finite, got {value}", field=source, remedy="use a finite number"
        )


def _with_sizes(value: Any, annotation: Any, source: str) -> Any:
    """Return a value of a file or variable with bytes in place of texts such as `8GiB`.

    Raises: CallerError: a text is not a size.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if SIZE not in annotation.__metadata__:
            return _with_sizes(value, parts[0], source)
        return parse_size(value, source) if isinstance(value, str) else value
    if origin in {Union, UnionType}:
        for part in parts:
            value = _with_sizes(value, part, source)
    elif origin is list and isinstance(value, list):
        return [_with_sizes(item, parts[0], source) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {key: _with_sizes(item, parts[1], f"{source}.{key}") for key, item in value.items()}
    elif isinstance(value, dict) and isinstance(annotation, type(msgspec.Struct)):
        hints = get_type_hints(annotation, include_extras=True)
        return {
            key: _with_sizes(item, hints.get(key), f"{source}.{key}") for key, item in value.items()
        }
    return value


def _convert(kind: type[T], values: dict[str, Any], sources: dict[str, str]) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        top = name.partition(".")[0].partition("[")[0]
        source = sources.get(top, name)
        raise CallerError(
            f"{text} at {name or 'the top level'}",
            field=source,
            remedy=f"correct {source}: {_shorten(values.get(top))} is not valid",
        ) from None


def _unknown(key: str, valid_keys: list[str]) -> CallerError:
    return CallerError(
        f"{key} is not a configuration key",
        field=key,
        remedy=f"remove it, or use one of: {', '.join(valid_keys)}",
    )


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) in {Union, UnionType}:
        return all(a is NoneType or _is_text(a) for a in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, str | Path)


def _parse(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _shorten(value: Any) -> str:
    """Shorten an invalid value for a message.

    Values of text fields are never shown: any text is valid there, and it may be a secret.
    """
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
