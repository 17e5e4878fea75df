"""Samples of a mesh at work: memory, consumers' lag, restarts, and the scheduler's steps."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from urllib.request import urlopen

import msgspec
import nats.errors

from loadtest.processes import cpu_s, descendants, pss_bytes
from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.events import Notice
from phaseloom.common.observability.metrics import STEP_DURATION
from phaseloom.common.transport.bus import Bus

RANKS = "ranks"
"""The name of the group of all processes that agents started."""
_EVERY_S = 2.0
_SCRAPE_TIMEOUT_S = 10.0
_BUCKET = re.compile(r'_bucket{[^}]*le="([^"]+)"[^}]*} ([0-9.e+]+)$')


class Sample(msgspec.Struct, frozen=True):
    """One sample of a running mesh."""

    at_s: float
    """Seconds since the watch began."""
    memory_bytes: dict[str, int]
    """The proportional set size of each service's processes."""
    lag: dict[str, int]
    """For each stream, the messages that its slowest consumer was not given or did not
    acknowledge."""


class Watch:
    """A watch that samples a mesh until it is cancelled."""

    def __init__(self, mesh: Mesh, bus: Bus, tenant: str) -> None:
        self.samples: list[Sample] = []
        self.restarts: list[str] = []
        """The name of a service for each time that it was started again."""
        self._mesh = mesh
        self._bus = bus
        self._streams = (streams.ops_stream(tenant), streams.SCHED, streams.PERMITS)

    async def run(self) -> None:
        heard = await self._bus.client.subscribe(streams.event_subject("supervisor"))
        began_s = time.monotonic()
        while True:
            lag = {stream: await self._lag(stream) for stream in self._streams}
            memory = await asyncio.to_thread(memory_bytes, services(self._mesh))
            self.samples.append(Sample(round(time.monotonic() - began_s, 2), memory, lag))
            while heard.pending_msgs:
                notice: Notice = decode((await heard.next_msg()).data, Notice)
                self.restarts.append(notice.subject)
            await asyncio.sleep(_EVERY_S)

    async def _lag(self, stream: str) -> int:
        try:
            consumers = await self._bus.js.consumers_info(stream)
        except nats.errors.TimeoutError:
            return -1
        return max(((c.num_pending or 0) + (c.num_ack_pending or 0) for c in consumers), default=0)


def services(mesh: Mesh) -> dict[str, list[int]]:
    """The processes of each service, and the ranks as a group of their own."""
    state = msgspec.json.decode((mesh.run_dir / "mesh.json").read_bytes())
    pids: dict[str, int] = state["pids"]
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for name, pid in pids.items():
        groups[name.partition("-")[0]].append(pid)
    agents = groups["worker"]
    groups[RANKS] = descendants(agents)
    return groups


def memory_bytes(groups: Mapping[str, list[int]]) -> dict[str, int]:
    """The proportional set size of each group. Pages that processes share count once in all."""
    return {name: sum(map(pss_bytes, pids)) for name, pids in groups.items()}


def processor_s(groups: Mapping[str, list[int]]) -> dict[str, float]:
    """The seconds of processor time that each group has used."""
    return {name: sum(map(cpu_s, pids)) for name, pids in groups.items()}


async def step_seconds(mesh: Mesh, *shares: float) -> list[float]:
    """Quantiles of the scheduler's step: the upper bounds of its histogram's buckets."""
    port = mesh.metrics_ports["scheduler"]

    def scrape() -> str:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_SCRAPE_TIMEOUT_S) as page:
            text: str = page.read().decode()
        return text

    return bucket_quantiles(await asyncio.to_thread(scrape), STEP_DURATION.prometheus, *shares)


def bucket_quantiles(page: str, metric: str, *shares: float) -> list[float]:
    """The bounds below which these shares of a histogram on a Prometheus page lie.

    Raises: ValueError: the page has no such histogram, or nothing was measured.
    """
    counts: defaultdict[float, float] = defaultdict(float)
    for line in page.splitlines():
        if line.startswith(f"{metric}_bucket") and (found := _BUCKET.search(line)):
            counts[float(found[1])] += float(found[2])
    bounds = sorted(counts)
    if not bounds or not counts[bounds[-1]]:
        raise ValueError(f"nothing was measured of {metric}")
    total = counts[bounds[-1]]
    return [next(b for b in bounds if counts[b] >= share * total) for share in shares]
