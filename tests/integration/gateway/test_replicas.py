"""Several replicas of the gateway, and a mesh that goes on where an earlier one has ended."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.support.gateway import SDK_CHILD, serving, told

pytestmark = pytest.mark.timeout(240)


class Caller:
    """A program that opens a connection for each call, so that any replica may get it."""

    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        self._http = http
        self._headers = {"X-API-Key": key, "Connection": "close"}

    async def __call__(self, call: str, **body: object) -> dict[str, object]:
        while True:
            try:
                async with self._http.post(
                    f"/api/v1/{call}", json=body, headers=self._headers
                ) as answer:
                    if answer.status in (408, 503):
                        continue
                    assert answer.status == 200, await answer.text()
                    said: dict[str, object] = await answer.json(content_type=None)
                    return said
            except aiohttp.ClientConnectionError:  # a replica was killed: ask another
                continue


async def test_any_replica_answers_for_the_one_that_was_killed(short_dir: Path) -> None:
    async with (
        serving(short_dir, replicas=2) as served,
        aiohttp.ClientSession(served.url) as http,
    ):
        call = Caller(http, served.key())
        session = await call("create_session")
        asked = {**session, "model_seq_id": 0, "base_model": "tiny"}
        promises = [await call("create_model", **asked) for _ in range(8)]
        assert promises == [promises[0]] * 8, "whichever replica is asked"
        model = {"model_id": (await call("retrieve_future", **promises[0]))["model_id"]}
        step = {**model, "adam_params": {"learning_rate": 1e-3}}
        # The one behind it waits for a number that is given while no replica runs that knows it.
        save = await call("save_weights", **model, seq_id=2, path="after")
        waiting = [asyncio.create_task(call("retrieve_future", **save)) for _ in range(4)]
        for replica in ("gateway-0", "gateway-1"):
            for pid in served.mesh.kill(replica):
                await asyncio.to_thread(_until_gone, pid)
            assert await call("session_heartbeat", **session) == {"type": "session_heartbeat"}
        first = await call("optim_step", **step, seq_id=1)
        assert "metrics" in await call("retrieve_future", **first)
        path = f"tinker://{model['model_id']}/weights/after"
        assert [said["path"] for said in await asyncio.gather(*waiting)] == [path] * 4
        assert await call("save_weights", **model, seq_id=2, path="after") == save


def _until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        os.sched_yield()


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
async def test_program_goes_on_over_a_restart_of_the_whole_mesh(short_dir: Path, how: str) -> None:
    """The same program, on a mesh that stays and on one that ends and is started again."""
    port = 0
    async with serving(short_dir) as served:
        quiet = await served.sdk("steps")
        port = served.port
        program = await served.start_sdk(str(SDK_CHILD), "steps")
        assert program.stderr is not None
        while (await program.stderr.readline()).decode().strip() != "step 20":
            pass
        if how == "killed":
            for pid in served.mesh.pids():
                os.kill(pid, signal.SIGKILL)
    async with serving(short_dir, port=port):
        assert await told(program) == quiet
