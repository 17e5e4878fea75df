"""What people see of a mesh that works: the traces of real operations, metrics, `top`, `trace`.

One mesh of real processes, two jobs that take turns on one device, looked at from all sides.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.cli.up import greeting
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, encode
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import AdamParams, Operation, OptimStep
from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import InstrumentKind
from phaseloom.common.transport.connection import connect
from phaseloom.common.transport.services import pub_ack
from tests.support.directories import short_directory
from tests.support.otlp import Span, receiver
from tests.support.processes import without_torch

PHASELOOM = str(Path(sys.executable).with_name("phaseloom"))
NODE = "train-0"
CONTROLLER = """
import asyncio
from phaseloom import client
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.operations import AdamParams
from phaseloom.common.contract.specs import DeploymentSpec, Layout, ModelSpec

async def main():
    end = telemetry.setup("controller", config.load(telemetry.TelemetryConfig, "telemetry"))
    async with client.connect() as mesh:
        spec = DeploymentSpec("policy", "train", "noop", ModelSpec({}), trainable=True)
        sums, letters = [await mesh.submit_job(name, [spec]) for name in ("sums", "letters")]
        for job in (sums, letters, sums):
            await job.deployment("policy").optim_step(AdamParams(1e-4))
        for bad in (
            letters.deployment("policy").load_state("nothing"),
            sums.deployment("policy").optim_step(AdamParams(-1.0)),
        ):
            try:
                await bad
            except PhaseloomError as error:
                print(error.info.code)
        spec = DeploymentSpec("policy", "pair", "noop", ModelSpec({}), layout=Layout(dp=2))
        job = await mesh.submit_job("two", [spec])
        await job.deployment("policy").optim_step(AdamParams(1e-4))
    end()

asyncio.run(main())
"""
NUM_ON_NODE = 4
"""Operations that reach its device."""
NUM_OPERATIONS = NUM_ON_NODE + 1
"""With that of the job on two devices."""
SPANS = {
    # name: (parent, service)
    "submit": (None, "controller"),
    "route": ("submit", "router"),
    "queue": ("route", "scheduler"),
    "permit": ("route", "scheduler"),
    "switch": ("permit", "worker"),
    "offload": ("switch", "statemgr"),
    "load": ("switch", "statemgr"),
    "execute": ("permit", "worker"),
    "complete": ("permit", "worker"),
}

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By name: labels and value."""


@dataclass
class Seen:
    """A mesh that has run the controller, and is gone."""

    spans: list[Span]
    scraped: dict[str, Samples]
    """By process."""
    top: str
    """`top --once`."""
    live_top: str
    """What a terminal got from `top` until it was interrupted."""
    greeting: str
    """What `phaseloom up` prints."""
    run_dir: Path

    def span(self, name: str, operation: str) -> Span:
        """The one span of this name in the trace of `<job>.policy.<seq>`."""
        job, _, seq = operation.split(".")
        (submit,) = [
            span
            for span in self.spans
            if span["name"] == "submit"
            and (span["attributes"]["job"], span["attributes"]["seq"]) == (job, seq)
        ]
        (found,) = [
            span
            for span in self.spans
            if span["name"] == name and span["trace_id"] == submit["trace_id"]
        ]
        return found

    def value(self, metric: metrics.Metric, suffix: str = "", **labels: str) -> float:
        """Sum of a metric's samples with these labels, over all processes."""
        name = metric.prometheus + suffix
        found = [
            value
            for samples in self.scraped.values()
            for own, value in samples.get(name, [])
            if labels.items() <= own.items()
        ]
        assert found, f"no sample of {name} with {labels}"
        return sum(found)


TOP = """
import sys
from phaseloom.cli import main, top

top.WINDOW_S = 3600.0
sys.argv.insert(1, "top")
main.main()
"""
"""`phaseloom top`, which counts all that has ended, however slow the machine is."""


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    with short_directory() as run_dir, without_torch():
        yield asyncio.run(_observed(run_dir))


async def _observed(run_dir: Path) -> Seen:
    nodes = [NodeConfig(NODE, "train", [2**20]), NodeConfig("pair-0", "pair", [2**20, 2**20])]
    config = MeshConfig(nodes=nodes, metrics=True)
    with receiver() as received, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PHASELOOM_TELEMETRY_OTLP_ENDPOINT", received.endpoint)
        async with Mesh(config, run_dir) as mesh:
            await mesh.ready()
            await _control(mesh)
            await _leave_a_gap(mesh)
            scraped = await _scraped_after_all(mesh)
            for name, number in (("complete", 0), ("execute", 1), ("load", 1)):
                await received.until(
                    lambda s, name=name, number=number: _count(s, name) == NUM_OPERATIONS + number  # type: ignore[misc]
                )
            top = await _run(sys.executable, "-c", TOP, "--once", "--run", str(run_dir))
            live_top = await _interrupted(PHASELOOM, "top", "--run", str(run_dir))
            said = greeting(mesh)
        return Seen(received.spans, scraped, top, live_top, said, run_dir)


