"""Every refusal says what to do, and docs/errors.md lists it."""

from __future__ import annotations

from tests.support import refusals


def test_errors_page_is_what_the_sources_say() -> None:
    fresh = refusals.document(refusals.refusals())
    assert refusals.FILE.read_text() == fresh, "run: python -m tests.support.refusals"


def test_whoever_is_told_that_a_request_is_wrong_is_told_what_to_do() -> None:
    found = refusals.refusals()
    assert len(found) > 150, "the sources are not read any more"
    silent = [f"{r.source}: {r.message}" for r in found if r.is_callers and not r.has_remedy]
    assert not silent, "give each a remedy:\n" + "\n".join(silent)
