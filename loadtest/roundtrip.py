"""Round trips of operations through the whole mesh, against a raw chain of the same hops.

An operation goes from the client library by OPS, router, decision log, scheduler, PERMITS, agent, a
rank with the backend `noop`, DONE and `out` back to the client library; `rawchain` is measured
beside it. A mesh with one router, one with two and the chain are up at the same time and are
measured in short rounds in turns, so that the machine's other work meets all of them. A ratio is
the median over rounds of each round's ratio.

With one operation in flight it is a mutating one. Several in flight are reading operations of one
deployment, which the mesh permits side by side; its mutating operations run one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from loadtest.rawchain import TENANT, raw_chain
from loadtest.records import Record, quantile
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import Deployment, connect
from phaseloom.common.contract.arrays import pack_float32s, pack_int32s
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.operations import Datum, ForwardBackward, Loss, Operation
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.process import config

Call = Callable[[], Awaitable[object]]

ROUTERS = (1, 2)
IN_FLIGHT = (1, 16, 256)
WARM_UP = 200
"""The number of operations on each side before the first round."""
LIMIT = "raw JetStream chain of the same hops and processes"
ONE_ROUTER = "the same with one router"
_RAW = 0
"""The key of the raw chain, where a mesh has its number of routers."""
_NUM_TOKENS = 16
_POOL = "bench"
_DEVICE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Turn:
    """The measurement of one side in one round."""

    times_s: list[float]
    """The round trips, sorted."""
    wall_s: float

    @property
    def rate(self) -> float:
        """The throughput in operations a second."""
        return len(self.times_s) / self.wall_s


Round = dict[int, Turn]
"""The turn of each mesh by its number of routers; 0: the raw chain's."""


def figures(in_flight: int, rounds: list[Round], *, fsync: bool = True) -> list[Record]:
    """The medians over rounds, and the medians of the rounds' ratios.

    Args: fsync: whether all sides had each message on disk before it was acknowledged.
    """
    records = []
    case = "" if fsync else "_without_fsync"
    p50_aim, rate_aim = ("≤ 1.5", "≥ 0.5") if fsync else ("≤ 1.4", "≥ 0.65")
    for routers in ROUTERS:
        name = f"{in_flight}_in_flight_{routers}_router{'s'[: routers - 1]}{case}"
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            pairs = [
                (1e3 * quantile(r[routers].times_s, share), 1e3 * quantile(r[_RAW].times_s, share))
                for r in rounds
            ]
            aim = p50_aim if (in_flight, label) == (1, "p50") else ""
            records.append(_compared(f"round_trip_{label}_{name}", "ms", LIMIT, pairs, aim))
        pairs = [(r[routers].rate, r[_RAW].rate) for r in rounds]
        aim = rate_aim if in_flight == max(IN_FLIGHT) else ""
        records.append(_compared(f"throughput_{name}", "operations/s", LIMIT, pairs, aim))
    pairs = [(r[2].rate, r[1].rate) for r in rounds]
    name = f"second_router_throughput_{in_flight}_in_flight{case}"
    records.append(_compared(name, "operations/s", ONE_ROUTER, pairs, "≥ 1, within the noise"))
    return records


def _compared(
    name: str, unit: str, limit: str, pairs: list[tuple[float, float]], aim: str
) -> Record:
    return Record(
        name=name,
        value=round(median(value for value, _ in pairs), 3),
        unit=unit,
        limit=limit,
        limit_value=round(median(bound for _, bound in pairs), 3),
        ratio=round(median(value / bound for value, bound in pairs), 3),
        aim=aim,
    )


async def measure(
    directory: Path, num_rounds: int, per_round: int, *, fsync: bool = True
) -> list[Record]:
    """Measure all sides in rounds, at each number of operations in flight, without spans.

    Args: directory: an existing directory for the servers' stores, logs and sockets.
          per_round: operations of each side in a round; there are more where many are in flight.
          fsync: whether all servers have each message on disk before they acknowledge it.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    records = []
    async with AsyncExitStack() as stack:
        policies = {
            routers: await stack.enter_async_context(
                noop_mesh(directory / f"m{routers}", routers, fsync=fsync)
            )
            for routers in ROUTERS
        }
        chain = raw_chain(directory / "raw", payload(), fsync=fsync)
        raw = await stack.enter_async_context(chain)
        for in_flight in IN_FLIGHT:
            calls: dict[int, Call] = {
                **{n: call_of(policy, in_flight) for n, policy in policies.items()},
                _RAW: raw.call,
            }
            for call in calls.values():
                await turn(call, in_flight, max(WARM_UP, 2 * in_flight))
            rounds = []
            for number in range(num_rounds):
                # The order changes each round, so that a drift within a round meets all alike.
                order = [*calls][number % len(calls) :] + [*calls][: number % len(calls)]
                count = max(per_round, 4 * in_flight)
                rounds.append({side: await turn(calls[side], in_flight, count) for side in order})
            records += figures(in_flight, rounds, fsync=fsync)
    return records


async def turn(call: Call, in_flight: int, count: int) -> Turn:
    """Run `count` operations, with `in_flight` of them under way at any time."""
    times = []
    left = count

    async def keep_calling() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            started_s = time.perf_counter()
            await call()
            times.append(time.perf_counter() - started_s)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(keep_calling())
    wall_s = time.perf_counter() - started_s
    return Turn(sorted(times), wall_s)


@asynccontextmanager
async def noop_mesh(directory: Path, routers: int, *, fsync: bool) -> AsyncIterator[Deployment]:
    """A mesh with one deployment, on the backend `noop`."""
    mesh_config = MeshConfig(
        nodes=[NodeConfig("bench-0", _POOL, [_DEVICE_BYTES])],
        tenants=[TENANT],
        routers=routers,
        fsync=fsync,
    )
    async with Mesh(mesh_config, directory) as mesh:
        await mesh.ready()
        password = mesh.credentials.tenants[TENANT]
        async with connect(mesh.url, TENANT, password) as controller:
            spec = DeploymentSpec("policy", _POOL, "noop", ModelSpec({}))
            job = await controller.submit_job("bench", [spec])
            yield job.deployment("policy")
            await job.finish()


def call_of(policy: Deployment, in_flight: int) -> Call:
    batch = [_datum()]

    async def mutate() -> None:
        await policy.forward_backward(batch, Loss.CROSS_ENTROPY)

    async def read() -> None:
        await policy.forward(batch)

    return mutate if in_flight == 1 else read


def payload() -> bytes:
    """The payload of each operation of the raw chain, as large as those of the mesh."""
    return encode(Operation("0" * 32, 1, ForwardBackward([_datum()], Loss.CROSS_ENTROPY)))


def _datum() -> Datum:
    tokens = pack_int32s([0] * _NUM_TOKENS)
    return Datum(tokens, tokens, weights=pack_float32s([1.0] * _NUM_TOKENS))
