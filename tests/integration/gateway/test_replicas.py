"""Several replicas of the gateway, and a program of the Tinker SDK while what its calls go through
is killed: it gets the same losses and samples, bit for bit, as one that nothing disturbs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from phaseloom.cli.supervisor import Mesh
from phaseloom.common.contract.events import QueuedOperation
from tests.support.directories import short_directory
from tests.support.gateway import SDK_CHILD, Served, serving, told
from tests.support.jobs import TENANT, Log, following, living_ranks
from tests.support.pretrained import save_model
from tests.support.processes import until_gone

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
NUM_STEPS = 20
NUM_STORM_STEPS = 120
VICTIMS = ("gateway", "router", "agent", "rank", "scheduler")
KILLS_OF_EACH = 4
PAUSE_S = 0.05
"""Before a call is made again, as each client has it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    with short_directory() as directory:
        model = await asyncio.to_thread(
            save_model, directory / "long", torch.float32, max_position_embeddings=20_000
        )
        async with serving(directory, replicas=2, long=model) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quiet(served: Served) -> dict[str, Any]:
    """What the program gets that nothing disturbs."""
    return await served.sdk("steps", str(NUM_STEPS))


class Caller:
    """A program that opens a connection for each call, so that any replica may get it."""

    def __init__(self, http: aiohttp.ClientSession, key: str, patience_s: float = 300.0) -> None:
        """Args: patience_s: after which it asks again."""
        self._http = http
        self._headers = {"X-API-Key": key, "Connection": "close"}
        self._timeout = aiohttp.ClientTimeout(patience_s)

    async def __call__(self, call: str, **body: object) -> dict[str, object]:
        while True:
            try:
                async with self._http.post(
                    f"/api/v1/{call}", json=body, headers=self._headers, timeout=self._timeout
                ) as answer:
                    if answer.status not in (408, 503):
                        assert answer.status == 200, await answer.text()
                        said: dict[str, object] = await answer.json(content_type=None)
                        return said
            except (aiohttp.ClientConnectionError, TimeoutError):
                pass  # a replica was killed, or is stopped: ask another
            await asyncio.sleep(PAUSE_S)


async def test_any_replica_answers_for_the_one_that_was_killed(served: Served) -> None:
    async with aiohttp.ClientSession(served.url) as http:
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
            await until_gone(served.mesh.kill(replica), timeout_s=60)
            assert await call("session_heartbeat", **session) == {"type": "session_heartbeat"}
        first = await call("optim_step", **step, seq_id=1)
        assert "metrics" in await call("retrieve_future", **first)
        path = f"tinker://{model['model_id']}/weights/after"
        assert [said["path"] for said in await asyncio.gather(*waiting)] == [path] * 4
        assert await call("save_weights", **model, seq_id=2, path="after") == save


async def test_addresses_and_headers_of_any_form_are_no_failure(served: Served) -> None:
    """A replica that passed such a call on answered with 500."""
    key = f"X-API-Key: {served.key()}\r\n"
    lines: list[tuple[str, str, int]] = [
        ("GET http://x/v1/models", "", 200),
        ("GET http://elsewhere/v1/none", "", 404),
        ("GET http://x", "", 404),
        ("GET //v1/models", "", 404),
        ("CONNECT x:80", "", 404),
        ("CONNECT x", "", 404),
        ("OPTIONS *", "", 404),
        ("OPTIONS /v1/models", "", 405),
        ("GET /v1/models/%ff%00", "", 404),
        ("GET /v1/models/%ed%a0%80", "", 404),
        ("GET /v1/models", "Authorization: Bearer \udcff\r\n", 200),
        ("GET /v1/models", "Host: [::1\r\n", 200),
        ("POST /v1/completions", "Content-Length: -5\r\n", 400),
        ("POST /v1/completions", "Content-Encoding: gzip\r\nContent-Length: 2\r\n", 400),
        ("POST /v1/completions", "Transfer-Encoding: chunked\r\n", 400),
        ("GET /v1/models", f"X: {'a' * 10_000}\r\n", 400),
        ("GET /v1/models", "nonsense\r\n", 400),
        (f"GET /v1/models/{'a' * 10_000}", "", 400),
        ("\x16\x03\x01", "", 400),
        (f"GET /api/v1/sessions?limit={'9' * 5000}", "", 400),
        ("GET /api/v1/sessions?limit=%D9%A3", "", 400),
        ("GET /api/v1/sessions?offset=-1", "", 400),
        (f"GET /api/v1/archives/t/r/weights/x?expires={'9' * 5000}&signature=a", "", 404),
    ]
    for line, headers, expected in lines * 4:  # so that both replicas get each of them
        host = "" if "Host" in headers else "Host: x\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = "{}" if line.startswith("POST") else ""
        text = f"{line} HTTP/1.1\r\n{host}{key}{headers}\r\n{body}"
        try:
            writer.write(text.encode(errors="surrogateescape"))
            status = (await reader.readline()).split()[1]
            head = await reader.readuntil(b"\r\n\r\n")
        finally:
            writer.close()
        assert int(status) == expected, (line, headers, status)
        assert expected == 200 or b"Content-Type: application/json" in head, (line, headers, head)


