"""The dashboard of `phaseloom top`, from a run whose figures are known."""

from __future__ import annotations

import io

from rich.console import Console

from phaseloom.cli.top import WINDOW_S, Dashboard, show
from phaseloom.common.contract.api import DeploymentStatus, JobStatus
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.events import (
    JobFinished,
    Notice,
    QueuedOperation,
    WpgLost,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, JobKey, NodeId, OperationKey
from phaseloom.common.transport.decisionlog import LogEntry
from tests.support.runlog import HandMade, shared


def board_of(log: HandMade) -> Dashboard:
    dashboard = Dashboard()
    for entry in log.recorded():
        dashboard.accept(LogEntry(entry.sequence, entry.time_unix_s, entry.event, {}))
    return dashboard


def shown(dashboard: Dashboard, now_s: float) -> dict[str, list[str]]:
    """Its lines by their first word, split where two spaces are."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(dashboard.render(now_s))
    lines = [line for line in capture.get().splitlines() if line.strip()]
    return {line.split()[0]: [c for c in line.split("  ") if c.strip()] for line in lines}


def test_board_is_as_wide_as_it_needs_where_no_terminal_bounds_it() -> None:
    """Into a file or a pipe, which rich takes for a terminal of 80 columns."""
    dashboard = Dashboard()
    key, reason = (
        "a-tenant-with-a-name.a-job-with-a-longer-one",
        "what happened, told at length: " * 5,
    )
    dashboard.notice(Notice("scheduler-of-this-mesh", "operation_refused", key, reason.strip()))
    written = io.StringIO()
    show(dashboard, 0.0, Console(file=written))
    (line,) = [line for line in written.getvalue().splitlines() if key in line]
    assert reason.strip() in line
    narrow = io.StringIO()
    show(dashboard, 0.0, Console(file=narrow, width=60, force_terminal=True, color_system=None))
    assert max(map(len, narrow.getvalue().splitlines())) <= 60


def test_board_shows_shares_and_rates_of_the_window() -> None:
    """The window of 30 s ends with the log, at 132 s."""
    rows = shown(board_of(shared()), 132.0)
    t0 = [cell.strip() for cell in rows["t0"]]
    busy = f"{(4 + 5 + 4 + 5) / WINDOW_S:.0%}"
    assert t0 == ["t0", "train", "demo.b.policy", busy, "0", "0.1", "1000.0", "0%"]
    r0 = [cell.strip() for cell in rows["r0"]]
    busy = f"{(2 + 3 + 4 + 3 + 2) / WINDOW_S:.0%}"
    assert r0[:4] == ["r0", "rollout", "demo.b.sampler", busy], "two seconds of the first one"
    assert r0[-1] == "17%", "half of one of three switches"


def test_board_forgets_what_left_the_window() -> None:
    rows = shown(board_of(shared()), 132.0 + 2 * WINDOW_S)
    assert [cell.strip() for cell in rows["t0"]][3:] == ["0%", "0", "0.0", "-", "-"]


def test_board_shows_jobs_with_their_state_and_notices() -> None:
    dashboard = board_of(shared())
    moving = "to t1: waiting for save_state 3 to become durable"
    deployments = [DeploymentStatus("policy", "train", "t0", "ready", 1, 4, moving=moving)]
    dashboard.view("demo.a", encode(JobStatus("a", "active", deployments)))
    dashboard.view("demo.c", encode(JobStatus("c", "done")))
    dashboard.notice(Notice("router", "refused", "too large", "demo.a.policy.9"))
    rows = shown(dashboard, 132.0)
    where = "policy ready t0 (moves to t1: waiting for save_state 3 to become durable)"
    assert [cell.strip() for cell in rows["demo.a"]][:3] == ["demo.a", "active", where]
    assert "demo.c" not in rows, "ended, and nothing of it in the window"
    assert rows["router"][-1].strip() == "too large"
    dashboard.view("demo.a", None)
    assert "demo.a" not in shown(dashboard, 132.0)


def test_ended_job_holds_no_node() -> None:
    log = shared()
    assert "demo.b.policy" in shown(board_of(log), 132.0)["t0"][2]
    log.events.append((130.0, JobFinished(JobKey("demo", "b"), "finish")))
    rows = shown(board_of(log), 132.0)
    assert [rows[node][2].strip() for node in ("t0", "r0")] == ["-", "-"]


def test_dead_workers_hold_no_node_and_a_late_report_of_earlier_ones_changes_nothing() -> None:
    key, node = DeploymentKey("demo", "b", "policy"), NodeId("t0")
    died = ErrorInfo(Code.ABORTED, "its job has ended")
    log = shared()
    log.events.append((127.0, WpgStarted(key, 2, node, 100, 0, [0])))
    log.events.append((128.0, WpgLost(key, 1, node, died)))
    assert "demo.b.policy" in shown(board_of(log), 132.0)["t0"][2]
    log.events.append((130.0, WpgLost(key, 2, node, died)))
    assert shown(board_of(log), 132.0)["t0"][2].strip() == "-"


def test_job_whose_end_only_its_view_shows_has_nothing_open_and_no_node() -> None:
    """The log has no entry of the end of a job that failed or was drained."""
    log = shared()
    key = OperationKey("demo", "b", "policy", "99")
    log.events.append((126.0, QueuedOperation(key, "id", "optim_step")))
    board = board_of(log)
    board.view("demo.b", encode(JobStatus("b", "failed")))
    rows = shown(board, 132.0)
    assert rows["t0"][2].strip() == "-"
    (row,) = [cells for word, cells in rows.items() if word == "demo.b"]
    assert row[2].strip() == "0"
