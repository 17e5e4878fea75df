"""The kinds of pictures that only the papers' scenarios draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from phaseloom.common.observability.palette import COLOURS
from phaseloom.simulator.comparison.pictures import legend
from phaseloom.simulator.metering import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def distribution(axes: Axes, samples: Mapping[str, Sequence[float]], title: str, unit: str) -> None:
    """Draw a cumulative distribution for each name."""
    for index, (name, found) in enumerate(samples.items()):
        ordered = sorted(found)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name, color=COLOURS[index % len(COLOURS)])
    axes.set_xlabel(unit)
    axes.set_ylim(0, 1.02)
    axes.set_title(title, loc="left", fontsize=10)
    legend(axes)


def lines(
    axes: Axes,
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x_label: str,
    *,
    steps: bool = False,
) -> None:
    for index, (name, points) in enumerate(series.items()):
        draw: Callable[..., object] = axes.step if steps else axes.plot
        options = {"where": "post"} if steps else {"marker": "o", "markersize": 3}
        draw(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=COLOURS[index % len(COLOURS)],
            linewidth=1.2,
            **options,
        )
    axes.set_xlabel(x_label)
    axes.set_title(title, loc="left", fontsize=10)
    legend(axes)


def gantt(axes: Axes, spans: Sequence[Span], title: str) -> None:
    """Draw which job held which node when."""
    nodes = sorted({span.node for span in spans}, reverse=True)
    jobs = sorted({span.job for span in spans})
    for span in spans:
        axes.broken_barh(
            [(span.start_s, span.end_s - span.start_s)],
            (nodes.index(span.node) - 0.4, 0.8),
            color=COLOURS[jobs.index(span.job) % len(COLOURS)],
            linewidth=0,
        )
    axes.set_yticks(range(len(nodes)), nodes, fontsize=7)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=10)
    handles = [
        axes.plot([], [], color=COLOURS[i % len(COLOURS)], linewidth=5)[0] for i in range(len(jobs))
    ]
    legend(axes, handles, [job.partition(".")[2] for job in jobs])
