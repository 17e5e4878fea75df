"""The lifecycle, seen from outside: a process of its own each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.process import lifecycle
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT
from tests.support.processes import until_gone

PRELUDE = """
import asyncio, sys, time
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config, lifecycle
from phaseloom.common.contract.errors import CallerError, InternalError
def ready():
    print("ready", flush=True)
"""


async def start(body: str, **environ: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PRELUDE + body,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    return process


async def ended(process: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    """What it logged, once it has ended."""
    _, errors = await process.communicate()
    return [json.loads(line) for line in errors.decode().splitlines()]


async def until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"


SERVE = """
async def serve(stop):
    ready()
    await stop.wait()
lifecycle.run("example", serve)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_run_ends_in_order_when_signalled(number: signal.Signals) -> None:
    process = await start(SERVE)
    await until_ready(process)
    process.send_signal(number)
    lines = await ended(process)
    assert process.returncode == 0
    assert {line["service"] for line in lines} == {"example"}
    assert f"example stops: {number.name}" in [line["message"] for line in lines]


async def test_run_logs_one_line_without_traceback_when_the_caller_erred() -> None:
    process = await start(
        "async def serve(stop):\n"
        "    async with asyncio.TaskGroup():\n"
        "        raise CallerError('bad policy', field='ordering', remedy='use fcfs')\n"
        "lifecycle.run('example', serve)"
    )
    critical = [line for line in await ended(process) if line["level"] == "CRITICAL"]
    assert process.returncode == 1
    assert [line["message"] for line in critical] == [
        "example ends: INVALID_ARGUMENT: bad policy (field ordering); use fcfs"
    ]
    assert "exception" not in critical[0]


async def test_run_logs_a_traceback_when_we_erred() -> None:
    process = await start(
        "async def serve(stop):\n    raise KeyError('x')\nlifecycle.run('example', serve)"
    )
    (critical,) = [line for line in await ended(process) if line["level"] == "CRITICAL"]
    assert process.returncode == 1
    assert "Traceback" in critical["exception"]


async def test_run_fails_when_serve_ends_by_itself() -> None:
    """A service that does nothing any more must not look healthy."""
    process = await start(
        "async def serve(stop):\n    return None\nlifecycle.run('example', serve)"
    )
    lines = await ended(process)
    assert process.returncode == 1
    assert "ended without being asked to stop" in lines[-1]["message"]


async def test_run_ends_in_order_when_signalled_before_there_is_anything_to_serve() -> None:
    process = await start(
        "async def serve(stop):\n"
        "    ready()\n"
        "    await lifecycle.unless_stopped(stop, asyncio.Event().wait())\n"
        "lifecycle.run('example', serve)"
    )
    await until_ready(process)
    process.terminate()
    await ended(process)
    assert process.returncode == 0


async def test_call_that_returns_though_it_was_cancelled_has_not_been_in_vain() -> None:
    """Whoever opened something closes it."""
    stop, has_begun = asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        has_begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "opened"

    waiting = asyncio.create_task(lifecycle.unless_stopped(stop, stubborn()))
    await has_begun.wait()
    stop.set()
    assert await waiting == "opened"


async def test_run_exits_hard_when_stopping_takes_too_long() -> None:
    """Also with a blocked event loop, which no task of its own could bound."""
    process = await start(
        "lifecycle.STOP_TIMEOUT_S = 0.3\n"
        "async def serve(stop):\n"
        "    ready()\n"
        "    await stop.wait()\n"
        "    time.sleep(60)\n"
        "lifecycle.run('example', serve)"
    )
    await until_ready(process)
    process.terminate()
    async with asyncio.timeout(20):
        lines = await ended(process)
    assert process.returncode == 1
    assert "exiting hard" in lines[-1]["message"]


async def test_run_writes_its_spans_before_it_ends(tmp_path: Path) -> None:
    process = await start(
        "async def serve(stop):\n"
        "    with telemetry.span('execute', job='sums'):\n"
        "        lifecycle.log.info('within')\n"
        "    ready()\n"
        "    await stop.wait()\n"
        "lifecycle.run('example', serve)",
        PHASELOOM_TELEMETRY_SPANS_DIR=str(tmp_path),
    )
    await until_ready(process)
    process.terminate()
    (within,) = [line for line in await ended(process) if line["message"] == "within"]
    (span,) = [
        json.loads(line)
        for line in (tmp_path / f"example-{process.pid}.jsonl").read_text().splitlines()
    ]
    assert (within["trace_id"], within["span_id"]) == (span["trace_id"], span["span_id"])
    assert span["attributes"] == {"job": "sums"}


