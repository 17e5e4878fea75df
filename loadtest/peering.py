"""Round trips through the mesh beside the same round trips in other systems, in turns.

The other systems live in an environment of their own (`make bench-peers`): see `loadtest.peers`.
They do less on the way than the mesh, as the description of each says. The figures tell what the
mesh costs over them, and not which is better.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from loadtest import roundtrip
from loadtest.records import Machine, describe, quantile
from phaseloom.common.process import config

PROGRAMS = ("ray_actor", "redis_streams")
IN_FLIGHT = (1, 16, 256)
MESH = "Phaseloom"
_WHAT = (
    "the whole way: stored four times, checked, ordered, scheduled and run by a rank in a process "
    "of its own"
)
_WARM_UP = 100
_LINE_LIMIT_BYTES = 2**24


class Introduction(msgspec.Struct, frozen=True):
    """The description that a peer gives of itself."""

    name: str
    what: str
    versions: dict[str, str]


class PeerFigure(msgspec.Struct, frozen=True):
    name: str
    in_flight: int
    p50_ms: float
    p99_ms: float
    throughput: float
    """The throughput in operations a second."""


class PeerReport(msgspec.Struct, frozen=True):
    machine: Machine
    systems: list[Introduction]
    figures: list[PeerFigure]
    """The medians over rounds."""


class _Turn(msgspec.Struct, frozen=True):
    times_s: list[float]
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Peer:
    process: asyncio.subprocess.Process
    introduction: Introduction

    async def turn(self, in_flight: int, count: int) -> roundtrip.Turn:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode({"in_flight": in_flight, "count": count}))
        self.process.stdin.write(b"\n")
        done = msgspec.json.decode(await self.process.stdout.readline(), type=_Turn)
        return roundtrip.Turn(sorted(done.times_s), done.wall_s)


async def compare(python: Path, directory: Path, num_rounds: int, per_round: int) -> PeerReport:
    """Measure the mesh and its peers in turns.

    Args: python: interpreter of the environment that the peers are installed in.
          directory: an existing directory for the mesh's store and logs.
    """
    config.set_for_children("PHASELOOM_TELEMETRY_SAMPLE_RATIO", "0")
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(_peer(python, name)) for name in PROGRAMS]
        # Redis, too, has on disk what it acknowledges a second later.
        mesh = roundtrip.noop_mesh(directory / "mesh", 2, fsync=False)
        policy = await stack.enter_async_context(mesh)
        figures = []
        for in_flight in IN_FLIGHT:
            count = max(per_round, 4 * in_flight)
            call = roundtrip.call_of(policy, in_flight)
            turns: dict[str, list[roundtrip.Turn]] = {}
            await roundtrip.turn(call, in_flight, _WARM_UP)
            for peer in peers:
                await peer.turn(in_flight, _WARM_UP)
            for _ in range(num_rounds):
                done = await roundtrip.turn(call, in_flight, count)
                turns.setdefault(MESH, []).append(done)
                for peer in peers:
                    done = await peer.turn(in_flight, count)
                    turns.setdefault(peer.introduction.name, []).append(done)
            figures += [_figure(name, in_flight, rounds) for name, rounds in turns.items()]
        machine = describe()
        own = Introduction(MESH, _WHAT, {"phaseloom": machine.packages["phaseloom"]})
        return PeerReport(machine, [own, *(p.introduction for p in peers)], figures)


def _figure(name: str, in_flight: int, rounds: list[roundtrip.Turn]) -> PeerFigure:
    return PeerFigure(
        name,
        in_flight,
        p50_ms=round(1e3 * median(quantile(t.times_s, 0.5) for t in rounds), 3),
        p99_ms=round(1e3 * median(quantile(t.times_s, 0.99) for t in rounds), 3),
        throughput=round(median(t.rate for t in rounds), 1),
    )


@asynccontextmanager
async def _peer(python: Path, name: str) -> AsyncIterator[_Peer]:
    program = Path(__file__).parent / "peers" / f"{name}.py"
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(program)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT_BYTES,
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} ended with {await process.wait()}")
        yield _Peer(process, msgspec.json.decode(line, type=Introduction))
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
