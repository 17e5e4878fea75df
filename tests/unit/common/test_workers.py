"""Worker processes: what a call may use, what its end does to others, and who goes next."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from phaseloom.common.contract.errors import CallerError, Code, InternalError, ResourceError
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.process.workers import Turns, WorkerPool

_DEADLINE_S = 20.0
_SHORT_S = 0.2


def echo(key: JobKey, data: bytes) -> tuple[JobKey, bytes]:
    return key, data


def pid(_: str) -> int:
    return os.getpid()


def fail(text: str) -> str:
    if text == "typed":
        raise CallerError("the input is wrong", field="args.text")
    raise ValueError(text)


def spin(_: str) -> None:
    while True:
        pass


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def answer_with(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def environment_limit(_: str) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@asynccontextmanager
async def running_pool() -> AsyncIterator[WorkerPool]:
    async with WorkerPool([__name__], memory_bytes=128 << 20, max_waiting=3) as pool:
        yield pool


async def call_pid(pool: WorkerPool) -> int:
    return await pool.run(pid, "", deadline_s=_DEADLINE_S, what="the input")


async def test_arguments_and_results_pass_through_and_a_worker_is_reused() -> None:
    async with running_pool() as pool:
        data = os.urandom(8 << 20)
        key = JobKey("tenant", "job")
        assert await pool.run(echo, key, data, deadline_s=_DEADLINE_S, what="it") == (key, data)
        first = await call_pid(pool)
        assert first == await call_pid(pool) != os.getpid()


async def test_calls_that_pass_a_limit_end_alone_with_a_typed_error() -> None:
    async with running_pool() as pool:
        first = await call_pid(pool)
        spinning = asyncio.create_task(
            pool.run(spin, "", deadline_s=_SHORT_S, what="the template", key="a")
        )
        # Other tenants' calls run meanwhile.
        other = await pool.run(pid, "", deadline_s=_DEADLINE_S, what="it", key="b")
        assert not spinning.done()
        with pytest.raises(CallerError, match=r"the template took longer than 0\.2 s"):
            await spinning
        with pytest.raises(CallerError, match="the batch needed more than 128 MiB of memory"):
            await pool.run(allocate, 1 << 30, deadline_s=_DEADLINE_S, what="the batch")
        with pytest.raises(CallerError, match="the batch ended the process"):
            await pool.run(die, "", deadline_s=_DEADLINE_S, what="the batch")
        with pytest.raises(CallerError, match="the result has"):
            await pool.run(answer_with, 40 << 20, deadline_s=_DEADLINE_S, what="the batch")
        assert await pool.run(allocate, 1 << 20, deadline_s=_DEADLINE_S, what="it") == 1 << 20
        assert await call_pid(pool) not in {first, other}
        assert await pool.run(environment_limit, "", deadline_s=_DEADLINE_S, what="it") > 0


async def test_errors_of_the_function_are_raised() -> None:
    async with running_pool() as pool:
        with pytest.raises(CallerError, match="the input is wrong") as raised:
            await pool.run(fail, "typed", deadline_s=_DEADLINE_S, what="it")
        assert raised.value.info.field == "args.text"
        with pytest.raises(InternalError, match="ValueError: odd"):
            await pool.run(fail, "odd", deadline_s=_DEADLINE_S, what="it")


async def test_cancelled_call_frees_its_worker_and_its_turn() -> None:
    async with running_pool() as pool:
        await call_pid(pool)
        calls = [
            asyncio.create_task(pool.run(spin, "", deadline_s=_DEADLINE_S, what="it"))
            for _ in range(4)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ResourceError, match="3 calls of this tenant wait") as raised:
            await call_pid(pool)
        assert raised.value.info.code is Code.RESOURCE_EXHAUSTED
        for call in reversed(calls):
            call.cancel()
        await asyncio.wait(calls)
        assert await call_pid(pool)


def parent_pid(_: str) -> int:
    return os.getppid()


async def until_ended(worker: int) -> None:
    """Args: worker: a pid descriptor, which is closed."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(worker, ended.set)
    async with asyncio.timeout(_DEADLINE_S):
        await ended.wait()
    loop.remove_reader(worker)
    os.close(worker)


async def test_killed_server_and_workers_are_replaced() -> None:
    async with running_pool() as pool:
        pids = set()
        for _ in range(2):
            server = await pool.run(parent_pid, "", deadline_s=_DEADLINE_S, what="it")
            pids.add(pid := await call_pid(pool))
            worker = os.pidfd_open(pid)
            os.kill(server, signal.SIGKILL)
            await until_ended(worker)
        assert await call_pid(pool) not in pids
        assert len(pids) == 2


async def test_workers_end_with_the_pool() -> None:
    async with running_pool() as pool:
        worker = os.pidfd_open(await call_pid(pool))
    await until_ended(worker)


async def test_waiting_keys_go_in_turn() -> None:
    turns = Turns(num_slots=1, slots_per_key=1, max_waiting=10)
    order = []

    async def take(key: str) -> None:
        async with turns.turn(key):
            order.append(key)

    async with AsyncExitStack() as first:
        await first.enter_async_context(turns.turn("a"))
        tasks = [asyncio.create_task(take(key)) for key in "aaabbc"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    assert order == ["a", "b", "c", "a", "b"]


async def test_call_that_finds_the_server_just_killed_runs_in_another_one() -> None:
    async with running_pool() as pool:
        server = await pool.run(parent_pid, "", deadline_s=_DEADLINE_S, what="it")
        os.kill(await call_pid(pool), signal.SIGKILL)
        os.kill(server, signal.SIGKILL)  # nobody has noticed it yet
        assert await pool.run(parent_pid, "", deadline_s=_DEADLINE_S, what="it") != server


def prepare(text: str) -> None:
    os.environ["PREPARED"] = text


def prepared(_: str) -> str:
    return os.environ["PREPARED"]


async def test_workers_have_what_was_prepared_and_a_closed_pool_starts_none() -> None:
    async with WorkerPool([__name__], prepare=prepare, argument="it") as pool:
        assert await pool.run(prepared, "", deadline_s=_DEADLINE_S, what="it") == "it"
    with pytest.raises(ResourceError, match="closed"):
        await pool.run(prepared, "", deadline_s=_DEADLINE_S, what="it")
