"""The summary of a run as text: tables, notes, and a list of problems."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from phaseloom.demo.report import Summary


def tables(summary: Summary) -> Group:
    return Group("", _jobs(summary), "", _devices(summary))


def hashes(summary: Summary) -> list[str]:
    """Return lines with the SHA-256 of each job's final weights, shared and, if run, alone."""
    lines = ["", "SHA-256 of the final weights"]
    before = summary.baseline.jobs if summary.baseline else []
    alone = {job.name: job.weights_sha256 for job in before}
    for job in summary.jobs:
        if job.name in alone:
            same = "identical" if alone[job.name] == job.weights_sha256 else "DIFFERENT"
            lines.append(f"  {alone[job.name]}  {job.name}, alone")
            lines.append(f"  {job.weights_sha256}  {job.name}, shared: {same}")
        else:
            lines.append(f"  {job.weights_sha256}  {job.name}")
    return [*lines, ""]


def notes(summary: Summary) -> list[str]:
    """Return the figures of a run as lines of prose, which also define ambiguous terms."""
    total, operations = summary.whole_run, summary.operations
    lines = []
    if summary.saved_percent is not None and summary.bound_saved_percent is not None:
        percent = summary.saved_percent
        told = f"saved {percent:.1f} % of the device-seconds per training step"
        if percent < 0:
            told = (
                f"cost {-percent:.1f} % more device-seconds per training step than one job after "
                f"the other, because {_cause(summary)}"
            )
        lines.append(
            f"{told}; the phases measured alone allow a saving of at most "
            f"{summary.bound_saved_percent:.1f} %, two synchronous jobs 50 %"
        )
        lines += _processors(summary)
        if summary.saved_percent > summary.bound_saved_percent:
            lines.append(
                "note: the saving exceeds the bound, so this machine was slower while the jobs ran "
                "alone; run the demo again with nothing else running"
            )
    line = f"whole run, warm-up and evaluations included: {total.seconds:.1f} s"
    if total.saved_percent is not None and total.alone_seconds is not None:
        line += (
            f" shared, {total.alone_seconds:.1f} s one job after the other: "
            f"{abs(total.saved_percent):.1f} % {'saved' if total.saved_percent >= 0 else 'more'}"
        )
    lines.append(line)
    lines.append(
        f"operations: {operations.submitted} submitted, {operations.completed} completed, "
        f"{operations.failed} failed"
    )
    starts = summary.predicted_starts
    if starts is not None and starts.error_p50 is not None and starts.error_p90 is not None:
        lines.append(
            f"predicted starts (`phaseloom explain`) of {starts.operations} operations that waited "
            f"for a device: median error {100 * starts.error_p50:.0f} % of the wait, "
            f"{100 * starts.error_p90:.0f} % at the 90th percentile"
        )
    lasted = summary.predicted_durations
    if lasted is not None and lasted.error_p50 is not None and lasted.error_p90 is not None:
        lines.append(
            f"predicted durations of {lasted.operations} operations: median error "
            f"{100 * lasted.error_p50:.0f} %, {100 * lasted.error_p90:.0f} % at the 90th percentile"
        )
    return [*lines, *(f"note: {note}" for note in summary.notes)]


BUSY_SHARE = 0.1
"""Share of the cores from which other programs count as the cause of a slow run."""
FULL_SHARE = 0.85
"""Share of the cores from which the jobs themselves count as having all of them."""


def _cause(summary: Summary) -> str:
    """Return the most likely reason for a shared run that took longer."""
    processors = summary.processors
    if processors is not None and processors.shared.wall_s > 0:
        cores, shared = processors.cores, processors.shared
        got, others = shared.processor_s / shared.wall_s, shared.others_s / shared.wall_s
        if others >= BUSY_SHARE * cores:
            return (
                f"the machine was busy with other work: the jobs' processes got {got:.1f} of "
                f"{cores} cores, other programs {others:.1f}"
            )
        if got >= FULL_SHARE * cores:
            return (
                f"the emulated devices share {cores} cores, of which the jobs' processes used "
                f"{got:.1f}: there was no idle time to fill"
            )
    waited = max(summary.waiting_share.values(), default=0.0)
    hidden_s = summary.hidden_switch_seconds
    return (
        f"switches took {summary.switch_seconds:.1f} s, of which {hidden_s:.1f} s were hidden, and "
        f"a device stood idle despite ready work for {100 * waited:.0f} % of the time"
    )


