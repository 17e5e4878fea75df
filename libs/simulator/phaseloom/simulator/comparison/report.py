"""The report of a comparison: records, targets, a table, a JSON file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from rich.table import Table


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run: a policy on a workload under a seed. Figures that do not apply are None."""

    policy: str
    seed: int
    workload: str = ""
    jobs: int | None = None
    over_solo_bound: float | None = None
    """`dollars` relative to the cheapest regrouping of jobs that each stay as long as they would
    alone. This bound is the same for every policy."""
    dollars: float | None = None
    """Price of the nodes that belong to a group, over the whole run."""
    cost_per_hour: float | None = None
    """Price per hour of nodes that stay the same during the run, in dollars."""
    cost_over_optimal: float | None = None
    """Cost relative to the cheapest strict round robin of the jobs present in the same run,
    regrouped for free at every arrival and departure. A policy that delays jobs makes this
    denominator larger, and so looks cheaper than it is."""
    optimal_gap: float | None = None
    """Largest possible relative error of the two ratios, because a denominator is a proven lower
    bound and not an optimum. None: the ratios are exact."""
    slo_attainment: float | None = None
    """Share of jobs whose mean iteration is within SLO × their iteration alone at its longest."""
    slo_draws: float | None = None
    """Share of jobs whose mean iteration is within SLO × the mean of the same draws alone."""
    slo_iterations: float | None = None
    """Share of single iterations within SLO × their iteration alone."""
    peak_gpus: int | None = None
    bubble_ratio: float | None = None
    """Share of node time in groups during which no operation runs."""
    makespan_s: float | None = None
    over_bound: float | None = None
    """Makespan relative to a time that no schedule of the same jobs can beat."""
    over_serial: float | None = None
    """Throughput relative to the same jobs one after the other on the same devices."""
    over_rollmux: float | None = None
    """Throughput relative to rounds in which one job trains while another rolls out."""
    mean_wait_s: float | None = None
    """Mean time of an operation from ready to started."""
    queueing_delay: float | None = None
    """Mean over jobs of (placed - submitted) / (ended - placed)."""
    switches: int | None = None
    moves: int | None = None
    utilisation: float | None = None
    """Share of time during which the shared nodes run operations."""
    decision_ms_p50: float | None = None
    decision_ms_p99: float | None = None
    simulated_in_s: float | None = None
    """CPU seconds of the run."""
    more: dict[str, float] = {}
    """Further figures by name."""


class Target(msgspec.Struct, frozen=True):
    """A figure to reach."""

    what: str
    value: float
    limit: float
    is_reached: bool


class Published(msgspec.Struct, frozen=True):
    """A figure of a paper next to ours."""

    figure: str
    paper: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.paper


class Report(msgspec.Struct, frozen=True):
    scenario: str
    about: str
    """Title of the table, with the figure that a scenario of a paper reproduces."""
    parameters: dict[str, Any]
    records: list[Record]
    targets: list[Target] = []
    published: list[Published] = []
    """The paper's figures next to ours."""
    series: dict[str, Any] = {}
    """Further data for the picture."""


def write(report: Report, folder: Path) -> Path:
    """Write a report to `<folder>/<scenario>.json`. Returns: the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.scenario}.json"
    payload = msgspec.json.format(msgspec.json.encode(report), indent=1)
    path.write_bytes(payload + b"\n")
    return path


def groups_of(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """Group the records by (workload, policy), in order of appearance."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.workload, record.policy), []).append(record)
    return groups


def values(records: Iterable[Record], name: str) -> list[float]:
    """Return the values of a column, a field of Record or a name in its `more`, where present."""
    column = (getattr(r, name) if hasattr(r, name) else r.more.get(name) for r in records)
    return [float(value) for value in column if value is not None]


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "over_solo_bound": ("cost / solo bound", lambda v: f"{v:.3f}"),
    "dollars": ("cost", lambda v: f"${v:,.0f}"),
    "cost_per_hour": ("$/h", lambda v: f"{v:.0f}"),
    "cost_over_optimal": ("cost / optimal", lambda v: f"{v:.3f}"),
    "optimal_gap": ("too high by at most", lambda v: f"{v:.2%}"),
    "slo_attainment": ("SLO", lambda v: f"{v:.1%}"),
    "slo_draws": ("SLO, same draws", lambda v: f"{v:.1%}"),
    "slo_iterations": ("SLO, iterations", lambda v: f"{v:.1%}"),
    "peak_gpus": ("peak GPUs", lambda v: f"{v:.0f}"),
    "bubble_ratio": ("bubbles", lambda v: f"{v:.1%}"),
    "makespan_s": ("makespan", lambda v: f"{v / 3600:.2f} h"),
    "over_bound": ("makespan / bound", lambda v: f"{v:.3f}"),
    "over_serial": ("over serial", lambda v: f"{v:.3f}"),
    "over_rollmux": ("over RollMux", lambda v: f"{v:.3f}"),
    "queueing_delay": ("queueing / alone", lambda v: f"{v:.3f}"),
    "mean_wait_s": ("mean wait", lambda v: f"{v:.1f} s"),
    "utilisation": ("utilisation", lambda v: f"{v:.1%}"),
    "switches": ("switches", lambda v: f"{v:.0f}"),
    "moves": ("moves", lambda v: f"{v:.0f}"),
    "decision_ms_p50": ("decision p50", lambda v: f"{v:.2f} ms"),
    "decision_ms_p99": ("decision p99", lambda v: f"{v:.2f} ms"),
    "simulated_in_s": ("simulated in", lambda v: f"{v:.1f} s"),
}


def table(report: Report) -> Table:
    """Return a table with one row per workload and policy: the mean and the range over seeds."""
    head, rows = cells(report)
    result = Table(title=report.about, title_justify="left")
    for name in head:
        is_number = name not in ("workload", "policy")
        result.add_column(name, justify="right" if is_number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the rows of the table."""
    records = report.records
    extra = list(dict.fromkeys(name for record in records for name in record.more))
    shown = [name for name in _COLUMNS if values(records, name)]
    has_workloads = any(record.workload for record in records)
    head = ["workload"] if has_workloads else []
    head += ["policy", "seeds", *(_COLUMNS[name][0] for name in shown)]
    head += [name.replace("_", " ") for name in extra]
    rows = []
    for (workload, policy), of_policy in groups_of(records).items():
        row = [workload] if has_workloads else []
        row += [policy, str(len(of_policy))]
        row += [_cell(values(of_policy, name), _COLUMNS[name][1]) for name in shown]
        row += [_cell(values(of_policy, name), lambda v: f"{v:.4g}") for name in extra]
        rows.append(row)
    return head, rows


def _cell(column: Sequence[float], text: Callable[[float], str]) -> str:
    if not column:
        return ""
    low, high = text(min(column)), text(max(column))
    return low if low == high else f"{text(mean(column))} ({low} to {high})"
