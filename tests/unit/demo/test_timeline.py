"""The Chrome trace made from spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from phaseloom.common.observability.spans import SpanLine, read_spans
from phaseloom.demo.timeline import chrome_trace, write_timeline

MS = 1_000_000
OPERATION: dict[str, Any] = {"tenant": "demo", "job": "sums", "deployment": "policy", "seq": 7}
DEVICE: dict[str, Any] = {"node": "t0", "device": 0}


def span(
    name: str, span_id: str, start_ms: float, end_ms: float, parent: str | None = None, **more: Any
) -> SpanLine:
    start_ns, end_ns = 10**18 + int(start_ms * MS), 10**18 + int(end_ms * MS)
    return SpanLine(name, span_id, start_ns, end_ns, "test", parent, more)


def one_operation() -> list[SpanLine]:
    """Submitted at 0, switched in from 2 to 6 ms, executed from 6 to 10 ms."""
    return [
        span("submit", "s1", 0, 1, **OPERATION, kind="forward_backward"),
        span("queue", "q1", 1, 2, "s1"),
        span("switch", "w1", 2, 6, "s1", **DEVICE),
        span("offload", "o1", 2, 4, "w1"),
        span("load", "l1", 4, 6, "w1"),
        span("execute", "e1", 6, 10, "s1", **DEVICE),
    ]


def test_sub_stages_lie_in_their_execution() -> None:
    more = {**DEVICE, **OPERATION}
    spans = [
        *one_operation(),
        span("sub-stage", "x1", 6, 7, "e1", **more, steps=1, tokens_per_step=640),
        span("sub-stage", "x2", 7, 10, "e1", **more, steps=30, tokens_per_step=64),
    ]
    trace = chrome_trace(spans)
    tracks = track_names(trace)
    found = [e for e in trace["traceEvents"] if e.get("cat") == "sub-stage"]
    assert [(e["ts"], e["dur"]) for e in found] == [(6000.0, 1000.0), (7000.0, 3000.0)]
    assert found[1]["name"] == "sums 30 steps of 64 tokens"
    execute = slices(trace)["execute"]
    assert {(e["pid"], e["tid"]) for e in found} == {(execute["pid"], execute["tid"])}
    assert tracks[execute["pid"], execute["tid"]] == "node t0 / device 0"


def slices(trace: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {e["cat"]: e for e in trace["traceEvents"] if e["ph"] == "X"}


def track_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    """(pid, tid) → "process / thread"."""
    meta = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): f"{processes[e['pid']]} / {e['args']['name']}"
        for e in meta
        if e["name"] == "thread_name"
    }


def test_device_track_has_execution_and_switch_with_its_halves_inside() -> None:
    trace = chrome_trace(one_operation())
    found, tracks = slices(trace), track_names(trace)
    for name in ("execute", "switch", "offload", "load"):
        event = found[name]
        assert tracks[event["pid"], event["tid"]] == "node t0 / device 0"
    assert (found["switch"]["ts"], found["switch"]["dur"]) == (2000.0, 4000.0)
    assert (found["offload"]["ts"], found["load"]["ts"]) == (2000.0, 4000.0)
    assert found["execute"]["name"] == "sums forward_backward"


def test_job_has_the_queue_wait() -> None:
    begin, end = [e for e in chrome_trace(one_operation())["traceEvents"] if e["ph"] in "be"]
    assert (begin["ph"], begin["ts"]) == ("b", 1000.0)
    assert (end["ph"], end["ts"]) == ("e", 2000.0)
    for event in (begin, end):
        assert (event["name"], event["cat"], event["id"]) == ("policy queue", "queue", "q1")
    assert begin["args"]["kind"] == "forward_backward"


def test_arrow_leads_from_submit_to_execution() -> None:
    trace = chrome_trace(one_operation())
    found = slices(trace)
    start, finish = [e for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert start["id"] == finish["id"]
    assert (start["pid"], start["tid"]) == (found["submit"]["pid"], found["submit"]["tid"])
    assert start["ts"] == found["submit"]["ts"]
    assert finish["ts"] == found["execute"]["ts"]
    assert finish["bp"] == "e"


def test_operation_that_never_ran_has_no_arrow() -> None:
    trace = chrome_trace(one_operation()[:2])
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


def test_shares_of_a_device_have_a_track_beside_it() -> None:
    whole = span("share", "u1", 0, 4, **{**OPERATION, **DEVICE, "units": 2})
    part = span("share", "u2", 4, 9, **{**OPERATION, **DEVICE, "units": 1})
    other = span("share", "u3", 4, 9, **{**OPERATION, **DEVICE, "units": 1, "job": "letters"})
    trace = chrome_trace([whole, part, other])
    assert set(track_names(trace).values()) == {"node t0 / device 0 shares"}
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    deployment = OPERATION["deployment"]
    assert names == [
        f"sums {deployment}: 2 units",
        f"sums {deployment}: 1 units",
        f"letters {deployment}: 1 units",
    ]


def test_overlapping_slices_of_one_track_go_to_separate_lanes() -> None:
    """On one thread they would be drawn as if nested."""
    waits = [(0, 10), (2, 5), (4, 12), (10, 14)]
    spans = [
        span("submit", f"s{i}", a, b, **{**OPERATION, "seq": i}) for i, (a, b) in enumerate(waits)
    ]
    trace = chrome_trace(spans)
    lanes = {e["args"]["seq"]: e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert lanes[0] == lanes[1] == lanes[3]
    assert lanes[2] != lanes[0]
    assert set(track_names(trace).values()) == {"job sums / policy submit"}


def test_spans_are_read_from_all_files_but_not_a_last_line_cut_short(tmp_path: Path) -> None:
    first, second = one_operation()[0], one_operation()[5]
    line = msgspec.json.encode(second)
    (tmp_path / "router-1.jsonl").write_bytes(msgspec.json.encode(first) + b"\n")
    (tmp_path / "worker-2.jsonl").write_bytes(line + b"\n" + line[:40])
    assert read_spans(tmp_path) == [first, second]


def test_written_timeline_is_a_trace_object(tmp_path: Path) -> None:
    write_timeline(one_operation(), tmp_path / "timeline.json")
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "b", "e", "s", "f"}
    assert all({"pid", "tid", "name"} <= e.keys() for e in trace["traceEvents"])


def test_no_spans_give_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []
