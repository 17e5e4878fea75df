"""Ray: the controller calls a method of an actor in another process and awaits its result."""

from __future__ import annotations

import asyncio
import logging
import os

import ray
from turns import take_turns

WHAT = (
    "one actor call with a 400-byte argument and its result; one hop there and back, nothing is "
    "stored, ordered across jobs, admitted or scheduled"
)
PAYLOAD = bytes(400)


class Worker:
    """An actor that answers at once; calls of one caller run in their order."""

    def run(self, payload: bytes) -> float:
        return 0.0


async def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    worker = ray.remote(Worker).remote()

    async def call() -> None:
        await worker.run.remote(PAYLOAD)

    await call()
    await take_turns(call, "Ray actor", WHAT, {"ray": ray.__version__})


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    asyncio.run(main())
