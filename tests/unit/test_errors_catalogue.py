"""Every refusal says what to do, and docs/errors.md lists it."""

from __future__ import annotations

import pytest

from tests.support import refusals


@pytest.fixture(scope="module")
def found() -> list[refusals.Refusal]:
    """Every refusal in the sources."""
    return refusals.refusals()


def test_errors_page_is_what_the_sources_say(found: list[refusals.Refusal]) -> None:
    fresh = refusals.document(found)
    assert refusals.FILE.read_text() == fresh, "run: python -m tests.support.refusals"


def test_whoever_is_told_that_a_request_is_wrong_is_told_what_to_do(
    found: list[refusals.Refusal],
) -> None:
    assert len(found) > 150, "the sources are not read any more"
    silent = [f"{r.source}: {r.message}" for r in found if r.is_callers and not r.has_remedy]
    assert not silent, "give each a remedy:\n" + "\n".join(silent)
