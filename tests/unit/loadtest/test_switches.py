"""The parts of switches, as a run's spans have them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.switches import Part, Plain, Spans, measure, parts_of
from phaseloom.common.observability.spans import SpanLine

MS = 10**6


def span(
    name: str, start_ms: int, end_ms: int, *, parent: str = "", deployment: str = "policy"
) -> SpanLine:
    attributes = {"job": "a", "deployment": deployment}
    sizes = {} if name == "switch" else {"num_bytes": 1000}
    return SpanLine(
        name,
        f"{name} {start_ms}",
        start_ms * MS,
        end_ms * MS,
        "statemgr",
        parent_id=parent or None,
        attributes={**attributes, **sizes},
    )


SWITCH = [
    span("switch", 0, 100),
    span("offload", 5, 15, parent="switch 0", deployment="sampler"),
    span("load", 30, 90, parent="switch 0"),
]


def test_parts_have_means_worst_cases_and_plain_copies_of_their_moments() -> None:
    later = [span("switch", 200, 300), span("load", 210, 230, parent="switch 200")]
    parts = parts_of([(SWITCH, Plain(1e-6, 2e-6)), (later, Plain(1e-6, 4e-6))])
    expected = [
        Part("a.policy", "load", 2, 1000, 0.04, 0.06, 0.001, 0.003),
        Part("a.policy", "rest", 2, 0, 0.055, 0.08),
        Part("a.sampler", "offload", 1, 1000, 0.01, 0.01, 0.001, 0.002),
    ]
    assert [(p.deployment, p.part, p.count, p.num_bytes) for p in parts] == [
        (p.deployment, p.part, p.count, p.num_bytes) for p in expected
    ]
    for part, want in zip(parts, expected, strict=True):
        assert (part.mean_s, part.worst_s, part.touched_s, part.fresh_s) == pytest.approx(
            (want.mean_s, want.worst_s, want.touched_s, want.fresh_s)
        )


def test_activations_that_moved_nothing_do_not_count() -> None:
    assert parts_of([([span("switch", 0, 100)], Plain(1e-6, 1e-6))]) == []


def test_each_span_is_read_once_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "statemgr.jsonl"
    lines = [msgspec.json.encode(line) + b"\n" for line in SWITCH]
    file.write_bytes(lines[0] + lines[1][:10])
    spans = Spans(tmp_path)
    assert [s.name for s in spans.new()] == ["switch"]
    file.write_bytes(b"".join(lines))
    assert [s.name for s in spans.new()] == ["offload", "load"]
    assert spans.new() == []


def test_finished_run_is_measured_next_to_copies_made_now(tmp_path: Path) -> None:
    (tmp_path / "spans").mkdir()
    (tmp_path / "spans" / "s.jsonl").write_bytes(
        b"\n".join(map(msgspec.json.encode, SWITCH)) + b"\n"
    )
    report = measure(tmp_path, 0)
    assert report.num_plain == 1
    assert {p.part for p in report.parts} == {"offload", "load", "rest"}
    assert all(p.touched_s > 0 for p in report.parts if p.part != "rest")