LOGGING = """
lifecycle.start_logging("example")
log = lifecycle.log
end = telemetry.setup("example", config.load(telemetry.TelemetryConfig, "telemetry"))
log.warning("outside %d", 1)
lifecycle.log_as("another")
with telemetry.span("execute") as span:
    try:
        raise ValueError("does not fit")
    except ValueError:
        log.exception("inside")
trace_id = format(span.get_span_context().trace_id, "032x")
print(trace_id, flush=True)
"""


async def logged(on_terminal: bool, tmp_path: Path, **environ: str) -> tuple[str, str]:
    """(trace id, what came on standard error), of a program that logs within a span."""
    terminal, stderr = os.openpty() if on_terminal else os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PRELUDE + LOGGING),
        env={**os.environ, "PHASELOOM_TELEMETRY_SPANS_DIR": str(tmp_path), **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    output, _ = await process.communicate()
    text = os.read(terminal, 65_536).decode()
    for descriptor in (terminal, stderr):
        os.close(descriptor)
    assert process.returncode == 0, text
    return output.decode().strip(), text


@pytest.mark.parametrize(
    ("on_terminal", "form"), [(False, None), (False, "auto"), (False, "json"), (True, "json")]
)
async def test_log_is_json_lines_with_the_trace_where_a_program_reads_it(
    on_terminal: bool, form: str | None, tmp_path: Path
) -> None:
    environ = {"PHASELOOM_LOG_FORMAT": form} if form else {}
    trace_id, text = await logged(on_terminal, tmp_path, **environ)
    outside, inside = (json.loads(line) for line in text.splitlines())
    assert outside.keys() == {"time", "level", "service", "logger", "message"}
    assert (outside["level"], outside["service"], outside["message"]) == (
        *("WARNING", "example"),
        "outside 1",
    )
    assert (inside["message"], inside["trace_id"]) == ("inside", trace_id)
    assert inside["service"] == "another"
    assert len(inside["span_id"]) == 16
    assert inside["exception"].endswith("ValueError: does not fit")


@pytest.mark.parametrize(("on_terminal", "form"), [(True, "auto"), (False, "text")])
async def test_log_is_text_with_the_trace_where_a_person_reads_it(
    on_terminal: bool, form: str, tmp_path: Path
) -> None:
    trace_id, text = await logged(on_terminal, tmp_path, PHASELOOM_LOG_FORMAT=form)
    outside, inside, *traceback = text.splitlines()
    assert outside.endswith("WARNING example: outside 1")
    assert inside.endswith(f"ERROR   another: inside  trace {trace_id}")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: does not fit"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PHASELOOM_LOG_LEVEL", "LOUD"),
        ("PHASELOOM_LOG_FORMAT", "xml"),
        ("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "7"),
        ("PHASELOOM_METRICS_PORT", "none"),
    ],
)
async def test_run_does_not_start_with_a_bad_setting(variable: str, value: str) -> None:
    process = await start(SERVE, **{variable: value})
    lines = await ended(process)
    assert process.returncode == 1
    assert variable in lines[-1]["message"]


async def test_run_dies_with_its_parent_when_asked_to() -> None:
    parent = await start(
        "import os, subprocess\n"
        f"environ = {{**os.environ, {DIE_WITH_PARENT!r}: str(os.getpid())}}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {PRELUDE + SERVE!r}], env=environ)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    await until_ready(parent)
    parent.kill()
    await parent.wait()
    await until_gone([pid], timeout_s=30)


async def test_run_dies_at_once_when_the_parent_is_gone_already() -> None:
    """The parent was killed between starting this process and the request to the kernel."""
    process = await start(SERVE, **{DIE_WITH_PARENT: "999999999"})
    assert await process.wait() == -signal.SIGKILL


async def test_run_exits_hard_when_a_task_outlasts_the_failure_of_serve() -> None:
    """A client that reconnects for ever swallowed its cancellation: the agent must still end."""
    process = await start(
        "lifecycle.STOP_TIMEOUT_S = 0.3\n"
        "async def stubborn():\n"
        "    while True:\n"
        "        try:\n"
        "            await asyncio.sleep(60)\n"
        "        except asyncio.CancelledError:\n"
        "            continue\n"
        "async def serve(stop):\n"
        "    global kept\n"
        "    kept = asyncio.create_task(stubborn())\n"
        "    await asyncio.sleep(0)\n"
        "    raise CallerError('lease lost')\n"
        "lifecycle.run('example', serve)"
    )
    async with asyncio.timeout(20):
        lines = await ended(process)
    assert process.returncode == 1
    assert any("lease lost" in line["message"] for line in lines)
