"""The picture of a load test: throughput, memory and lag over its time.

matplotlib is imported when the picture is drawn, with the Agg canvas: no display, no global state.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.load import LoadReport
from phaseloom.common.observability.palette import COLOURS
from phaseloom.demo.pictures import DOTS_PER_INCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEGABYTE = 2**20
_RATE_OVER_S = 5.0


def draw_load(report: LoadReport, path: Path) -> None:
    """Draw the picture of a load test to `path` (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    _draw_rate(top, report)
    _draw_memory(middle, report)
    _draw_lag(bottom, report)
    bottom.set_xlabel("seconds")
    figure.suptitle(headline(report), fontsize=12)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def headline(report: LoadReport) -> str:
    return (
        f"{report.settings.jobs} jobs, {report.operations} operations with no-op workers: "
        f"{report.throughput:.0f} a second on {report.machine.cores} cores, "
        f"p50 {report.p50_ms:.0f} ms, p99 {report.p99_ms:.0f} ms, "
        f"{len(report.restarts)} restarts"
    )


def rates(progress: list[tuple[float, int]], over_s: float) -> list[tuple[float, float]]:
    """The throughput over time, as (end, operations a second) of stretches of at least `over_s`."""
    found = []
    start_s, start = 0.0, 0
    for at_s, done in progress:
        if at_s - start_s >= over_s:
            found.append((at_s, (done - start) / (at_s - start_s)))
            start_s, start = at_s, done
    return found


def _draw_rate(ax: Axes, report: LoadReport) -> None:
    points = rates(report.progress, _RATE_OVER_S)
    ax.plot([at_s for at_s, _ in points], [rate for _, rate in points], color=COLOURS[0])
    ax.set_ylabel("operations a second")
    ax.set_ylim(bottom=0)
    _plain(ax)


def _draw_memory(ax: Axes, report: LoadReport) -> None:
    at_s = [sample.at_s for sample in report.samples]
    for number, name in enumerate(report.growth_bytes):
        megabytes = [sample.memory_bytes[name] / _MEGABYTE for sample in report.samples]
        colour = COLOURS[number % len(COLOURS)]
        style = "-" if number < len(COLOURS) else "--"
        ax.plot(at_s, megabytes, style, color=colour, label=name)
    ax.set_yscale("log")
    ax.set_ylabel("memory, MiB (proportional set size)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    _plain(ax)


def _draw_lag(ax: Axes, report: LoadReport) -> None:
    at_s = [sample.at_s for sample in report.samples]
    for colour, stream in zip(COLOURS, report.max_lag, strict=False):
        ax.plot(at_s, [sample.lag[stream] for sample in report.samples], color=colour, label=stream)
    ax.set_ylabel("messages behind")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    _plain(ax)


def _plain(ax: Axes) -> None:
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