@pytest.mark.slow
async def test_nobody_waits_for_a_replica_that_hangs(served: Served) -> None:
    """What it was passed is passed to the one that serves the tenant now."""
    async with aiohttp.ClientSession(served.url) as http:
        call = Caller(http, served.key(), patience_s=2.0)
        session = await call("create_session")
        promise = await call("create_model", **session, model_seq_id=0, base_model="tiny")
        model = {"model_id": (await call("retrieve_future", **promise))["model_id"]}
        save = await call("save_weights", **model, seq_id=2, path="after")
        waiting = Caller(http, served.key())
        waits = [asyncio.create_task(waiting("retrieve_future", **save)) for _ in range(16)]
        await call("session_heartbeat", **session)
        serves = serving_replica(served.mesh)
        served.mesh.kill(serves, signal.SIGSTOP)
        try:
            await call("optim_step", **model, seq_id=1, adam_params={"learning_rate": 1e-3})
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            served.mesh.kill(serves, signal.SIGCONT)
        path = f"tinker://{model['model_id']}/weights/after"
        assert [said["path"] for said in await asyncio.gather(*waits)] == [path] * 16


def serving_replica(mesh: Mesh) -> str:
    """The one that serves the tenant, as its log says."""
    logs = (mesh.run_dir / "logs").glob("gateway-*.log")
    lines = [(log.stem, line) for log in logs for line in log.read_text().splitlines()]
    begun = f"serving {TENANT} at"
    times = [(json.loads(line)["time"], name) for name, line in lines if begun in line]
    return str(max(times)[1])


def processes(mesh: Mesh, kind: str) -> list[int]:
    """Those of a service or a replica, the agents, or the ranks; none: they are started again."""
    if kind == "rank":
        return living_ranks(mesh)
    return mesh.pids({"agent": "worker"}.get(kind, kind))


async def under_kills(
    served: Served,
    num_steps: int,
    victims: dict[str, str],
    choose: Callable[[list[int]], list[int]],
) -> dict[str, Any]:
    """What the program gets.

    Args: victims: a line that it writes when it is so far → whose processes are killed then.
          choose: of these.
    """
    program = await served.start_sdk(str(SDK_CHILD), "steps", str(num_steps))
    assert program.stderr is not None
    while victims and (line := (await program.stderr.readline()).decode()):
        if kind := victims.pop(line.strip(), None):
            while not (found := processes(served.mesh, kind)):
                await asyncio.sleep(0.02)
            for pid in choose(found):
                with suppress(ProcessLookupError):  # it has just ended with another
                    os.kill(pid, signal.SIGKILL)
    said = await told(program)
    assert not victims, "the program ended before all were killed"
    return said


async def test_losses_are_the_same_bits_whoever_is_killed(
    served: Served, quiet: dict[str, Any]
) -> None:
    victims = {"begun": "gateway", "step 3": "worker-train-0", "step 7": "router"}
    victims |= {"step 11": "scheduler", "step 13": "rank", "step 15": "gateway"}
    assert await under_kills(served, NUM_STEPS, victims, lambda all_: all_) == quiet


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
async def test_losses_are_the_same_bits_in_a_storm_of_kills(served: Served, seed: int) -> None:
    """Twenty processes are killed, at random steps."""
    rng = random.Random(seed)
    kinds = [*VICTIMS] * KILLS_OF_EACH
    at = rng.sample(range(NUM_STORM_STEPS - 1), len(kinds))
    victims = dict(zip([f"step {step + 1}" for step in at], kinds, strict=True))
    undisturbed = await served.sdk("steps", str(NUM_STORM_STEPS))
    assert len(undisturbed["losses"]) == NUM_STORM_STEPS
    disturbed = await under_kills(
        served, NUM_STORM_STEPS, victims, lambda found: [rng.choice(found)]
    )
    assert disturbed == undisturbed


@pytest.mark.slow
async def test_sample_on_its_way_is_drawn_anew_when_the_gateway_dies(served: Served) -> None:
    """The SDK asks for it again by itself."""
    program = await served.start_sdk(str(SDK_CHILD), "long")
    assert program.stderr is not None
    async with following(served.mesh) as log:
        while (await program.stderr.readline()).decode().strip() != "drawn":
            pass
        await log.caught_up()
        num_before = len(drawing(log))
        await log.until(lambda _: len(drawing(log)) > num_before)
        served.mesh.kill("gateway")
        first, second = (await told(program))["drawn"]
        await log.caught_up()
    assert first == second
    assert len(drawing(log)) == num_before + 2, "it was not killed while it was drawn"


def drawing(log: Log) -> list[QueuedOperation]:
    """The samples that were asked for."""
    queued = [event for event in log.events if isinstance(event, QueuedOperation)]
    return [event for event in queued if event.kind == "generate"]


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
async def test_program_goes_on_over_a_restart_of_the_whole_mesh(
    short_dir: Path, quiet: dict[str, Any], how: str
) -> None:
    """The same program, on a mesh that stays and on one that ends and is started again."""
    async with serving(short_dir) as served:
        program = await served.start_sdk(str(SDK_CHILD), "steps", str(NUM_STEPS))
        assert program.stderr is not None
        while (await program.stderr.readline()).decode().strip() != "step 8":
            pass
        if how == "killed":
            for pid in served.mesh.pids():
                os.kill(pid, signal.SIGKILL)
    async with serving(short_dir, port=served.port):
        assert await told(program) == quiet
