"""The waterfall: which spans, in what order, and how their bars lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.cli.trace import bar, render
from phaseloom.common.observability.spans import Attribute, SpanLine, waterfall

MS = 1_000_000


def span(
    name: str,
    start_ms: int,
    end_ms: int,
    parent: str | None = None,
    seq: str | None = "1",
    links: tuple[str, ...] = (),
    error: str | None = None,
) -> SpanLine:
    own: dict[str, Attribute] = {"tenant": "demo", "job": "sums", "deployment": "policy"}
    return SpanLine(
        name=name,
        span_id=f"{name}-{seq}",
        start_unix_ns=start_ms * MS,
        end_unix_ns=end_ms * MS,
        service="worker",
        parent_id=parent,
        attributes=own if seq is None else {**own, "seq": seq, "kind": "forward"},
        links=[{"trace_id": "t", "span_id": link} for link in links],
        error=error,
    )


SPANS = [
    span("load", 7, 9, "switch-None", seq=None),
    span("offload", 5, 7, "switch-None", seq=None),
    span("switch", 4, 9, "permit-1", seq=None, links=("permit-2", "gone")),
    span("execute", 9, 12, "permit-1"),
    span("permit", 3, 4, "route-1"),
    span("queue", 3, 3, "route-1"),
    span("submit", 0, 2, "step-None"),
    span("route", 1, 3, "submit-1"),
    span("submit", 1, 2, "step-None", seq="2"),
    span("permit", 2, 3, "submit-2", seq="2"),
    span("step", 0, 20, seq=None),
]


def test_waterfall_has_the_operation_and_what_was_done_for_it_in_order() -> None:
    """Also where the controller puts many operations under a span of its own."""
    rows = waterfall(SPANS, "demo.sums.policy.1")
    assert [(row.span.name, row.depth) for row in rows] == [
        ("submit", 0),
        ("route", 1),
        ("queue", 2),
        ("permit", 2),
        ("switch", 3),
        ("offload", 4),
        ("load", 4),
        ("execute", 3),
    ]


def test_waterfall_names_what_a_switch_displaced() -> None:
    (switch,) = [r for r in waterfall(SPANS, "demo.sums.policy.1") if r.span.name == "switch"]
    assert switch.displaced == ("demo.sums.policy.2 (forward)", "span gone")


def test_waterfall_is_empty_when_the_operation_has_no_span() -> None:
    assert waterfall(SPANS, "demo.sums.policy.3") == []


def test_render_puts_each_bar_where_its_time_is() -> None:
    lines = render("demo.sums.policy.1", waterfall(SPANS, "demo.sums.policy.1"), 80).plain
    head, _, *rows = lines.splitlines()
    assert head == "demo.sums.policy.1  forward  12.00 ms"
    execute = next(row for row in rows if "execute" in row)
    submit = next(row for row in rows if "submit" in row)
    assert "9.00      3.00" in execute
    assert execute.index("█") > submit.rindex("█")
    assert max(map(len, rows)) <= 80


def test_render_says_why_a_span_failed() -> None:
    rows = waterfall([span("execute", 0, 1, error="no room")], "demo.sums.policy.1")
    assert "failed: no room" in render("demo.sums.policy.1", rows, 80).plain


@given(
    begin=st.integers(0, 10**12),
    length=st.integers(0, 10**12),
    after=st.integers(0, 10**12),
    cells=st.integers(1, 200),
)
def test_bar_is_never_empty_and_stays_on_its_scale(
    begin: int, length: int, after: int, cells: int
) -> None:
    drawn = bar(begin, begin + length, begin + length + after, cells)
    assert 1 <= len(drawn) <= cells
    assert drawn.strip()
