"""The documentation's commands and mesh files, against the command line and the settings."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import cyclopts
import msgspec
import pytest

from phaseloom.cli.main import application
from phaseloom.cli.meshconfig import MeshConfig

REPOSITORY = Path(__file__).parents[3]
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        *REPOSITORY.glob("*/README.md"),
        *REPOSITORY.glob("services/*/README.md"),
    ]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
IS_NOT_READ = (
    cyclopts.UnknownOptionError,
    cyclopts.UnknownCommandError,
    cyclopts.UnusedCliTokensError,
)
"""The errors of a command line that has what there is not; a placeholder for a number is none."""


def _commands(page: Path) -> list[str]:
    """The `phaseloom …` of a page, in its blocks and in its lines."""
    text = page.read_text()
    blocks = [body for kind, body in BLOCK.findall(text) if kind in {"sh", ""}]
    lines = [line for body in blocks for line in re.split(r"\n|;|&&|\|", body)]
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    shown = [text.partition("#")[0].strip() for text in (*lines, *spans)]
    return [text for text in shown if re.match(r"phaseloom [a-z]", text)]


def test_commands_in_the_documentation_are_those_that_there_are() -> None:
    app = application()
    seen, wrong = set(), []
    for page in PAGES:
        for command in _commands(page):
            seen.add(command)
            tokens = shlex.split(re.sub(r"[][…]|\\$", " ", command))[1:]
            try:
                app.parse_args(tokens, print_error=False, exit_on_error=False)
            except IS_NOT_READ as error:
                wrong.append(f"{page.name}: {command}: {error}")
            except cyclopts.CycloptsError:
                pass  # something is left out, or a word stands for a number
    assert wrong == []
    assert len(seen) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_mesh_files_in_the_documentation_have_settings_that_there_are(page: Path) -> None:
    for kind, body in BLOCK.findall(page.read_text()):
        if kind == "toml" and "[mesh" in body:
            table = tomllib.loads(body)["mesh"]
            assert set(table) <= set(MeshConfig.__struct_fields__)
            msgspec.convert(table, MeshConfig)