def _processors(summary: Summary) -> list[str]:
    """Compare processor time with wall time."""
    processors = summary.processors
    if processors is None or not (processors.alone.wall_s and processors.shared.wall_s):
        return []
    steps = sum(job.steps for job in summary.jobs)
    words = []
    for name, usage in (("alone", processors.alone), ("shared", processors.shared)):
        words.append(
            f"{name} {usage.processor_s / steps:.2f} s in {usage.wall_s / steps:.2f} s "
            f"({usage.processor_s / usage.wall_s:.1f} of {processors.cores} cores, other programs "
            f"{usage.others_s / usage.wall_s:.1f})"
        )
    return [f"processor time per training step: {', '.join(words)}"]


def problems(summary: Summary, *, judges_rewards: bool) -> list[str]:
    """Return a sentence for each failed expectation, or an empty list after a good run.

    Args: judges_rewards: whether rewards must have risen; False for runs too short to learn.
    """
    failures = []
    for job in summary.jobs:
        if judges_rewards and job.reward_end <= job.reward_start:
            failures.append(
                f"the held-out reward of {job.name} did not rise: "
                f"{job.reward_start:.3f} → {job.reward_end:.3f}"
            )
    if summary.baseline:
        for alone, job in zip(summary.baseline.jobs, summary.jobs, strict=True):
            if alone.weights_sha256 != job.weights_sha256:
                failures.append(
                    f"the final weights of {job.name} differ: alone {alone.weights_sha256}, "
                    f"shared {job.weights_sha256}"
                )
    if summary.operations.failed:
        failures.append(f"{summary.operations.failed} operations failed")
    return failures


def _jobs(summary: Summary) -> Table:
    table = Table(title="Jobs", title_justify="left")
    for column in ("job", "steps", "reward, held out", "GRPO alone", "shared", "slowdown"):
        table.add_column(column, justify="left" if column == "job" else "right")
    alone = {job.name: job for job in summary.baseline.jobs} if summary.baseline else {}
    for job in summary.jobs:
        before = alone.get(job.name)
        table.add_row(
            job.name,
            str(job.steps),
            f"{job.reward_start:.3f} → {job.reward_end:.3f}",
            f"{before.grpo_seconds:.1f} s" if before else "–",
            f"{job.grpo_seconds:.1f} s",
            f"{job.slowdown:.2f} ×" if job.slowdown else "–",
        )
    return table


def _devices(summary: Summary) -> Table:
    table = Table(title="Devices, from the first to the last GRPO operation", title_justify="left")
    table.add_column("figure")
    table.add_column("alone", justify="right")
    table.add_column("shared", justify="right")
    per_step = summary.device_seconds_per_step
    alone = "–" if per_step.alone is None else f"{per_step.alone:.3f}"
    table.add_row("device-seconds per training step", alone, f"{per_step.shared:.3f}")
    if summary.saved_percent is not None and summary.bound_saved_percent is not None:
        table.add_row(
            "saved (bound that the phases allow)"
            if summary.saved_percent >= 0
            else "more than alone (saving that the phases allow)",
            "",
            f"{abs(summary.saved_percent):.1f} % ({summary.bound_saved_percent:.1f} %)",
        )
    alone_switches = (
        str(sum(job.context_switches for job in summary.baseline.jobs)) if summary.baseline else "–"
    )
    table.add_row("context switches", alone_switches, str(summary.context_switches))
    table.add_row(
        "switch seconds (hidden seconds)",
        "",
        f"{summary.switch_seconds:.2f} ({summary.hidden_switch_seconds:.2f})",
    )
    for node, share in summary.busy_share.items():
        table.add_row(f"{node} busy", _alone_busy(summary, node), f"{100 * share:.1f} %")
    for node, share in summary.waiting_share.items():
        table.add_row(f"{node} idle despite ready work", "", f"{100 * share:.1f} %")
    return table


def _alone_busy(summary: Summary, node: str) -> str:
    if summary.baseline is None:
        return "–"
    shares = [
        job.busy_seconds_per_step.get(node, 0.0) / job.seconds_per_step
        for job in summary.baseline.jobs
    ]
    return ", ".join(f"{100 * share:.1f} %" for share in shares)