def _count(spans: list[Span], name: str) -> int:
    return sum(span["name"] == name for span in spans)


async def _control(mesh: Mesh) -> None:
    (tenant, password), *_ = mesh.credentials.tenants.items()
    output = await _run(
        *(sys.executable, "-c", CONTROLLER),
        PHASELOOM_URL=mesh.url,
        PHASELOOM_TENANT=tenant,
        PHASELOOM_PASSWORD=password,
        PHASELOOM_TELEMETRY_SPANS_DIR=str(mesh.run_dir / "spans"),
    )
    assert output.split() == ["NOT_FOUND", "INVALID_ARGUMENT"], "by the worker, and by the router"


async def _leave_a_gap(mesh: Mesh) -> None:
    """An operation that waits for good: the ones before it never come."""
    (tenant, password), *_ = mesh.credentials.tenants.items()
    client = await connect(mesh.url, "gap", tenant, password, inbox_prefix=f"_INBOX_{tenant}")
    operation = Operation("gap", 1, OptimStep(AdamParams(1e-4)))
    subject = streams.op_subject(OperationKey(tenant, "letters", "policy", "9"))
    headers = {CONTENT_TYPE: MSGPACK}
    pub_ack(await client.request(subject, encode(operation), timeout=30, headers=headers))
    await client.close()


async def _run(*command: str, **environ: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "COLUMNS": "160", **environ},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def _interrupted(*command: str) -> str:
    """Run it on a terminal until the table is there, then press Ctrl-C."""
    terminal, own = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "COLUMNS": "160", "TERM": "xterm"}, stdout=own, stderr=own
    )
    os.close(own)
    os.set_blocking(terminal, False)
    shown = b""
    try:
        async with asyncio.timeout(60):
            while b"demo.letters.policy" not in shown or b"demo.sums" not in shown:
                shown += await _read(terminal)
            process.send_signal(signal.SIGINT)
            while process.returncode is None:
                shown += await _read(terminal)
    except TimeoutError:
        process.kill()
        raise AssertionError(f"top hangs after {shown.decode()}") from None
    finally:
        os.close(terminal)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


async def _read(terminal: int) -> bytes:
    """What is there, or nothing, a moment later."""
    await asyncio.sleep(0.02)
    with suppress(OSError):  # nothing, or the terminal's other end is closed
        return os.read(terminal, 65_536)
    return b""


async def _scraped_after_all(mesh: Mesh) -> dict[str, Samples]:
    """Every process's metrics, once all that was done has come to profiler and scheduler."""
    urls = msgspec.json.decode((mesh.run_dir / "mesh.json").read_bytes())["metrics"]
    finished = metrics.OPERATIONS_FINISHED.prometheus

    async def is_done() -> bool:
        profiler = await asyncio.to_thread(_scrape, urls["profiler"])
        scheduler = await asyncio.to_thread(_scrape, urls["scheduler"])
        return (
            sum(value for _, value in profiler.get(finished, [])) == NUM_OPERATIONS
            and sum(value for _, value in scheduler[metrics.QUEUE_DEPTH.prometheus]) == 1
            and profiler[metrics.PROFILER_LAG.prometheus][0][1] == 0
            and scheduler[metrics.SCHEDULER_LAG.prometheus][0][1] == 0
        )

    await _until(is_done)
    return {name: await asyncio.to_thread(_scrape, url) for name, url in urls.items()}


