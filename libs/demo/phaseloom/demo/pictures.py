"""The two pictures of a run: the use of the devices over time, and the rewards.

matplotlib is imported when a picture is drawn, with the Agg canvas: no display, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from phaseloom.common.observability.intervals import Interval, intersect, merge, total
from phaseloom.common.observability.palette import SHADES, job_colours
from phaseloom.demo.report import (
    Execution,
    JobResult,
    RunLog,
    Summary,
    grpo_executions,
    window_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]
"""RGB, 0 to 1."""

SWITCH_COLOUR = "#222222"
IDLE_COLOUR = "#EEEEEE"
DOTS_PER_INCH = 150
TURNS_SHOWN = 3.0
"""Steps of each job in the picture's window."""
SMOOTHING_STEPS = 10
LABEL_SHARE = 0.0075
"""Share of the picture's width that one character of a label needs."""
SHORT = {
    "generate": "generate",
    "forward": "ref",
    "forward_backward": "fwd+bwd",
    "optim_step": "optim",
    "publish_weights": "publish",
    "sync_weights": "sync",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One run in the timeline picture."""

    title: str
    log: RunLog
    results: Sequence[JobResult]


def draw_timeline(panels: Sequence[Panel], summary: Summary, path: Path) -> None:
    """Draw a Gantt chart of the middle of each run to `path` (PNG), all of the same length."""
    from matplotlib.figure import Figure

    jobs = [job.name for job in summary.jobs]
    colours = job_colours(jobs)
    windows = [steady_window(panel) for panel in panels]
    length_s = max(end - start for start, end in windows)
    num_rows = sum(len(panel.log.devices) for panel in panels)
    figure = Figure(figsize=(13, 1.5 + 0.62 * num_rows + 0.5 * len(panels)), layout="constrained")
    heights = [len(panel.log.devices) for panel in panels]
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for ax, panel, (start_s, _) in zip(axes[:, 0], panels, windows, strict=True):
        _draw_panel(ax, panel, (start_s, start_s + length_s), colours)
    axes[-1, 0].set_xlabel("seconds (a stretch from the middle of the GRPO steps)")
    figure.suptitle(headline(summary), fontsize=13)
    _legend(figure, colours)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def draw_rewards(results: Sequence[JobResult], path: Path) -> None:
    """Draw the rewards to `path` (PNG): of every step, smoothed, and held out before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(results), 4.2), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)
    colours = job_colours([r.name for r in results])
    for ax, result in zip(axes[0], results, strict=True):
        _draw_reward(ax, result, colours[result.name])
    axes[0, 0].set_ylabel("mean reward (reasoning-gym's own score)")
    figure.suptitle("Rewards of the jobs while they share the devices", fontsize=13)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def headline(summary: Summary) -> str:
    switches = (
        f"{summary.context_switches} context switches, "
        f"{1e3 * summary.switch_seconds / max(1, summary.context_switches):.0f} ms each"
    )
    if summary.saved_percent is None or summary.bound_saved_percent is None:
        return f"{len(summary.jobs)} RL jobs on {summary.devices} devices: {switches}"
    return (
        f"{len(summary.jobs)} RL jobs on the same {summary.devices} devices: "
        f"{abs(summary.saved_percent):.1f} % "
        f"{'of the device-seconds saved' if summary.saved_percent >= 0 else 'more device-seconds'} "
        f"(bound {summary.bound_saved_percent:.1f} %), {switches}"
    )


def steady_window(panel: Panel) -> Interval:
    """Return a window of a few steps in the middle of the time in which all jobs ran GRPO."""
    windows = [window_of(grpo_executions(panel.log, r)) for r in panel.results]
    start_s, end_s = max(w[0] for w in windows), min(w[1] for w in windows)
    step_s = max((w[1] - w[0]) / r.steps for w, r in zip(windows, panel.results, strict=True))
    half_s = min(TURNS_SHOWN * step_s, end_s - start_s) / 2
    middle_s = (start_s + end_s) / 2
    return (middle_s - half_s, middle_s + half_s)


def smoothed(values: Sequence[float], steps: int) -> list[float]:
    """Return the moving mean of the last `steps` values, or of fewer at the beginning."""
    return [
        sum(values[max(0, i + 1 - steps) : i + 1]) / min(i + 1, steps) for i in range(len(values))
    ]


