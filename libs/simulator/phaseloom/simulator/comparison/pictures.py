"""Pictures of a comparison. Drawing one imports matplotlib with the Agg canvas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseloom.common.observability.palette import COLOURS
from phaseloom.simulator.comparison.report import Record, groups_of, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS_PER_INCH = 130


@contextmanager
def canvas(
    path: Path, num_panels: int, *, width: float = 5.0, height: float = 3.6, across: bool = True
) -> Iterator[list[Axes]]:
    """Yield panels, side by side or stacked, and save them to `path` at the end of the block."""
    from matplotlib.figure import Figure

    rows, columns = (1, num_panels) if across else (num_panels, 1)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    panels: list[Axes] = list(axes.flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    yield panels
    figure.savefig(path, dpi=DOTS_PER_INCH)


def bars(axes: Axes, records: Sequence[Record], name: str, title: str, *, aim: float = 0.0) -> None:
    """Draw a bar for each policy, grouped by workload: the mean and the range over seeds.

    Args: aim: the height of a dashed line; 0: there is none.
    """
    groups = {key: values(samples, name) for key, samples in groups_of(records).items()}
    groups = {key: samples for key, samples in groups.items() if samples}
    policies = list(dict.fromkeys(policy for _, policy in groups))
    workloads = list(dict.fromkeys(workload for workload, _ in groups))
    width = 0.8 / max(1, len(policies))
    for index, policy in enumerate(policies):
        positions, means, below, above = [], [], [], []
        for position, workload in enumerate(workloads):
            samples = groups.get((workload, policy))
            if samples:
                average = sum(samples) / len(samples)
                positions.append(position + (index - (len(policies) - 1) / 2) * width)
                means.append(average)
                below.append(average - min(samples))
                above.append(max(samples) - average)
        axes.bar(
            positions,
            means,
            width * 0.9,
            yerr=[below, above],
            capsize=2,
            label=policy,
            color=COLOURS[index % len(COLOURS)],
        )
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_title(title, loc="left", fontsize=10)
    if aim and policies:
        axes.axhline(aim, color="#555555", linestyle="--", linewidth=0.8)
    if policies:
        legend(axes)


def legend(axes: Axes, *args: Any) -> None:
    """Draw the legend to the right of the panel, so that it covers no data."""
    axes.legend(*args, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