async def _until(is_met: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await is_met():
            await asyncio.sleep(0.05)


def _scrape(url: str) -> Samples:
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


# --- Traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["letters.policy.1", "sums.policy.2"])
def test_operation_that_displaces_another_has_the_whole_tree(seen: Seen, operation: str) -> None:
    """Submit → route → queue, permit → switch (offload, load), execute → complete."""
    tree = {name: seen.span(name, operation) for name in SPANS}
    for name, (parent, service) in SPANS.items():
        assert tree[name]["service"] == service
        assert tree[name]["parent_id"] == (tree[parent]["span_id"] if parent else None)
        assert tree[name]["duration_ns"] >= 0


def test_operation_that_displaces_nobody_has_no_offload(seen: Seen) -> None:
    """The first one on an empty device."""
    names = [s["name"] for s in seen.spans if s["trace_id"] == _trace_id(seen, "sums.policy.1")]
    assert sorted(names) == sorted(SPANS.keys() - {"offload"})


def _trace_id(seen: Seen, operation: str) -> str:
    trace_id: str = seen.span("submit", operation)["trace_id"]
    return trace_id


def test_operation_of_two_ranks_is_executed_on_each_device(seen: Seen) -> None:
    """The leader's span and its follower's, both under the permit."""
    trace_id, permit = _trace_id(seen, "two.policy.1"), seen.span("permit", "two.policy.1")
    for name, parent in (("execute", permit), ("load", seen.span("switch", "two.policy.1"))):
        both = [s for s in seen.spans if s["trace_id"] == trace_id and s["name"] == name]
        assert sorted(s["attributes"]["device"] for s in both) == [0, 1]
        assert [s["parent_id"] for s in both] == [parent["span_id"]] * 2


def test_spans_say_what_they_are_about(seen: Seen) -> None:
    operation = {
        "tenant": "demo",
        "job": "letters",
        "deployment": "policy",
        "seq": "1",
        "kind": "optim_step",
    }
    for name in ("submit", "route", "queue", "permit", "execute", "complete"):
        attributes = seen.span(name, "letters.policy.1")["attributes"]
        assert operation.items() <= attributes.items(), name
    epoch = seen.span("permit", "letters.policy.1")["attributes"]["epoch"]
    for name in ("switch", "execute", "complete"):
        attributes = seen.span(name, "letters.policy.1")["attributes"]
        assert {"node": NODE, "device": 0, "epoch": epoch}.items() <= attributes.items(), name
    moved = {
        name: seen.span(name, "letters.policy.1")["attributes"] for name in ("offload", "load")
    }
    assert (moved["offload"]["job"], moved["load"]["job"]) == ("sums", "letters")
    assert all(attributes["num_bytes"] == 64 for attributes in moved.values())


def test_switch_links_to_the_operation_that_it_displaced(seen: Seen) -> None:
    for operation, displaced in (
        ("letters.policy.1", "sums.policy.1"),
        ("sums.policy.2", "letters.policy.1"),
        ("letters.policy.2", "sums.policy.2"),
    ):
        (link,) = seen.span("switch", operation)["links"]
        assert link["trace_id"] == _trace_id(seen, displaced) != _trace_id(seen, operation)
        assert link["span_id"] == seen.span("permit", displaced)["span_id"]
    assert seen.span("switch", "sums.policy.1")["links"] == []


def test_service_logs_within_the_trace_of_the_operation(seen: Seen) -> None:
    """A refusal's line leads to its trace."""
    lines = [
        json.loads(line)
        for file in (seen.run_dir / "logs").glob("router-*.log")
        for line in file.read_text().splitlines()
    ]
    (refusal,) = [line for line in lines if "refused demo.sums.policy.3" in line["message"]]
    assert refusal["trace_id"] == _trace_id(seen, "sums.policy.3")
    assert refusal["span_id"] == seen.span("route", "sums.policy.3")["span_id"]


# --- Metrics --------------------------------------------------------------------------------------


def test_every_sample_is_of_a_metric_in_the_table_and_of_its_service(seen: Seen) -> None:
    suffixes = {
        InstrumentKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
        InstrumentKind.COUNTER: ("",),
    }
    known = {
        metric.prometheus + suffix: metric
        for metric in metrics.TABLE
        for suffix in suffixes.get(metric.kind, ("",))
    }
    for process, samples in seen.scraped.items():
        assert samples.keys() - {"target_info"}, f"{process} serves nothing"
        for name in samples.keys() - {"target_info"}:
            metric = known[name]
            assert process.split("-")[0] == metric.service, name
            for labels, _ in samples[name]:
                assert labels.keys() - {"le"} == set(metric.labels), name


def test_up_says_where_metrics_are(seen: Seen) -> None:
    (line,) = [line for line in seen.greeting.splitlines() if line.startswith("metrics: ")]
    urls = msgspec.json.decode((seen.run_dir / "mesh.json").read_bytes())["metrics"]
    assert line.removeprefix("metrics: ").split(", ") == list(urls.values())
    assert urls.keys() == seen.scraped.keys()


def test_metrics_tell_what_the_jobs_did(seen: Seen) -> None:
    assert seen.value(metrics.OPERATIONS_ROUTED, tenant="demo", code="OK") == NUM_OPERATIONS + 1
    assert seen.value(metrics.OPERATIONS_ROUTED, tenant="demo", code="INVALID_ARGUMENT") == 1
    assert seen.value(metrics.PERMITS, kind="optim_step") == 4
    completed = {"tenant": "demo", "kind": "optim_step", "outcome": "completed"}
    assert seen.value(metrics.OPERATIONS_FINISHED, **completed) == 4
    assert seen.value(metrics.OPERATIONS_FINISHED, kind="load_state", outcome="failed") == 1
    assert seen.value(metrics.OPERATION_WAIT, "_count", pool="train") == NUM_ON_NODE
    assert seen.value(metrics.OPERATION_DURATION, "_sum", pool="train") == pytest.approx(
        seen.value(metrics.DEVICE_BUSY, node=NODE, device="0")
    )
    pair = [seen.value(metrics.DEVICE_BUSY, node="pair-0", device=device) for device in "01"]
    assert pair[0] == pair[1] > 0
    assert seen.value(metrics.QUEUE_DEPTH, tenant="demo", job="letters") == 1, "after the gap"
    assert seen.value(metrics.QUEUE_DEPTH, tenant="demo", job="sums") == 0
    assert seen.value(metrics.ROUTER_LAG, tenant="demo") == 0
    assert seen.value(metrics.LOG_SIZE) > 0
    assert seen.value(metrics.STEP_DURATION, "_count") >= 2 * NUM_OPERATIONS


def test_metrics_tell_what_moved(seen: Seen) -> None:
    """Four loads of 64 bytes, three of them in place of the other job's."""
    for part in ("offload", "load"):
        assert seen.value(metrics.SWITCH_DURATION, "_count", node=NODE, part=part) == 4
    assert seen.value(metrics.SWITCH_MOVED, node=NODE, direction="out") == 3 * 64
    assert seen.value(metrics.SWITCH_MOVED, node=NODE, direction="in") == 4 * 64
    assert seen.value(metrics.TRANSFER_MOVED, node=NODE, direction="offload") == 3 * 64
    assert seen.value(metrics.TRANSFER_DURATION, "_count", node=NODE, direction="load") == 4
    assert seen.value(metrics.SWITCH_HIDDEN) <= seen.value(metrics.SWITCH_DURATION, "_sum")
    assert seen.value(metrics.DEVICE_USED, node=NODE, device="0") == 64
    assert seen.value(metrics.DEVICE_BUDGET, node=NODE, device="0") == 2**20
    assert 0 < seen.value(metrics.ARENA_USED) < seen.value(metrics.ARENA_BUDGET)
    assert seen.value(metrics.WORKER_WPGS, node=NODE) == 2


# --- In a terminal --------------------------------------------------------------------------------


def test_top_shows_jobs_and_nodes(seen: Seen) -> None:
    rows = [line.split() for line in seen.top.splitlines()]
    assert "jobs: 3, operations: 1 open, 5 done" in seen.top
    by_first = {row[0]: row for row in rows if row}
    assert by_first["demo.sums"][1:5] == ["active", "policy", "ready", NODE]
    assert by_first["demo.letters"][-1] == "1", "the failed operation"
    assert by_first[NODE][:3] == [NODE, "train", "demo.letters.policy"]


def test_top_is_live_until_it_is_interrupted(seen: Seen) -> None:
    assert "operations:" in seen.live_top
    assert "Traceback" not in seen.live_top


async def test_trace_shows_the_waterfall_and_what_was_displaced(seen: Seen) -> None:
    run = ("--run", str(seen.run_dir))
    output = await _run(PHASELOOM, "trace", "demo.letters.policy.1", *run)
    head, _, *lines = output.splitlines()
    assert head.startswith("demo.letters.policy.1  optim_step")
    order = [line.split()[0] for line in lines]
    assert [name for name in order if name != "displaced"] == list(SPANS)
    (displaced,) = [line.strip() for line in lines if "displaced" in line]
    assert displaced == "displaced demo.sums.policy.1 (optim_step)"
    assert order.index("displaced") == order.index("switch") + 1
    assert all(set(line) & set("▏▎▍▌▋▊▉█") for line in lines if "displaced" not in line)


async def test_trace_says_so_when_there_is_no_such_operation(seen: Seen) -> None:
    process = await asyncio.create_subprocess_exec(
        *(PHASELOOM, "trace", "demo.letters.policy.8", "--run", str(seen.run_dir)),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"has no spans of demo.letters.policy.8" in errors
