"""Measurements published for readers: JSON in docs/measured, tables in docs between markers.

<!-- begin bench -->
…
<!-- end bench -->
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from loadtest.chaos import ChaosReport
from loadtest.deltasync import DeltaReport, Run, middle
from loadtest.gatewaybench import GatewayReport
from loadtest.hiding import HidingReport
from loadtest.hostile.run import HostileReport
from loadtest.load import LoadReport
from loadtest.offpolicy import QUARTERS, OffPolicyReport
from loadtest.papers.scenarios import SCENARIOS
from loadtest.papers.scenarios.report import markdown, read
from loadtest.peering import PeerReport
from loadtest.powercuts import PowerCutsReport
from loadtest.records import Machine, Records
from loadtest.scale import ScaleReport, Steps
from loadtest.servers import ServersReport
from loadtest.spatial import SpatialReport
from loadtest.switches import HEAD, SwitchesReport, rows
from loadtest.tailbench import TailReport
from phaseloom.demo.spatial import PolicyFigures

DOCS = Path(__file__).resolve().parent.parent / "docs"
SIMULATED = Path("measured/simulated")
SIMULATIONS_PAGE = "measured/papers.md"
_MEGABYTE = 2**20


def publish(runs: Path, docs: Path = DOCS) -> list[Path]:
    """Publish every report that there is in `runs`; returns the files written."""
    written = []
    for name, (source, page, kind, table) in PUBLISHED.items():
        if not (runs / source).exists():
            continue
        report = msgspec.json.decode((runs / source).read_bytes(), type=kind)
        target = docs / "measured" / f"{name}.json"
        shutil.copyfile(runs / source, target)
        text = (docs / page).read_text()
        (docs / page).write_text(replaced(text, name, table(report)))
        written += [target, docs / page]
    written += publish_simulations(runs.parent / "simulate", docs)
    if (runs / "load.png").exists():
        shutil.copyfile(runs / "load.png", docs / "images" / "load.png")
        written.append(docs / "images" / "load.png")
    return written


def publish_simulations(runs: Path, docs: Path) -> list[Path]:
    """Publish the report and the picture of every scenario; returns the files written."""
    written = []
    for name in SCENARIOS:
        source = runs / f"{name}.json"
        if not source.exists():
            continue
        folder = docs / SIMULATED
        folder.mkdir(parents=True, exist_ok=True)
        page = docs / SIMULATIONS_PAGE
        page.write_text(replaced(page.read_text(), name, markdown(read(source))))
        for suffix in (".json", ".png"):
            shutil.copyfile(source.with_suffix(suffix), folder / f"{name}{suffix}")
            written.append(folder / f"{name}{suffix}")
        written.append(page)
    return written


def replaced(text: str, name: str, table: str) -> str:
    """The page, with a new table between the markers of this name.

    Raises: ValueError: the page has no such markers.
    """
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no place for {name}")
    return f"{before}{begin}{table}\n{end}{after}"


def bench_table(records: Records) -> str:
    rows = [
        (f"`{r.name}`", f"{r.value:.4g} {r.unit}", f"{r.limit_value:.4g}", f"{r.ratio:.2f}", r.aim)
        for r in records.figures
    ]
    return _table(
        records.machine, ("figure", "measured", "limit", "ratio", "aim of the ratio"), rows
    )


def switches_table(report: SwitchesReport) -> str:
    return _table(report.machine, HEAD, rows(report))


def load_table(report: LoadReport) -> str:
    settings = report.settings
    facts = [
        ("jobs × operations", f"{settings.jobs} × {settings.operations}"),
        ("throughput", f"{report.throughput:.0f} operations a second"),
        ("round trip, p50 and p99", f"{report.p50_ms:.0f} ms, {report.p99_ms:.0f} ms"),
        (
            "scheduler's step, p50 and p99",
            f"≤ {1e6 * report.step_p50_s:.0f} µs, ≤ {1e6 * report.step_p99_s:.0f} µs",
        ),
        *_machine_facts(report),
        ("restarts", str(len(report.restarts))),
        *((f"most messages behind on {s}", str(lag)) for s, lag in report.max_lag.items()),
    ]
    for name, grown in report.growth_bytes.items():
        end = report.samples[-1].memory_bytes[name] / _MEGABYTE
        facts.append((f"memory of {name}", f"{end:.0f} MiB, {grown / _MEGABYTE:+.1f} MiB growth"))
    return _table(report.machine, ("what", "measured"), facts)


def _machine_facts(report: LoadReport) -> list[tuple[str, str]]:
    """Lines by which a reader can tell a slow mesh from a slow machine."""
    if not report.chain_throughput:
        return []  # it was not measured
    before, after = report.chain_throughput
    ratio = report.throughput / mean(report.chain_throughput)
    processor = sorted(report.processor_ms.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in processor)
    total_ms = sum(report.processor_ms.values())
    return [
        (
            "raw chain with as many in flight, before and after",
            f"{before:.0f} and {after:.0f} operations a second",
        ),
        ("throughput over the raw chain's", f"{ratio:.2f}"),
        ("processor time of an operation", f"{total_ms:.2f} ms: {parts}"),
        ("idle time of the cores", f"{report.idle_share:.0%}"),
    ]


def peers_table(report: PeerReport) -> str:
    rows = [
        (
            f.name,
            str(f.in_flight),
            f"{f.p50_ms:.2f} ms",
            f"{f.p99_ms:.2f} ms",
            f"{f.throughput:.0f}",
        )
        for f in report.figures
    ]
    lines = [
        _table(report.machine, ("system", "in flight", "p50", "p99", "operations/s"), rows),
        "",
    ]
    for system in report.systems:
        versions = ", ".join(f"{name} {version}" for name, version in system.versions.items())
        lines.append(f"- {system.name} ({versions}): {system.what}.")
    return "\n".join(lines)


def chaos_table(report: ChaosReport) -> str:
    rows = [
        (s.victim, str(s.kills), f"{s.recovery_median_s:.1f} s", f"{s.recovery_max_s:.1f} s")
        for s in report.victims
    ]
    same = sum(job.is_same for job in report.jobs)
    told = (
        f"{len(report.kills)} kills, {same} of {len(report.jobs)} jobs ended with the weights of "
        "the undisturbed run."
    )
    table = _table(report.machine, ("killed", "kills", "recovery, median", "longest"), rows)
    return f"{told}\n\n{table}"


def hostile_table(report: HostileReport) -> str:
    floods = [
        (
            row.flood.replace("_", " "),
            *(f"{1e3 * value:.0f} ms" for value in (row.idle_p99_s, row.p99_s, row.longest_s)),
            f"{row.accepted:,}",
            f"{row.failed} / {row.restarts}",
            f"{row.peak_bytes / _MEGABYTE:,.0f} MiB",
            f"{row.growth - 1:+.0%}",
            "yes" if row.reaches else "**no**",
        )
        for row in report.floods
    ]
    columns = ("flood", "p99 idle", "p99", "longest", "accepted", "failed / restarts", "peak")
    faults = [
        (
            row.fault,
            f"{row.longest_s:.1f} s",
            f"{row.recovery_s:.1f} s",
            ", ".join(sorted(set(row.notices))) or "none",
            "yes" if row.is_same else "**no**",
        )
        for row in report.faults
    ]
    named = ("fault", "longest step", "recovery", "notices", "same weights")
    flooded = _table(report.machine, (*columns, "when repeated", "within aims"), floods)
    return f"{flooded}\n\n{_table(report.machine, named, faults)}" if faults else flooded


def power_cuts_table(report: PowerCutsReport) -> str:
    same = sum(job.is_same for job in report.jobs)
    lost = sum(len(job.lost) for job in report.jobs)
    up_s = [cut.up_s for cut in report.cuts]
    unsynced = median(cut.lost_bytes for cut in report.cuts)
    rows = [
        ("power cuts", f"{len(report.cuts)}"),
        ("bytes not fsynced when it was cut, median", f"{unsynced:,.0f}"),
        ("until the mesh was up again, median", f"{median(up_s):.1f} s"),
        ("longest", f"{max(up_s):.1f} s"),
        ("jobs with the weights of the undisturbed run", f"{same} of {len(report.jobs)}"),
        ("acknowledged operations", f"{sum(job.operations for job in report.jobs):,}"),
        ("lost, or with another outcome", f"{lost}"),
    ]
    told = f"Seed {report.settings.seed}, {report.settings.cuts_a_round} cuts a round of two jobs."
    return f"{told}\n\n{_table(report.machine, ('', ''), rows)}"


def off_policy_table(report: OffPolicyReport) -> str:
    quarters = [f"quarter {i + 1}" for i in range(QUARTERS)]
    columns = ("rollouts", "held out, before", *quarters, "held out, after")
    rows = [
        (job.mode, *(f"{r:.2f}" for r in [job.reward_start, *job.by_quarter, job.reward_end]))
        for job in report.jobs
    ]
    settings = report.settings
    told = (
        f"Mean rewards of `{settings.task}` over {settings.steps} steps, on held-out problems "
        "before and after, and of the rollouts in each quarter of the steps."
    )
    return f"{told}\n\n{_table(report.machine, columns, rows)}"


def hidden_table(report: HidingReport) -> str:
    settings = report.settings
    idle = ", ".join(f"{device} {share:.0%}" for device, share in report.idle_share.items())
    unhidden = ", ".join(f"{why} {s:.1f} s" for why, s in report.unhidden_seconds.items())
    facts = [
        ("jobs × steps", f"{settings.jobs} × {settings.steps}, in {report.seconds:.0f} s"),
        ("idle time of the devices", idle),
        (
            "switches",
            f"{report.switches} of {settings.state_mib} MiB, {report.switch_seconds:.1f} s",
        ),
        (
            "hidden share of their time",
            f"**{report.hidden_share:.1%}**, in the second half {report.hidden_share_settled:.1%}",
        ),
        ("the rest", unhidden),
        ("hidden share of every run", ", ".join(f"{s:.1%}" for s in report.hidden_shares)),
    ]
    return _table(report.machine, ("what", "measured"), facts)


def delta_table(report: DeltaReport) -> str:
    facts: list[tuple[str, Callable[[Run], str]]] = [
        ("weights that a step changes", lambda run: f"{middle(run, 'changed'):.1%}"),
        (
            "blocks of 4 KiB in which it changes any",
            lambda run: f"{middle(run, 'changed_blocks'):.1%}",
        ),
        (
            "**bytes sent, over those of whole versions**",
            lambda run: (
                f"**{middle(run, 'share'):.3f}**, at most "
                f"{max(each.share for each in run.versions):.3f}"
            ),
        ),
        (
            f"time at {report.settings.link_mbit} Mbit/s, over that of whole versions",
            lambda run: f"{middle(run, 'time_ratio'):.2f}",
        ),
        (
            "time between processes of one machine, over that of whole versions",
            lambda run: f"{middle(run, 'fast_time_ratio'):.2f}",
        ),
        (
            "a seal: blocks of 4 KiB that a step changes",
            lambda run: f"{run.seal_changed_blocks:.1%}",
        ),
        (
            "a seal: bytes that a delta of it would have, over all",
            lambda run: f"{run.seal_share:.2f}",
        ),
    ]
    columns = ("learning rate", *(f"{run.learning_rate:g}" for run in report.runs))
    rows = [(name, *(told(run) for run in report.runs)) for name, told in facts]
    return _table(report.machine, columns, rows)


def gateway_table(report: GatewayReport) -> str:
    through, own, two = report.gateway, report.client, report.two_tenants
    ways = [through, own] if two is None else [through, own, two]
    tokens = report.settings.large * 50
    values: list[tuple[str, list[float], float]] = [
        (f"{name}, ms", [way.seconds[name] for way in ways], 1e3) for name in own.seconds
    ]
    values.append(("256 samples in flight, s", [way.in_flight_s for way in ways], 1.0))
    name = f"forward_backward of {tokens:,} tokens, s"
    values.append((name, [way.large_s for way in ways], 1.0))
    rows = []
    for name, seconds, unit in values:
        theirs, ours, *both = [f"{unit * each:.{1 if unit == 1e3 else 2}f}" for each in seconds]
        rows.append((name, theirs, ours, f"{seconds[0] / seconds[1]:.2f}", *both))
    head = ("medians", "Tinker SDK and gateway", "our client", "ratio")
    both = ["SDKs of two tenants at once"] if two is not None else []
    return _table(report.machine, (*head, *both), rows)


def tails_table(report: TailReport) -> str:
    rows = [
        (
            case.name,
            f"{median(case.whole_s):.1f} s",
            f"{median(case.gathered_s):.1f} s",
            f"**{case.gain:.2f} ×**",
            f"{case.gains[0]:.2f} to {case.gains[-1]:.2f}",
        )
        for case in report.cases
    ]
    told = (
        f"With the real model {report.num_samples:,} samples (new tokens: median "
        f"{report.length_p50}, 80 % have at most {report.length_p80}, the longest "
        f"{report.length_max}): {report.num_different} with other tokens, largest difference of a "
        f"log-probability {report.logprob_error:.1e}."
    )
    head = ("rollouts", "tails where they began", "gathered", "work in the same time", "rounds")
    return f"{told}\n\n{_table(report.machine, head, rows)}"


def spatial_table(report: SpatialReport) -> str:
    policies = dict.fromkeys(name for each in report.in_order for name in each.policies)
    rows = [
        (
            f"`{spatial.setting}`",
            f"{spatial.serial_seconds:.1f} s",
            *(_gain(spatial.policies.get(name)) for name in policies),
        )
        for spatial in report.in_order
    ]
    rounds = min(len(spatial.ratios) for spatial in report.in_order)
    told = (
        "How many times as fast as by turns the same two jobs are: the median of the ratios of "
        f"{rounds} rounds, with the least and the greatest. In all runs of a setting each job ends "
        "with the same weights, bit for bit."
    )
    head = ("setting", "by turns", *(f"`{name}`" for name in policies))
    predicted = [
        (
            f"`{spatial.setting}`",
            _off(spatial.serial_predicted_over),
            *(_error(spatial.policies.get(name)) for name in policies),
        )
        for spatial in report.in_order
        if spatial.serial_predicted_over
    ]
    if not predicted:
        return f"{told}\n\n{_table(report.machine, head, rows)}"
    also = "By how much longer or shorter than the runs their predictions are, likewise:"
    return f"{told}\n\n{_rows(head, rows)}\n\n{also}\n\n{_table(report.machine, head, predicted)}"


def _error(figures: PolicyFigures | None) -> str:
    return _off(figures.predicted_over) if figures and figures.predicted_over else ""


def _off(predicted_over: Sequence[float]) -> str:
    """Args: predicted_over: the predicted over the real time of each round."""
    in_order = (min(predicted_over), median(predicted_over), max(predicted_over))
    least, usual, most = (f"{100 * (over - 1):+.0f} %" for over in in_order)
    return f"{usual} ({least} to {most})"


def _gain(figures: PolicyFigures | None) -> str:
    if figures is None:
        return ""
    return f"{figures.ratio:.2f} ({min(figures.ratios):.2f} to {max(figures.ratios):.2f})"


def scale_table(report: ScaleReport) -> str:
    settings = report.settings
    facts = [
        (
            "nodes, devices, jobs",
            f"{settings.nodes:,}, {settings.nodes * settings.devices:,}, {settings.jobs:,}, of "
            f"which {report.placed:,} have a place",
        ),
        ("a step while all work, p50, p99, longest", _steps(report.working)),
        ("a submission, p50, p99, longest", _steps(report.submitted)),
        ("a step after ten nodes have failed at once, p50, p99, longest", _steps(report.losing)),
        (
            "events a second",
            f"{report.events_per_s:,.0f}; this cluster makes {report.virtual_events_per_s:,.0f}",
        ),
        ("memory of the state", f"{report.state_bytes / _MEGABYTE:,.0f} MiB"),
        (
            "snapshot",
            f"{report.snapshot_bytes / _MEGABYTE:.1f} MiB, stored as "
            f"{report.stored_bytes / _MEGABYTE:.1f} MiB",
        ),
        (
            "to make, compress and restore it",
            f"{report.snapshot_s:.2f} s, {report.compress_s:.2f} s, {report.restore_s:.2f} s",
        ),
    ]
    return _table(report.machine, ("what", "measured"), facts)


def servers_table(report: ServersReport) -> str:
    facts = [
        (f"`{r.name}`", f"{r.value:.4g} {r.unit}", f"{r.limit_value:.4g}", f"{r.ratio:.2f}")
        for r in report.figures
    ]
    cost = _table(report.machine, ("figure", "three servers", "one", "ratio"), facts)
    stalls = _rows(
        ("fault", "times", "a job stands still for, median", "longest", "aim of the median"),
        [
            (s.fault, str(len(s.times_s)), f"{s.median_s:.1f} s", f"{max(s.times_s):.1f} s", s.aim)
            for s in report.stalls
        ],
    )
    return f"{stalls}\n\n{cost}"


def _steps(steps: Steps) -> str:
    millis = (f"{1e3 * s:.3g} ms" for s in (steps.p50_s, steps.p99_s, steps.longest_s))
    return f"{', '.join(millis)} ({steps.count:,} steps)"


def _rows(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)
    )


def _table(machine: Machine, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [_rows(head, rows)]
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    lines += [
        "",
        f"{machine.measured}: {machine.cores} cores ({machine.cpu}), "
        f"{machine.memory_bytes / 2**30:.0f} GiB, {machine.system}, Python {machine.python}, "
        f"{packages}.",
    ]
    return "\n".join(lines)


PUBLISHED: dict[str, tuple[str, str, Any, Callable[[Any], str]]] = {
    "bench": ("latest.json", "measured/performance.md", Records, bench_table),
    "load": ("load.json", "measured/performance.md", LoadReport, load_table),
    "peers": ("peers.json", "measured/performance.md", PeerReport, peers_table),
    "chaos": ("chaos.json", "measured/recovery.md", ChaosReport, chaos_table),
    "hostile": ("hostile.json", "measured/recovery.md", HostileReport, hostile_table),
    "powercuts": ("powercuts.json", "measured/recovery.md", PowerCutsReport, power_cuts_table),
    "state": ("state.json", "measured/state.md", Records, bench_table),
    "delta": ("delta.json", "measured/state.md", DeltaReport, delta_table),
    "gateway": ("gateway.json", "measured/performance.md", GatewayReport, gateway_table),
    "hidden": ("hidden.json", "measured/state.md", HidingReport, hidden_table),
    "switches": ("switches.json", "measured/state.md", SwitchesReport, switches_table),
    "servers": ("servers.json", "measured/performance.md", ServersReport, servers_table),
    "scale": ("scale.json", "measured/performance.md", ScaleReport, scale_table),
    "lora": ("lora.json", "measured/state.md", Records, bench_table),
    "runtimes": ("runtimes.json", "measured/performance.md", Records, bench_table),
    "tails": ("tails.json", "measured/sharing.md", TailReport, tails_table),
    "spatial": ("spatial.json", "measured/sharing.md", SpatialReport, spatial_table),
    "offpolicy": ("offpolicy.json", "measured/sharing.md", OffPolicyReport, off_policy_table),
}
"""The file in the runs, the page, the type and the table of each published name, which is the name
in docs/measured and in the markers."""
