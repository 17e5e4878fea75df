"""Runs functions on callers' input in worker processes, with a deadline and a memory limit.

`WorkerPool.run` is for work that may take long or need much memory, depending on the input:
decoding large payloads, rendering templates. If a call passes its limit, its worker is killed and
the call ends with a `CallerError`; other calls go on. Workers are forked from a server without
threads and sockets (`forkserver`), so starting one does not stall the event loop. All of them die
with this process.

Arguments and results travel as MessagePack by the annotations of the function, so a compromised
worker cannot run code here. Both are encoded and decoded on the event loop: pass and return `bytes`
if there are many of something.

Cost: about 0.2 ms per call. Arguments that are `bytes` are sent in steps, without a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from typing import Any, Final, TypeVar, TypeVarTuple, get_type_hints

import msgspec

from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    ErrorInfo,
    PhaseloomError,
    ResourceError,
    to_exception,
    unexpected_error,
)
from phaseloom.common.process import diewithparent, forkserver, lifecycle

_LENGTH: Final = struct.Struct("<Q")
_MIN_WAIT_S = 0.05
_MAX_ANSWER_BYTES = 32 << 20
_MAX_COPIED_BYTES = 1 << 16
_PATIENCE = 10
"""A call ends after this many times its deadline, even if its worker got no processor time."""
_NICENESS = 5
"""Lowers the priority of workers, so that event loops on the same machine stay fast."""

_Parts = list[bytes]
"""A message, to be sent one part after the other."""
Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class _Call(msgspec.Struct, frozen=True, array_like=True):
    module: str
    function: str
    arguments: msgspec.Raw


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: ErrorInfo | None = None
    is_out_of_memory: bool = False
    """Whether the call needed more memory than a worker may use. The worker then ends."""


class _WorkerDied(Exception):
    pass


class WorkerPool:
    """A bounded number of worker processes, which serve keys (tenants) in turn.

    One worker is kept free of any single key's calls, if there are several workers.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        num_workers: int = 2,
        memory_bytes: int = 512 << 20,
        max_waiting: int = 64,
        prepare: Callable[[str], None] | None = None,
        argument: str = "",
    ) -> None:
        """Prepare a pool. The first call starts its processes.

        Args: modules: modules that contain the functions to run; imported once, before the first
                  worker starts. They must not start threads.
              memory_bytes: how much memory a worker may use in addition to these modules.
              max_waiting: how many calls of one key may wait; more are refused.
              prepare: a function that runs with `argument` before the first worker starts. Workers
                  share the memory of all that it loads. It must not raise and not start threads.
        """
        prepared_by = "" if prepare is None else f"{prepare.__module__}:{prepare.__qualname__}"
        self._command = [sys.executable, "-m", __name__, str(memory_bytes), prepared_by, argument]
        self._command += modules
        self._memory_bytes = memory_bytes
        self._is_closed = False
        self._turns = Turns(num_workers, max(1, num_workers - 1), max_waiting)
        self._server: forkserver.ForkServer | None = None
        self._idle: list[_Worker] = []

    async def __aenter__(self) -> WorkerPool:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. Open calls fail."""
        self._is_closed = True
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        if self._server is not None:
            self._server.close()  # workers die with it
            self._server = None

    async def run(
        self,
        function: Callable[[*Ts], T],
        *arguments: *Ts,
        deadline_s: float,
        what: str,
        key: str = "",
    ) -> T:
        """Run a function in a worker and return its result.

        Args:   function: a function of a module, with annotated parameters and result.
                deadline_s: seconds of processor time, so that a busy machine fails no call.
                what: the name of the input in errors, such as `the chat template`.
                key: the tenant; tenants are served in turn.
        Raises: CallerError: the call took longer than its deadline or needed too much memory.
                ResourceError: too many calls of this key are waiting, no worker can be started, or
                the pool is closed.
                PhaseloomError: what the function raised; other exceptions become InternalError.
        """
        request = _request(function, arguments)
        async with self._turns.turn(key):
            # Two workers may have been killed with the server, but three die only of the call.
            for _ in range(3):
                with contextlib.suppress(_WorkerDied):
                    worker = self._pop_idle() or await self._start()
                    answer = await self._answer(worker, request, deadline_s, what)
                    result: T = _result_decoder(function).decode(answer.result)
                    return result
        raise CallerError(
            f"{what} ended the process that worked on it",
            remedy="make it smaller or simpler",
        )

    async def _answer(
        self, worker: _Worker, request: _Parts, deadline_s: float, what: str
    ) -> _Answer:
        is_reusable = False
        try:
            answer = await worker.exchange(request, deadline_s)
            is_reusable = not answer.is_out_of_memory
        except TimeoutError:
            raise CallerError(
                f"{what} took longer than {deadline_s:g} s", remedy="make it smaller or simpler"
            ) from None
        finally:
            if is_reusable and self._server is not None:
                self._idle.append(worker)
            else:
                worker.end()
        if answer.is_out_of_memory:
            raise CallerError(
                f"{what} needed more than {self._memory_bytes >> 20} MiB of memory",
                remedy="make it smaller or simpler",
            )
        if answer.error is not None:
            raise to_exception(answer.error)
        return answer

    def _pop_idle(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                return worker
            worker.end()
        return None

    async def _start(self) -> _Worker:
        if self._is_closed:
            raise ResourceError("the pool of worker processes is closed", remedy="try again")
        if self._server is None:
            self._server = forkserver.ForkServer(
                self._command, "see the log for the error that ended it"
            )
        try:
            return await self._fork(self._server)
        except ResourceError:
            return await self._fork(self._server)  # it had just died; now it is restarted

    async def _fork(self, server: forkserver.ForkServer) -> _Worker:
        server.restart_if_dead()
        # The first fork waits for the server's imports.
        starting = asyncio.ensure_future(asyncio.to_thread(_fork_worker, server))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_end_started)
            raise


class Turns:
    """Bounds how many calls run at once, and lets waiting keys go in turn."""

    def __init__(self, num_slots: int, slots_per_key: int, max_waiting: int) -> None:
        self._num_free = num_slots
        self._slots_per_key = slots_per_key
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting calls of each key; the key that is served next comes first."""

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a free slot and occupy it within the block.

        Raises: ResourceError: RESOURCE_EXHAUSTED: too many calls of this key are waiting.
        """
        calls = self._waiting.setdefault(key, deque())
        if len(calls) >= self._max_waiting:
            raise ResourceError(
                f"{len(calls)} calls of this tenant wait already",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="send fewer large requests at once",
                details={"retry_after_s": 1},
            )
        granted = asyncio.get_running_loop().create_future()
        calls.append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted in calls:
                calls.remove(granted)
            else:
                self._num_free += 1
                self._running[key] -= 1
                self._running += Counter()  # drop keys without running calls
            self._grant()

    def _grant(self) -> None:
        for key in list(self._waiting):
            calls = self._waiting[key]
            if not calls:
                del self._waiting[key]
            elif self._num_free and self._running[key] < self._slots_per_key:
                self._num_free -= 1
                self._running[key] += 1
                granted = calls.popleft()
                if not granted.done():  # otherwise it is cancelled, and frees its slot soon
                    granted.set_result(None)
                self._waiting[key] = self._waiting.pop(key)  # this key comes last now


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, process: forkserver.ForkedProcess, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel

    async def exchange(self, request: _Parts, deadline_s: float) -> _Answer:
        """Send a request and wait for its answer.

        Raises: TimeoutError: the deadline passed. _WorkerDied: the worker ended instead.
        """
        start_cpu_s, end_s = self._cpu_s(), time.monotonic() + _PATIENCE * deadline_s
        exchanging = asyncio.ensure_future(self._exchange(request))
        try:
            remaining_s = deadline_s
            while not (await asyncio.wait([exchanging], timeout=remaining_s))[0]:
                remaining_s = deadline_s - (self._cpu_s() - start_cpu_s)
                if remaining_s <= 0 or time.monotonic() > end_s:
                    raise TimeoutError
                remaining_s = max(remaining_s, _MIN_WAIT_S)
        finally:
            await lifecycle.end([exchanging])
        return exchanging.result()

    async def _exchange(self, request: _Parts) -> _Answer:
        loop = asyncio.get_running_loop()
        try:
            for part in request:
                await loop.sock_sendall(self._channel, part)
            (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
            answer = await self._receive(length)
        except OSError:
            raise _WorkerDied from None
        return _answer_decoder.decode(answer)

    async def _receive(self, num_bytes: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(num_bytes)
        remaining = memoryview(data)
        while remaining:
            count = await loop.sock_recv_into(self._channel, remaining)
            if not count:
                raise _WorkerDied
            remaining = remaining[count:]
        return data

    def _cpu_s(self) -> float:
        """Return the processor time that the process has used, or 0 if it has ended."""
        try:
            # clock_getcpuclockid(3), which Python lacks
            return time.clock_gettime((~self._process.pid << 3) | 2)
        except OSError:
            return 0.0

    def is_alive(self) -> bool:
        ending = select.poll()
        ending.register(self._process.sentinel, select.POLLIN)
        return not ending.poll(0)

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.close()
        self._channel.close()


def _request(function: Callable[..., Any], arguments: Sequence[Any]) -> _Parts:
    """Encode a call. Long bytes are parts of their own, because copying them takes milliseconds."""
    encode = msgspec.msgpack.encode
    content: list[bytes] = [encode((function.__module__, function.__qualname__))]
    content[0] = b"\x93" + content[0][1:] + bytes([0x90 + len(arguments)])
    for argument in arguments:
        is_bytes = isinstance(argument, bytes | bytearray)
        if is_bytes and len(argument) > _MAX_COPIED_BYTES:
            content[-1] += b"\xc6" + len(argument).to_bytes(4, "big")
            content += [argument, b""]
        else:
            content[-1] += encode(argument)
    return [_LENGTH.pack(sum(map(len, content))), *(part for part in content if part)]


def _end_started(starting: asyncio.Future[_Worker]) -> None:
    if starting.exception() is None:
        starting.result().end()


def _fork_worker(server: forkserver.ForkServer) -> _Worker:
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = server.fork("", theirs.fileno())
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return _Worker(process, ours)


_answer_decoder = msgspec.msgpack.Decoder(_Answer)


@cache
def _result_decoder(function: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(get_type_hints(function)["return"])


# --- in the worker --------------------------------------------------------------------------------


def main(memory_bytes: int, prepare: str, argument: str, modules: Sequence[str]) -> None:
    """Run as the server from which workers are forked."""
    lifecycle.die_with_parent()
    lifecycle.return_large_blocks()
    os.nice(_NICENESS)
    server_pid = os.getpid()

    def preload() -> None:
        for name in modules:
            importlib.import_module(name)
        if prepare:
            _function(*prepare.split(":"))(argument)
        gc.freeze()  # forked workers then share these objects' memory

    def work(_: str) -> None:
        diewithparent.arm(server_pid)
        limit = _mapped_bytes() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with socket.socket(fileno=os.dup(sys.stdin.fileno())) as channel:
            _serve_calls(channel)

    forkserver.serve(preload, work)


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()


def _serve_calls(channel: socket.socket) -> None:
    while header := channel.recv(_LENGTH.size, socket.MSG_WAITALL):
        (num_bytes,) = _LENGTH.unpack(header)
        request = bytearray(num_bytes)
        remaining = memoryview(request)
        while remaining:
            count = channel.recv_into(remaining)
            if not count:
                return
            remaining = remaining[count:]
        answer = _perform(request)
        payload = msgspec.msgpack.encode(answer)
        if len(payload) > _MAX_ANSWER_BYTES:
            error = CallerError(
                f"the result has {len(payload)} bytes, which exceeds {_MAX_ANSWER_BYTES}",
                remedy="make the input smaller",
            )
            payload = msgspec.msgpack.encode(_Answer(error=error.info))
        channel.sendall(_LENGTH.pack(len(payload)))
        channel.sendall(payload)
        if answer.is_out_of_memory:
            return


def _perform(request: bytearray) -> _Answer:
    try:
        call = msgspec.msgpack.decode(request, type=_Call)
        function = _function(call.module, call.function)
        result = function(*_arguments_decoder(function).decode(call.arguments))
        return _Answer(msgspec.Raw(msgspec.msgpack.encode(result)))
    except PhaseloomError as error:
        return _Answer(error=error.info)
    except MemoryError:
        return _Answer(is_out_of_memory=True)
    except Exception as error:
        return _Answer(error=unexpected_error(error))


@cache
def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@cache
def _arguments_decoder(function: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    hints = get_type_hints(function)
    hints.pop("return")
    return msgspec.msgpack.Decoder(tuple[*hints.values()])  # type: ignore[misc]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
