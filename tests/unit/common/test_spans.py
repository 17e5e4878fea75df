"""Spans read back: those of one operation alone, out of the files of a whole run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phaseloom.common.observability.spans import Attribute, SpanLine, spans_of, waterfall

ALL = 2**30


def span(name: str, seq: str, number: int, parent: str | None = None) -> SpanLine:
    own: dict[str, Attribute] = {"tenant": "demo", "job": "sums", "deployment": "policy"}
    if seq:
        own["seq"] = seq
    trace = f"trace-{number // 10}"
    return SpanLine(name, f"s{number}", number, number + 5, "test", parent, own, trace_id=trace)


def written(path: Path, *spans: SpanLine) -> bytes:
    # As `json.dumps` of the writer has it: with a space after each colon.
    lines = b"".join(msgspec.json.encode(one).replace(b'":"', b'": "') + b"\n" for one in spans)
    path.write_bytes(lines)
    return lines


def test_spans_of_an_operation_are_those_of_its_trace_and_of_no_other(tmp_path: Path) -> None:
    """Also those that name no operation, as the load within a switch; a line cut short is left."""
    mine = [span("route", "1", 10), span("queue", "1", 11, "s10"), span("switch", "", 12, "s11")]
    other = [span("route", "2", 20), span("queue", "2", 21, "s20")]
    written(tmp_path / "router-1.jsonl", mine[0], other[0])
    lines = written(tmp_path / "worker-2.jsonl", other[1], *mine[1:])
    (tmp_path / "worker-2.jsonl").write_bytes(lines + lines[:30])
    found = spans_of("demo.sums.policy.1", tmp_path, ALL)
    assert found == mine
    assert [(row.span.name, row.depth) for row in waterfall(found, "demo.sums.policy.1")] == [
        ("route", 0),
        ("queue", 1),
        ("switch", 2),
    ]
    assert spans_of("demo.sums.policy.3", tmp_path, ALL) == []


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    early, late = span("route", "1", 10), span("route", "2", 20)
    written(tmp_path / "router-1.jsonl", early, late)
    end = len(written(tmp_path / "end.json", late)) + 10
    assert spans_of("demo.sums.policy.1", tmp_path, end) == []
    assert spans_of("demo.sums.policy.2", tmp_path, end) == [late]
