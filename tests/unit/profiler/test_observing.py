"""What the profiler counts of the decision log, in a process of its own: meters are set up once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json
from opentelemetry import metrics as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
otel.set_meter_provider(MeterProvider([reader]))

from phaseloom.common.transport.decisionlog import LogEntry
from phaseloom.common.contract.errors import Code, ErrorInfo
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.events import *
from phaseloom.common.contract.operations import Outcome
from phaseloom.common.observability.readiness import Readiness
from phaseloom.profiler.observing import Metrics
from tests.support.runlog import shared

NODE, KEY = NodeId("t0"), DeploymentKey("demo", "a", "policy")
OUTAGE = ErrorInfo(Code.UNAVAILABLE, "killed")
log = shared()
entries = [LogEntry(e.sequence, e.time_unix_s, e.event, {}) for e in log.recorded()]
restarted_at = next(i for i, e in enumerate(entries) if e.time_s >= 114.0)
later = [
    WpgLost(KEY, 1, NODE, OUTAGE),
    NodeLost(NODE, 1, "gone"),
    SealCommitted(KEY, 3, NODE, []),
    SealFailed(KEY, 4, NODE, OUTAGE),
    ActivationRefused(KEY, 9, NODE, OUTAGE),
    ActivationOpened(KEY, 10, NODE, 140.0, 0.0, 0.5, 0, 7, is_speculative=True),
    OperationFinished(
        entries[-1].event.key, "generate", Outcome.COMPLETED, 1, 1, 1.0, 1.0,
        replay=True,
    ),
]
fold = Metrics(None)
fold.register()
readiness = Readiness()
for i, entry in enumerate(entries):
    fold.fold(entry, readiness.step(entry.event), is_new=i >= restarted_at)
for i, event in enumerate(later):
    fold.fold(LogEntry(1000 + i, 141.0, event, {}), readiness.step(event), is_new=True)

points = {}
for resource in reader.get_metrics_data().resource_metrics:
    for scope in resource.scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                labels = ",".join(f"{k}={v}" for k, v in sorted(point.attributes.items()))
                value = point.count if hasattr(point, "count") else point.value
                points[f"{metric.name}{{{labels}}}"] = value
print(json.dumps(points))
"""


def test_what_is_older_than_this_life_is_folded_and_not_counted() -> None:
    """A profiler that was started again at second 114 of the run made by hand."""
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    points = json.loads(output)
    assert points["phaseloom.operation.duration{kind=forward_backward,pool=train}"] == 3
    assert points["phaseloom.operation.wait{kind=generate,pool=rollout}"] == 2
    finished = "phaseloom.operations.finished{kind=generate,outcome=completed,tenant=demo}"
    assert points[finished] == 2
    assert points["phaseloom.device.busy{device=0,node=t0}"] == 5 + 4 + 5
    assert points["phaseloom.switch.hidden{node=r0}"] == 0.5, "it knows who waited since before"
    assert points["phaseloom.switch.duration{node=t0,part=load}"] == 2 + 1
    assert points["phaseloom.switch.moved{direction=in,node=t0}"] == 2 * 100 + 7
    assert points["phaseloom.switches.speculative{node=t0}"] == 1
    assert points["phaseloom.operations.replayed{kind=generate}"] == 1
    for name in ("wpg.losses{code=UNAVAILABLE,", "activations.refused{code=UNAVAILABLE,"):
        assert points[f"phaseloom.{name}node=t0}}"] == 1
    assert points["phaseloom.node.losses{node=t0}"] == 1
    for result in ("committed", "failed"):
        assert points[f"phaseloom.seals{{node=t0,result={result}}}"] == 1
