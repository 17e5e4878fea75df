"""The parts of the context switches of a run, by deployment, next to plain copies of as many bytes.

The parts are read from the run's spans, while it goes on or later. While it goes on, memory is
copied plainly after each look at the spans that shows new switches: by one thread, without a
digest, into touched memory and into fresh huge pages. So these copies suffer from whatever else the
machine does at that moment, if they have the priority of the mesh's processes.
"""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from loadtest.records import Machine, describe
from loadtest.state_bench import copy_seconds, fresh_copy_seconds
from phaseloom.common.observability.spans import SpanLine

OFFLOAD, LOAD, REST = "offload", "load", "rest"
_PLAIN_BYTES = 256 * 2**20
"""Bytes of a plain copy. Its time is scaled to the bytes of a switch."""
_LOOK_S = 0.25


class Part(msgspec.Struct, frozen=True):
    """One part of the switches of a deployment."""

    deployment: str
    part: str
    """`offload`, `load`, or `rest`: waiting for locks, digests and messages when it comes in."""
    count: int
    num_bytes: int
    """State of the deployment on its device."""
    mean_s: float
    worst_s: float
    touched_s: float = 0.0
    """Mean time of a plain copy of as many bytes into touched memory, at the same moments; 0: the
    part moves nothing."""
    fresh_s: float = 0.0
    """The same into fresh huge pages, which every load needs."""


class SwitchesReport(msgspec.Struct, frozen=True):
    machine: Machine
    run: str
    num_plain: int
    """Number of times that memory was copied plainly."""
    parts: list[Part]


class Plain(NamedTuple):
    """Seconds per byte of plain copies at one moment."""

    touched: float
    fresh: float


class Spans:
    """The spans of a run that were not read yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: defaultdict[Path, int] = defaultdict(int)
        self._decoder = msgspec.json.Decoder(SpanLine)

    def new(self) -> list[SpanLine]:
        """Return the spans that were written since the last call."""
        return [span for path in sorted(self._directory.glob("*.jsonl")) for span in self._of(path)]

    def _of(self, path: Path) -> Iterator[SpanLine]:
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is still being written
                self._offsets[path] += len(line)
                yield self._decoder.decode(line)


def measure(run_dir: Path, seconds: float) -> SwitchesReport:
    """Follow a run for so long, or until it is interrupted; 0: take the spans that are there."""
    source, target = (mmap.mmap(-1, _PLAIN_BYTES) for _ in range(2))
    for memory in (source, target):
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(bytes([7]) * _PLAIN_BYTES)
    spans = Spans(run_dir / "spans")
    moments: list[tuple[list[SpanLine], Plain]] = []
    end_s = time.monotonic() + seconds
    is_over = False
    while not is_over:
        is_over = time.monotonic() >= end_s
        new = [span for span in spans.new() if span.name in {"switch", OFFLOAD, LOAD}]
        if new:
            touched = copy_seconds(memoryview(source), memoryview(target))
            fresh = fresh_copy_seconds(memoryview(source))
            moments.append((new, Plain(touched / _PLAIN_BYTES, fresh / _PLAIN_BYTES)))
        try:
            time.sleep(0 if is_over else _LOOK_S)
        except KeyboardInterrupt:
            is_over = True
    return SwitchesReport(describe(), run_dir.name, len(moments), parts_of(moments))


def parts_of(moments: Iterable[tuple[list[SpanLine], Plain]]) -> list[Part]:
    """Summarise spans of switches, each with the plain copies of its moment."""
    every = [(span, plain) for spans, plain in moments for span in spans]
    moved: defaultdict[str | None, dict[str, float]] = defaultdict(dict)
    for span, _ in every:
        if span.name != "switch":
            longest = moved[span.parent_id]
            longest[span.name] = max(longest.get(span.name, 0.0), _seconds(span))
    taken: defaultdict[tuple[str, str], list[tuple[float, int, Plain]]] = defaultdict(list)
    for span, plain in every:
        num_bytes = int(span.attributes.get("num_bytes", 0))
        if span.name == "switch":
            inside = moved.get(span.span_id)
            if inside is not None:  # else nothing moved
                rest_s = max(0.0, _seconds(span) - sum(inside.values()))
                taken[_deployment(span), REST].append((rest_s, 0, plain))
        else:
            taken[_deployment(span), span.name].append((_seconds(span), num_bytes, plain))
    return [_part(*key, samples) for key, samples in sorted(taken.items())]


def _part(deployment: str, name: str, samples: list[tuple[float, int, Plain]]) -> Part:
    seconds, sizes, _ = zip(*samples, strict=True)
    return Part(
        *(deployment, name, len(samples), max(sizes), fmean(seconds), max(seconds)),
        touched_s=fmean(num_bytes * plain.touched for _, num_bytes, plain in samples),
        fresh_s=fmean(num_bytes * plain.fresh for _, num_bytes, plain in samples),
    )


def _deployment(span: SpanLine) -> str:
    return f"{span.attributes.get('job')}.{span.attributes.get('deployment')}"


def _seconds(span: SpanLine) -> float:
    return (span.end_unix_ns - span.start_unix_ns) / 1e9


def rows(report: SwitchesReport) -> list[tuple[str, ...]]:
    """The report as rows of a table, in the order of `HEAD`."""
    return [
        (
            f"`{part.deployment}`",
            part.part,
            str(part.count),
            f"{part.num_bytes / 2**20:.0f}" if part.num_bytes else "–",
            f"{1e3 * part.mean_s:.0f} ms",
            f"{1e3 * part.worst_s:.0f} ms",
            f"{1e3 * part.touched_s:.0f} ms" if part.touched_s else "–",
            f"{1e3 * part.fresh_s:.0f} ms" if part.fresh_s else "–",
            f"{part.mean_s / part.touched_s:.2f}" if part.touched_s else "–",
        )
        for part in report.parts
    ]


HEAD = (
    *("deployment", "part", "number", "MiB", "mean", "worst"),
    *("plain copy into touched memory", "into fresh pages", "mean / touched"),
)
