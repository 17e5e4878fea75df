"""docs/reading.md leads through files and names that exist, and is an evening's work."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOPS = re.findall(
    r"^\d+\. \[`([^`]+)`\]\(\.\./([^)]+)\)(.*?)\*\*",
    (ROOT / "docs" / "reading.md").read_text(),
    flags=re.MULTILINE,
)


def test_tour_has_at_most_fifteen_files() -> None:
    assert 10 <= len(STOPS) <= 15
    assert len({shown for shown, _, _ in STOPS}) == len(STOPS)


@pytest.mark.parametrize(("shown", "link", "names"), STOPS, ids=[shown for shown, _, _ in STOPS])
def test_stop_names_what_is_there(shown: str, link: str, names: str) -> None:
    assert shown == link
    defined = {
        node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ""
        for node in ast.walk(ast.parse((ROOT / link).read_text()))
    } | {
        target.id
        for node in ast.walk(ast.parse((ROOT / link).read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name in re.findall(r"`([^`]+)`", names):
        assert name.removeprefix("Core.") in defined, name
