"""One client process of the load test: some jobs, each a closed loop of operations.

`python -m loadtest.driver <settings as JSON> <parent pid>` writes one JSON object a line:
`{"event": "ready"}` when its jobs are up. Then it waits for a line on its standard input, and
writes `{"event": "progress"}` every second and `{"event": "done"}` with its round trips at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

from phaseloom.client import AdamParams, Deployment, Mesh, connect
from phaseloom.common.contract.arrays import pack_float32s, pack_int32s
from phaseloom.common.contract.operations import Datum, Loss
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.process import diewithparent

POLICY = "policy"
CYCLE = 4
"""Operations after which a job's kinds repeat: two `forward_backward`, `optim_step`, `forward`."""
_PROGRESS_S = 1.0
_NUM_TOKENS = 16
_ANSWER_TIMEOUT_S = 300.0


class Driver(msgspec.Struct, frozen=True):
    """The work of one client process."""

    url: str
    tenant: str
    password: str
    jobs: dict[str, str]
    """The pool of each job."""
    operations: int
    """The number of operations of each job."""
    in_flight: int
    """The number of operations of each job under way at once."""


class DriverLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line that a client process writes."""

    event: str
    """`ready`, `progress` or `done`."""
    done: int = 0
    """The number of operations that are done."""
    times_s: list[float] = []
    """All round trips, in the last line."""


class Loop:
    """The jobs of one process."""

    def __init__(self, settings: Driver) -> None:
        self._settings = settings
        self._times_s: list[float] = []

    async def run(self) -> None:
        settings = self._settings
        async with connect(
            settings.url, settings.tenant, settings.password, answer_timeout_s=_ANSWER_TIMEOUT_S
        ) as mesh:
            async with asyncio.TaskGroup() as group:
                starting = [
                    group.create_task(self._submit(mesh, name, pool))
                    for name, pool in settings.jobs.items()
                ]
            say(DriverLine("ready"))
            await asyncio.to_thread(sys.stdin.readline)
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(self._tell())
                async with asyncio.TaskGroup() as jobs:
                    for started in starting:
                        jobs.create_task(self._drive(started.result()))
                telling.cancel()
            say(DriverLine("done", len(self._times_s), self._times_s))
            # The jobs stay until somebody has looked at how they ended.
            await asyncio.to_thread(sys.stdin.readline)
            for name in settings.jobs:
                await mesh.finish(name)

    async def _submit(self, mesh: Mesh, name: str, pool: str) -> Deployment:
        spec = DeploymentSpec(POLICY, pool, "noop", ModelSpec({}), trainable=True)
        return (await mesh.submit_job(name, [spec])).deployment(POLICY)

    async def _drive(self, policy: Deployment) -> None:
        numbers = iter(range(self._settings.operations))

        async def keep_calling() -> None:
            for number in numbers:
                started_s = time.perf_counter()
                await _call(policy, number)
                self._times_s.append(time.perf_counter() - started_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._settings.in_flight):
                group.create_task(keep_calling())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            say(DriverLine("progress", len(self._times_s)))


async def _call(policy: Deployment, number: int) -> None:
    match number % CYCLE:
        case 2:
            await policy.optim_step(AdamParams(1e-4))
        case 3:
            await policy.forward([_DATUM])
        case _:
            await policy.forward_backward([_DATUM], Loss.CROSS_ENTROPY)


def say(said: DriverLine) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.flush()


def _datum() -> Datum:
    tokens = pack_int32s([0] * _NUM_TOKENS)
    return Datum(tokens, tokens, weights=pack_float32s([1.0] * _NUM_TOKENS))


_DATUM = _datum()


if __name__ == "__main__":
    diewithparent.arm(int(sys.argv[2]))
    uvloop.run(Loop(msgspec.json.decode(sys.argv[1], type=Driver)).run())
