"""The checker of the language that `make lint` runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import prose

GOOD = '''
def committed(seal: int) -> int:
    """Return the newest committed seal, or 0 if there is none."""
    return seal
'''
BAD = '''
def committed(asked: int) -> int:
    """The newest seal, where there is one."""
    return asked
'''


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Return 0 where there is none.", "where"),
        ("What is fetched ahead stays.", "subject"),
        ("The node is needed no more.", "adverb"),
        ("The node was away for so long.", "so long"),
        ("The job is to end.", "is to"),
        ("Have the rank killed.", "have"),
    ],
)
def test_phrasing_is_flagged_by_its_kind(text: str, kind: str) -> None:
    (flagged,) = prose.flags(text)
    assert kind in flagged


def test_plain_sentence_is_not_flagged() -> None:
    assert prose.flags("Return the directory where the seals are, if the node has one.") == []


def test_texts_are_docstrings_and_messages() -> None:
    source = '"""A."""\nraise ValueError(f"b {x}", code=1)\nf(help="c", name="d")'
    assert [text for _, text in prose.texts(ast.parse(source))] == ["A.", "b X", "c"]


def test_directory_above_its_limit_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in (("libs/good", GOOD), ("libs/bad", BAD)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "module.py").write_text(source)
    assert prose.main(["libs/good"], tmp_path) == 0
    assert prose.main(["libs", "--worst", "9"], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "libs/bad: 100.0 % of 1 texts" in printed
    assert "libs/bad/module.py:2: the name `asked`" in printed
    assert "libs/good: " not in printed
