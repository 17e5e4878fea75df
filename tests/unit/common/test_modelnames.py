"""Names of models, and their encoding as a subject token, KV key and file name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import (
    check_model_name,
    from_token,
    is_model_name,
    is_name,
    to_token,
)

PART = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(
    lambda part: ".." not in part
)
NAMES = st.builds(
    lambda first, second, suffix: first + second + suffix,
    PART,
    st.just("") | PART.map(lambda part: f"/{part}"),
    st.just("") | PART.map(lambda part: f":{part}"),
)


@given(NAMES)
def test_names_are_one_token_that_decodes_to_them(name: str) -> None:
    assert check_model_name(name, "name") == name
    token = to_token(name)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token), "valid in subjects, KV keys and paths"
    assert from_token(token) == name
    assert not is_name(name) or token == name, "names of earlier releases are stored as they are"


ASCII = st.text(st.characters(max_codepoint=127), max_size=40)


@given(ASCII, ASCII)
def test_different_texts_have_different_tokens(one: str, other: str) -> None:
    assert (to_token(one) == to_token(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("a/b", other) for other in ("a.b", "a--b", "a-b", "a_b", "a:b", "a/B", "A/b", "a2Fb")),
        ("smollm2", "SmolLM2"),
        ("a/b:c", "a/b.c"),
    ],
)
def test_similar_names_are_different_models(one: str, other: str) -> None:
    assert all(is_model_name(name) for name in (one, other))
    assert to_token(one) != to_token(other)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/", "a/", "/a", "a//b", "a/b/c", "../a", "a/..", "a/../b", "a..b", "-a"),
        *(
            "_a",
            ".a",
            "a/.b",
            "a/-b",
            "a:",
            ":a",
            "a:b:c",
            "a:b/c",
            "a b",
            "a\n",
            "a\0",
            "a*",
            "a>",
        ),
        *("a=2Fb", "a%2Fb", "a\\b", "ä", "a/b:..", "a" * 129),
    ],
)
def test_other_texts_are_refused_by_name(name: str) -> None:
    with pytest.raises(CallerError) as refused:
        check_model_name(name, "mesh.models")
    assert refused.value.info.field == "mesh.models"
    assert "ORG/NAME" in refused.value.info.remedy