def _draw_panel(ax: Axes, panel: Panel, window: Interval, colours: dict[str, str]) -> None:
    length_s = window[1] - window[0]
    for row, device in enumerate(panel.log.devices):
        _bar(ax, row, window, window, IDLE_COLOUR)
        on_row = sorted(
            (
                e
                for e in panel.log.executions
                if device in e.devices and _overlaps(e.interval, window)
            ),
            key=lambda e: e.start_s,
        )
        for execution in on_row:
            _bar(ax, row, execution.interval, window, colour_of(execution, colours))
        for switch in panel.log.switches:
            if device in switch.devices and _overlaps(switch.interval, window):
                _bar(ax, row, switch.interval, window, SWITCH_COLOUR)
        _draw_labels(ax, row, on_row, window, colours)
        busy_s = total(intersect(merge(e.interval for e in on_row), [window]))
        share = f"{100 * busy_s / length_s:.0f} % busy"
        ax.text(1.005 * length_s, row, share, ha="left", va="center", fontsize=9)
    ax.set_yticks(range(len(panel.log.devices)), panel.log.devices)
    ax.set_ylim(len(panel.log.devices) - 0.5, -0.5)
    ax.set_xlim(0, length_s)
    ax.set_title(panel.title, loc="left", fontsize=10)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _overlaps(interval: Interval, window: Interval) -> bool:
    return interval[0] < window[1] and interval[1] > window[0]


def colour_of(execution: Execution, colours: dict[str, str]) -> Colour:
    """Return the job's colour, lighter for the smaller operations of a phase."""
    return lightened(colours[execution.key.job], SHADES.get(execution.kind, 0.0))


def _bar(ax: Axes, row: int, interval: Interval, window: Interval, colour: str | Colour) -> None:
    start_s, end_s = max(interval[0], window[0]), min(interval[1], window[1])
    ax.barh(
        row,
        end_s - start_s,
        left=start_s - window[0],
        height=0.8,
        color=colour,
        edgecolor="white",
        linewidth=0.4,
    )


def _draw_labels(
    ax: Axes, row: int, on_row: Sequence[Execution], window: Interval, colours: dict[str, str]
) -> None:
    for (_, kind), group in groupby(on_row, key=lambda e: (e.key.job, e.kind)):
        run = list(group)
        start_s, end_s = max(run[0].start_s, window[0]), min(run[-1].end_s, window[1])
        label = SHORT.get(kind, kind)
        if (end_s - start_s) / (window[1] - window[0]) < LABEL_SHARE * len(label):
            continue
        ax.text(
            (start_s + end_s) / 2 - window[0],
            row,
            label,
            ha="center",
            va="center",
            fontsize=8,
            color="black" if SHADES.get(kind, 0.0) else "white",
            # The label has its own background, so that lines between operations do not cross it.
            bbox={"facecolor": colour_of(run[0], colours), "edgecolor": "none", "pad": 1.0},
        )


def lightened(colour: str, share: float) -> Colour:
    """Return a colour moved towards white by `share`."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return (red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share)


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=job) for job, colour in colours.items()]
    handles += [
        Patch(color=SWITCH_COLOUR, label="context switch (offload + load)"),
        Patch(color=IDLE_COLOUR, label="idle"),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )


def _draw_reward(ax: Axes, result: JobResult, colour: str) -> None:
    steps = range(1, len(result.rewards) + 1)
    ax.plot(steps, result.rewards, color=lightened(colour, 0.6), linewidth=0.8, label="each step")
    ax.plot(
        steps,
        smoothed(result.rewards, SMOOTHING_STEPS),
        color=colour,
        linewidth=2.0,
        label=f"mean of {SMOOTHING_STEPS} steps",
    )
    ends = [(0, result.reward_start), (result.steps, result.reward_end)]
    ax.plot(*zip(*ends, strict=True), "D", color="black", markersize=7, label="held-out prompts")
    for x, y in ends:
        ax.annotate(
            f"{y:.2f}", (x, y), textcoords="offset points", xytext=(0, 9), ha="center", fontsize=9
        )
    ax.set_title(f"{result.name}: {result.reward_start:.2f} → {result.reward_end:.2f} held out")
    ax.set_xlabel("GRPO step")
    ax.margins(y=0.12)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right", fontsize=9, frameon=False)
