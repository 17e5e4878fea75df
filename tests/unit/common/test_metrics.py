"""The table of metrics against its documentation and the dashboard, and the endpoint itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phaseloom.common.contract.ids import JobKey
from phaseloom.common.observability import metrics
from phaseloom.common.observability.metrics import MAX_JOBS, InstrumentKind, Metric, per_job

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "phaseloom.json"
_SUFFIXES = ("_bucket", "_sum", "_count")


def row(metric: Metric) -> str:
    """As `docs/metrics.md` has it."""
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    cells = (f"`{metric.name}`", f"`{metric.prometheus}`", metric.kind, f"`{metric.unit}`")
    return f"| {' | '.join((*cells, labels, metric.service, metric.meaning))} |"


def test_documentation_has_every_metric_as_the_table_has_it() -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| `phaseloom.")] == [
        row(m) for m in metrics.TABLE
    ]


def test_names_are_unique_and_of_one_form() -> None:
    assert len({m.name for m in metrics.TABLE}) == len({m.prometheus for m in metrics.TABLE})
    assert len({m.name for m in metrics.TABLE}) == len(metrics.TABLE)
    for metric in metrics.TABLE:
        assert re.fullmatch(r"phaseloom(\.[a-z]+)+", metric.name), metric.name
        assert re.fullmatch(r"s|By|\{[a-z]+\}", metric.unit), metric.name


def test_every_metric_is_used_by_the_service_that_it_is_of() -> None:
    constants = {m: name for name, m in vars(metrics).items() if isinstance(m, Metric)}
    for metric in metrics.TABLE:
        of_all = ROOT / "libs" / "common" / "phaseloom" / "common" / "process"
        of_one = ROOT / "services" / metric.service
        sources = (of_all if metric.service == "all" else of_one).rglob("*.py")
        used = any(f"metrics.{constants[metric]}" in source.read_text() for source in sources)
        assert used, f"{metric.name} is not used in services/{metric.service}"


# --- The dashboard --------------------------------------------------------------------------------


def queries() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))


def queried(expression: str) -> set[Metric]:
    """The metrics of a query. Raises: AssertionError: a name that is not in the table."""
    found = set()
    for name in re.findall(r"phaseloom_\w+", expression):
        metric = _by_prometheus_name().get(name)
        assert metric is not None, f"{name} in {expression}"
        found.add(metric)
    return found


def _by_prometheus_name() -> dict[str, Metric]:
    names = {}
    for metric in metrics.TABLE:
        suffixes = _SUFFIXES if metric.kind is InstrumentKind.HISTOGRAM else ("",)
        names.update({metric.prometheus + suffix: metric for suffix in suffixes})
    return names


def test_dashboard_queries_metrics_that_exist_and_shows_them_all() -> None:
    shown = [queried(expression) for expression in queries()]
    assert all(shown)
    assert set().union(*shown) == set(metrics.TABLE)


def test_dashboard_groups_and_filters_by_labels_that_exist() -> None:
    for expression in queries():
        known = {"le"}.union(*(metric.labels for metric in queried(expression)))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        used = {label.strip() for labels in grouped for label in labels.split(",")}
        used |= set(re.findall(r"[{,](\w+)=", expression))
        assert used <= known, expression


def test_dashboard_uses_the_datasource_that_is_provisioned() -> None:
    provisioned = (ROOT / "deploy/grafana/provisioning/datasources/phaseloom.yml").read_text()
    uids = set(re.findall(r"uid: (\w+)", provisioned))
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    used = {p["datasource"]["uid"] for p in dashboard["panels"] if "datasource" in p}
    assert used <= uids == {"prometheus", "jaeger"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_scrapes_every_service_of_the_compose_file() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    # All services share the anchor's network alias, by which Prometheus finds their containers.
    anchor = compose.partition("x-service: &service\n")[2].partition("\nx-")[0]
    aliases = re.findall(r"^ {8}- ([\w-]+)$", anchor, re.MULTILINE)
    built = re.findall(r"^  ([\w-]+):\n(?:    .*\n)*?    build:\n", compose, re.MULTILINE)
    services = re.findall(r"^  ([\w-]+):\n    <<: \*service\n", compose, re.MULTILINE)
    assert services == built
    scrape = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert re.findall(r"^ {10}- ([\w-]+)$", scrape, re.MULTILINE) == aliases
    assert "honor_labels: true" in scrape, "metrics have a label `job` of their own"


# --- The endpoint ---------------------------------------------------------------------------------


def test_series_by_job_are_bounded() -> None:
    values = {JobKey("t", f"j{n:03}"): float(n) for n in range(MAX_JOBS + 3)}
    readings = per_job(values)
    assert len(readings) == MAX_JOBS + 1
    assert readings[0] == (MAX_JOBS + 2, {"tenant": "t", "job": f"j{MAX_JOBS + 2}"})
    assert readings[-1] == (0 + 1 + 2, {"tenant": "other", "job": "other"})
    assert sum(value for value, _ in readings) == sum(values.values())


PRELUDE = """
import asyncio, urllib.error, urllib.request
from phaseloom.common.observability import metrics
from phaseloom.common.contract.errors import PhaseloomError, ResourceError
from phaseloom.common.observability.metrics import MetricsConfig, endpoint
from socket import create_server
with create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]

