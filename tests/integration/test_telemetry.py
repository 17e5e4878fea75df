"""Traces across processes and the bus, received by a real OTLP receiver and read from files."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from phaseloom.common.transport.natsserver import EmbeddedServer
from tests.support.otlp import Span, receiver

ROUTER = """
import asyncio, json, sys
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config, lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
async def serve(stop):
    bus = await Bus.open(config.load(BusConfig, "bus"), "router")
    async def handle(message):
        displaced = telemetry.record("execute", 10.0, 11.5, job="letters")
        context = telemetry.extract(message.headers)
        with telemetry.span("route", parent=context, links=[displaced], tenant="acme", seq=3):
            await message.respond(b"ok")
    await bus.client.subscribe("call", cb=handle)
    await bus.client.flush()
    print("ready", flush=True)
    await stop.wait()
    await bus.close()
lifecycle.run("router", serve)
"""

CLIENT = """
import asyncio, sys
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import BusConfig
async def main():
    end = telemetry.setup("client", config.load(telemetry.TelemetryConfig, "telemetry"))
    bus = await Bus.open(config.load(BusConfig, "bus"), "client")
    headers = {"Content-Type": "x"}
    with telemetry.span("submit", job="sums"):
        await bus.client.request("call", b"", headers=telemetry.inject(headers), timeout=30)
    assert headers == {"Content-Type": "x"}
    await bus.close()
    end()
asyncio.run(main())
"""


async def exchange(server: EmbeddedServer, **environ: str) -> None:
    """A client calls a router over the bus; both have ended when this returns."""
    credentials = server.credentials
    environment = {
        **os.environ,
        "PHASELOOM_BUS_URL": credentials.url,
        "PHASELOOM_BUS_USER": credentials.user,
        "PHASELOOM_BUS_PASSWORD": credentials.password,
        **{f"PHASELOOM_TELEMETRY_{name}": value for name, value in environ.items()},
    }
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ROUTER, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert router.stdout is not None
    assert await router.stdout.readline() == b"ready\n"
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, env=environment)
    assert await client.wait() == 0
    router.terminate()
    assert await router.wait() == 0


def from_files(directory: Path) -> list[Span]:
    return [
        json.loads(line)
        for file in sorted(directory.iterdir())
        for line in file.read_text().splitlines()
    ]


def check_tree(spans: list[Span]) -> None:
    by_name = {span["name"]: span for span in spans}
    submit, route, displaced = by_name["submit"], by_name["route"], by_name["execute"]
    assert (submit["service"], route["service"]) == ("client", "router")
    assert submit["parent_id"] is None
    assert (route["trace_id"], route["parent_id"]) == (submit["trace_id"], submit["span_id"])
    assert route["links"] == [{key: displaced[key] for key in ("trace_id", "span_id")}]
    assert displaced["trace_id"] != submit["trace_id"]


async def test_trace_crosses_processes_and_arrives_at_an_otlp_receiver(
    nats_server: EmbeddedServer,
) -> None:
    with receiver() as received:
        await exchange(nats_server, OTLP_ENDPOINT=received.endpoint)
    check_tree(received.spans)
    (displaced,) = [span for span in received.spans if span["name"] == "execute"]
    assert displaced["duration_ns"] == 1_500_000_000


async def test_trace_is_written_to_files_one_a_process(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    await exchange(nats_server, SPANS_DIR=str(tmp_path / "spans"))
    assert len(list((tmp_path / "spans").iterdir())) == 2
    spans = from_files(tmp_path / "spans")
    check_tree(spans)
    by_name = {span["name"]: span for span in spans}
    assert by_name["route"]["attributes"] == {"tenant": "acme", "seq": 3}
    assert by_name["execute"]["start_unix_ns"] == 10_000_000_000
    assert by_name["execute"]["end_unix_ns"] == 11_500_000_000
    assert by_name["submit"]["start_unix_ns"] <= by_name["route"]["start_unix_ns"]


async def test_trace_is_left_out_whole_when_it_is_not_sampled(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    await exchange(nats_server, SPANS_DIR=str(tmp_path / "spans"), SAMPLE_RATIO="0")
    assert from_files(tmp_path / "spans") == []


SNIPPET = """
import sys, time
from phaseloom.common.observability import telemetry
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.process import config
end = telemetry.setup("example", config.load(telemetry.TelemetryConfig, "telemetry"))
"""


async def run_snippet(body: str, **environ: str) -> tuple[int, bytes]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SNIPPET + body,
        env={**os.environ, **{f"PHASELOOM_TELEMETRY_{k}": v for k, v in environ.items()}},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output


async def test_burst_of_spans_loses_none(tmp_path: Path) -> None:
    """OpenTelemetry's own queue holds 2,048 and drops the rest."""
    code, output = await run_snippet(
        "for n in range(20_000):\n    telemetry.record('execute', n, n + 1, seq=n)\nend()",
        SPANS_DIR=str(tmp_path),
    )
    assert code == 0, output
    assert [s["attributes"]["seq"] for s in from_files(tmp_path)] == list(range(20_000))


async def test_span_keeps_the_error_that_ended_it_and_lets_it_pass(tmp_path: Path) -> None:
    code, output = await run_snippet(
        "try:\n"
        "    with telemetry.span('switch', job=JobKey('acme', 'sums'), node=None):\n"
        "        raise ValueError('does not fit')\n"
        "except ValueError:\n"
        "    print('passed')\n"
        "end()",
        SPANS_DIR=str(tmp_path),
    )
    assert (code, output) == (0, b"passed\n")
    (span,) = from_files(tmp_path)
    assert span["error"] == "does not fit"
    assert span["attributes"] == {"job": "acme.sums"}


async def test_recorded_parent_takes_children(tmp_path: Path) -> None:
    code, output = await run_snippet(
        "parent = telemetry.record('switch', 1.0, 3.0)\n"
        "telemetry.record('offload', 1.0, 2.0, parent=telemetry.child_context(parent))\n"
        "end()",
        SPANS_DIR=str(tmp_path),
    )
    assert code == 0, output
    switch, offload = from_files(tmp_path)
    assert (offload["trace_id"], offload["parent_id"]) == (switch["trace_id"], switch["span_id"])


async def test_setup_says_what_to_install_when_the_otlp_exporter_is_missing() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys\n"
        "sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None\n"
        "from phaseloom.common.observability import telemetry\n"
        "from phaseloom.common.contract.errors import CallerError\n"
        "try:\n"
        "    telemetry.setup('x', telemetry.TelemetryConfig(otlp_endpoint='http://127.0.0.1:1'))\n"
        "except CallerError as error:\n"
        "    print(error.info.remedy)\n",
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert b"pip install 'phaseloom[otlp]'" in output


@pytest.mark.parametrize("ratio", ["0", "1"])
async def test_span_is_cheap_when_it_goes_nowhere(ratio: str) -> None:
    """Sampled out or without a target: below 50 µs on the slowest machine, 5 µs on most.

    Of the process's own time: others may have the processor meanwhile.
    """
    code, output = await run_snippet(
        "began = time.process_time()\n"
        "for n in range(20_000):\n    telemetry.record('execute', 1.0, 2.0, seq=n)\n"
        "print((time.process_time() - began) / 20_000 * 1e6)",
        SAMPLE_RATIO=ratio,
    )
    assert code == 0, output
    assert float(output) < 50
