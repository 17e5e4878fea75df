"""Round trip of one operation through the whole mesh, against a raw chain of the same hops.

One operation in flight: client library → OPS → router → decision log → scheduler → PERMITS → agent
→ rank with the backend `noop` → DONE → `out` → client library, beside `rawchain`. Both are up at
the same time and are measured in short rounds that alternate, so that whatever else the machine
does meets both; a ratio is the median over rounds of that round's ratio.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.rawchain import TENANT, raw_chain
from loadtest.records import Record
from phaseloom.cli.supervisor import Mesh, MeshConfig, NodeConfig
from phaseloom.client import connect
from phaseloom.common.arrays import pack_float32s, pack_int32s
from phaseloom.common.codec import encode
from phaseloom.common.messages import (
    Datum,
    DeploymentSpec,
    ForwardBackward,
    Loss,
    ModelSpec,
    Operation,
)

Call = Callable[[], Awaitable[object]]

WARM_UP = 200
"""Operations before the first round, each side."""
LIMIT = "raw JetStream chain of the same hops and processes"
_NUM_TOKENS = 16
_POOL = "bench"
_DEVICE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Round:
    """Round trips in seconds, sorted."""

    mesh: list[float]
    raw: list[float]


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of the sorted values does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def figures(rounds: list[Round]) -> list[Record]:
    """p50 and p99: medians over rounds, and the median of the rounds' ratios."""
    records = []
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        pairs = [(quantile(r.mesh, share), quantile(r.raw, share)) for r in rounds]
        records.append(
            Record(
                name=f"operation_round_trip_{label}",
                value=round(1e3 * median(mesh for mesh, _ in pairs), 3),
                unit="ms",
                limit=LIMIT,
                limit_value=round(1e3 * median(raw for _, raw in pairs), 3),
                ratio=round(median(mesh / raw for mesh, raw in pairs), 3),
            )
        )
    return records


async def measure(directory: Path, num_rounds: int, per_round: int) -> list[Round]:
    """Both sides in alternating rounds.

    Args: directory: exists; for the servers' stores, logs and sockets.
    """
    payload = encode(Operation("0" * 32, 1, ForwardBackward([_datum()], Loss.CROSS_ENTROPY)))
    async with (
        noop_mesh(directory / "mesh") as mesh,
        raw_chain(directory / "raw", payload) as controller,
    ):
        raw = controller.call
        await _times(mesh, WARM_UP)
        await _times(raw, WARM_UP)
        rounds = []
        for number in range(num_rounds):
            # Neither is always the first: what drifts within a round meets both alike.
            if number % 2:
                of_raw = await _times(raw, per_round)
                of_mesh = await _times(mesh, per_round)
            else:
                of_mesh = await _times(mesh, per_round)
                of_raw = await _times(raw, per_round)
            rounds.append(Round(of_mesh, of_raw))
        return rounds


@asynccontextmanager
async def noop_mesh(directory: Path) -> AsyncIterator[Call]:
    """A mesh with one deployment on the backend `noop`; what it yields runs one operation."""
    config = MeshConfig(
        nodes=[NodeConfig("bench-0", _POOL, [_DEVICE_BYTES])], tenants=[TENANT], routers=1
    )
    async with Mesh(config, directory) as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[TENANT]
        async with connect(mesh.url, TENANT, password) as controller:
            spec = DeploymentSpec("policy", _POOL, "noop", ModelSpec({}))
            job = await controller.submit_job("bench", [spec])
            policy = job.deployment("policy")
            batch = [_datum()]

            async def call() -> None:
                await policy.forward_backward(batch, Loss.CROSS_ENTROPY)

            yield call
            await job.finish()


def _datum() -> Datum:
    tokens = pack_int32s([0] * _NUM_TOKENS)
    return Datum(tokens, tokens, weights=pack_float32s([1.0] * _NUM_TOKENS))


async def _times(call: Call, number: int) -> list[float]:
    """Durations of that many calls, one after another, sorted."""
    durations = []
    for _ in range(number):
        started = time.perf_counter()
        await call()
        durations.append(time.perf_counter() - started)
    return sorted(durations)
