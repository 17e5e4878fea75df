"""The live progress of a run: a table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from phaseloom.cli.recorder import Recorded
from phaseloom.demo.controllers import ControllerLine
from phaseloom.demo.report import LogReader

PLAIN_EVERY_S = 5.0
RECENT_REWARDS = 10
JOB_STYLES = ("blue", "yellow", "green", "magenta")


@dataclass(slots=True)
class JobProgress:
    """The progress of a job as reported by its controller."""

    doing: str = "starts"
    step: int = 0
    steps: int = 0
    rewards: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)

    def update(self, line: ControllerLine) -> None:
        match line["event"]:
            case "ready":
                self.doing, self.steps = "prepares", line.get("steps", 0)
            case "warmup":
                self.doing = "is warmed up"
            case "barrier":
                self.doing = f"waits at barrier {line['name']}"
            case "eval":
                self.doing = "evaluated"
                self.held_out.append(line["reward"])
            case "step":
                self.doing = "trains"
                self.step = line["step"]
                self.rewards.append(line["reward"])
            case "done":
                self.doing = "is done"

    @property
    def reward(self) -> float | None:
        """Mean reward of the newest steps; None before the first step."""
        recent = self.rewards[-RECENT_REWARDS:]
        return sum(recent) / len(recent) if recent else None


class Progress:
    """A display of one run, visible while this context manager is open.

    Callers pass it the lines of the controllers (`on_line`) and the entries of the log
    (`on_entry`).
    """

    def __init__(self, console: Console, title: str, jobs: Sequence[str]) -> None:
        self.reader = LogReader()
        self._console = console
        self._title = title
        self._jobs = {job: JobProgress() for job in jobs}
        self._styles = {job: JOB_STYLES[i % len(JOB_STYLES)] for i, job in enumerate(self._jobs)}
        self._started = time.monotonic()
        self._last_line_s = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=8
            )
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def on_line(self, job: str, line: ControllerLine) -> None:
        """Handle a line from a controller."""
        progress = self._jobs[job]
        before = progress.doing
        progress.update(line)
        now_s = time.monotonic() - self._started
        is_time = now_s - self._last_line_s >= PLAIN_EVERY_S
        if self._live is None and (is_time or progress.doing != before):
            self._last_line_s = now_s
            self._console.print(self.line(job, now_s), soft_wrap=True)

    def on_entry(self, entry: Recorded) -> None:
        """Handle an entry of the decision log."""
        self.reader.step(entry)

    def line(self, job: str, now_s: float) -> str:
        """Return a job's progress as one plain line."""
        p = self._jobs[job]
        held_out = "".join(f", held out {r:.3f}" for r in p.held_out[-1:])
        reward = "" if p.reward is None else f", reward {p.reward:.3f}"
        switches = len(self.reader.log.switches)
        of = f"/{p.steps}" if p.steps else ""
        return (
            f"  {now_s:6.1f} s  {job} {p.doing}: step {p.step}{of}{reward}{held_out}, "
            f"{switches} context switches"
        )

    def render(self) -> Group:
        jobs = Table(box=None, pad_edge=False)
        for column in ("job", "", "step", "reward", "held out"):
            jobs.add_column(column, min_width=12)
        for job, p in self._jobs.items():
            jobs.add_row(
                Text(job, self._styles[job]),
                p.doing,
                f"{p.step}/{p.steps}" if p.steps else str(p.step),
                "" if p.reward is None else f"{p.reward:.3f}",
                " → ".join(f"{r:.3f}" for r in p.held_out),
            )
        log, seconds = self.reader.log, time.monotonic() - self._started
        heading = (
            f"{self._title}  {seconds:.0f} s, {log.completed} operations, "
            f"{len(log.switches)} context switches"
        )
        return Group(Text(heading, "bold"), jobs, self._devices())

    def _devices(self) -> Text:
        text = Text()
        for node in self.reader.log.devices:
            job = self.reader.resident.get(node)
            text.append(f"{node} ")
            style = f"on {self._styles[job]}" if job in self._styles else "dim"
            text.append(f" {job or 'empty'} ", style)
            text.append("   ")
        return text