def get(path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
        return response.read().decode()
"""


async def run(body: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PRELUDE + body,
        env=os.environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_endpoint_serves_what_was_measured_and_read() -> None:
    output = await run(
        "fresh = 0\n"
        "async def refresh():\n"
        "    global fresh\n"
        "    fresh += 7\n"
        "async def main():\n"
        "    async with endpoint('example', MetricsConfig(port)):\n"
        "        metrics.before_scrape(refresh)\n"
        "        metrics.observe(metrics.SCHEDULER_LAG, lambda: [(fresh, {})])\n"
        "        metrics.count(metrics.PERMITS, 2, kind='forward')\n"
        "        metrics.measure(metrics.STEP_DURATION, 3e-5)\n"
        "        print(await asyncio.to_thread(get, '/metrics'))\n"
        "        print('healthz', repr(await asyncio.to_thread(get, '/healthz')))\n"
        "        try:\n"
        "            await asyncio.to_thread(get, '/elsewhere')\n"
        "        except urllib.error.HTTPError as error:\n"
        "            print(error.code)\n"
        "asyncio.run(main())\n"
    )
    assert 'phaseloom_permits_total{kind="forward"} 2.0' in output
    assert "phaseloom_scheduler_lag 7.0" in output
    assert 'phaseloom_scheduler_step_duration_seconds_bucket{le="2e-05"} 0.0' in output
    assert 'phaseloom_scheduler_step_duration_seconds_bucket{le="5e-05"} 1.0' in output
    assert 'service_name="example"' in output
    assert output.splitlines()[-2:] == ["healthz ''", "404"]


async def test_scrape_is_answered_when_the_server_is_away() -> None:
    output = await run(
        "async def refresh():\n"
        "    raise ResourceError('away')\n"
        "async def main():\n"
        "    async with endpoint('example', MetricsConfig(port)):\n"
        "        metrics.before_scrape(refresh)\n"
        "        metrics.count(metrics.NODE_LOSSES, node='n')\n"
        "        print(await asyncio.to_thread(get, '/metrics'))\n"
        "asyncio.run(main())\n"
    )
    assert 'phaseloom_node_losses_total{node="n"} 1.0' in output
    assert "as old as the last scrape" in output


async def test_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    output = await run(
        "async def main():\n"
        "    with create_server(('127.0.0.1', port)):\n"
        "        try:\n"
        "            async with endpoint('example', MetricsConfig(port)):\n"
        "                print('runs')\n"
        "        except PhaseloomError as error:\n"
        "            print(error)\n"
        "asyncio.run(main())\n"
    )
    assert "runs" not in output
    assert "PHASELOOM_METRICS_PORT" in output


async def test_process_without_a_port_measures_nothing_and_loads_nothing() -> None:
    output = await run(
        "import sys, time\n"
        "async def main():\n"
        "    async with endpoint('example', MetricsConfig()):\n"
        "        metrics.before_scrape(lambda: None)\n"
        "        began = time.process_time()\n"
        "        for _ in range(10_000):\n"
        "            metrics.count(metrics.PERMITS, kind='forward')\n"
        "        print((time.process_time() - began) / 10_000 * 1e6)\n"
        "asyncio.run(main())\n"
        "print('prometheus_client' in sys.modules)\n"
    )
    cost_us, is_loaded = output.split()
    assert float(cost_us) < 50, "below 1 on most machines"
    assert is_loaded == "False"
