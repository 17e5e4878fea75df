"""A rank without a model, as a process of its own: holds a heap and obeys the state manager.

    python -m tests.support.staterank <socket> <token> <heap bytes>

It answers one JSON line on stdout to each line on stdin: `fill <seq>` (fills the heap by a mutating
operation `seq`), `digest`, `rss` (bytes). It exits when its connection ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.worker.state.client import RankStateClient
from phaseloom.worker.state.heap import Heap


def slots_of(num_bytes: int) -> list[TensorSlot]:
    """The whole heap as one weight."""
    return [TensorSlot("w", Role.WEIGHT, "uint8", [num_bytes], 0, num_bytes)]


def fill(heap: Heap, seq: int) -> None:
    """Content that depends on seq, and on the place in the heap."""
    block = b"".join(bytes([(seq + i) % 251]) * 4096 for i in range(256))
    buffer = heap.buffer
    for start in range(0, heap.num_bytes, len(block)):
        end = min(start + len(block), heap.num_bytes)
        buffer[start:end] = block[: end - start]


def rss_bytes() -> int:
    """Memory of the process and memory that it shares, without files on disk."""
    ctypes.CDLL(None).malloc_trim(0)
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert len(found) == 2
    return sum(map(int, found)) * 1024


async def main(socket: str, token: str, heap_bytes: int) -> None:
    seq = 0
    heap = Heap(heap_bytes)

    def answer(line: str) -> Any:
        nonlocal seq
        match line.split():
            case ["fill", number]:
                seq = int(number)
                fill(heap, seq)
                return seq
            case ["digest"]:
                return digest_of(heap.buffer)
            case ["rss"]:
                return rss_bytes()
        raise ValueError(line)

    client = await RankStateClient.connect(
        socket, token, applied=lambda: seq, on_loaded=lambda: None
    )
    seq = await client.register_heap(heap, slots_of(heap_bytes))
    if not seq:
        fill(heap, 0)
        await client.commit_initial()
    print(json.dumps(seq), flush=True)
    reader = await _stdin()
    await _first(_lines(reader, answer), asyncio.wait([client.closed]))
    await client.close()


async def _lines(reader: asyncio.StreamReader, answer: Callable[[str], Any]) -> None:
    while line := await reader.readline():
        print(json.dumps(answer(line.decode())), flush=True)


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def _first(*works: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
