"""The commit-msg hook of `.pre-commit-config.yaml`: subjects have at most 72 characters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[2] / ".pre-commit-config.yaml"
CONFIG: dict[str, Any] = yaml.safe_load(FILE.read_text())


def is_refused(message: str) -> bool:
    """Apply the hook as pre-commit does: pygrep with --multiline searches the whole file."""
    (hook,) = (h for repo in CONFIG["repos"] for h in repo["hooks"] if h["id"] == "subject")
    assert (hook["language"], hook["args"]) == ("pygrep", ["--multiline"])
    assert hook["stages"] == ["commit-msg"]
    return re.search(hook["entry"].encode(), message.encode(), re.MULTILINE | re.DOTALL) is not None


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("x" * 72 + "\n", False),
        ("x" * 73 + "\n", True),
        ("Short\n\n" + "a long line of the body " * 9, False),
        ("x" * 73, True),
    ],
)
def test_only_a_long_subject_is_refused(message: str, refused: bool) -> None:
    assert is_refused(message) == refused


def test_installing_the_hooks_installs_this_one_and_fetches_nothing() -> None:
    assert CONFIG["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    assert {repo["repo"] for repo in CONFIG["repos"]} == {"local"}
    assert CONFIG["default_stages"] == ["pre-commit"], "linters run once, before the commit"
