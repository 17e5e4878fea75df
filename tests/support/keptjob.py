"""A controller of a second: it begins the job `kept`, or goes on with it, and leaves it.

`python -m tests.support.keptjob` makes a step, and prints the number of the job's steps so far.
"""

from __future__ import annotations

import asyncio

from phaseloom import client
from tests.support.jobs import NOOP

KEPT = "kept"


async def main() -> None:
    async with client.connect() as mesh:
        try:
            job = await mesh.submit_job(KEPT, NOOP)
        except client.CallerError as error:
            if error.info.code is not client.Code.ALREADY_EXISTS:
                raise
            job = await mesh.attach(KEPT)
        policy = job.deployment("policy")
        await policy.optim_step(client.AdamParams(1e-3))
        print(policy.next_seq - 1)


if __name__ == "__main__":
    asyncio.run(main())
