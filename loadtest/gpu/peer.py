"""The other processes of the proofs: one with which device memory is shared, and a forked one.

    python -m loadtest.gpu.peer <read|make> <socket descriptor> <device> <bytes> <seed>

The first says each step in a word on the socket and then waits to be killed.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from multiprocessing.connection import Connection

import torch

from loadtest.gpu.patterns import fill, num_differing
from phaseloom.worker.cuda.driver import Driver, load
from phaseloom.worker.cuda.memory import CudaHeap, DeviceRange
from phaseloom.worker.cuda.tensors import memory_tensor

WORD_BYTES = 64


def say(end: socket.socket, word: str) -> None:
    end.sendall(word.encode().ljust(WORD_BYTES))


def hear(end: socket.socket) -> str:
    """The other end's next word; empty: it is gone."""
    heard = b""
    while len(heard) < WORD_BYTES:
        more = end.recv(WORD_BYTES - len(heard))
        if not more:
            return ""
        heard += more
    return heard.decode().strip()


def read(end: socket.socket, driver: Driver, num_bytes: int, seed: int) -> None:
    """Find the pattern of `seed` in the memory that comes, copy it on the device, and leave the
    pattern of `seed + 1` there."""
    _, fds, _, _ = socket.recv_fds(end, 1, 1)
    shared = DeviceRange(driver, num_bytes)
    shared.adopt(fds[0])
    os.close(fds[0])
    memory = memory_tensor(shared.address, num_bytes, driver.device)
    say(end, f"differing {num_differing(memory, seed)}")
    own = CudaHeap(num_bytes, driver)
    started_s = time.perf_counter()
    own.copy_from(shared, [(0, 0, num_bytes)])
    duration_s = time.perf_counter() - started_s
    say(end, f"copied {num_differing(own.tensor(), seed)} {duration_s:.6f}")
    fill(memory, seed + 1)
    torch.cuda.synchronize()
    say(end, "wrote")


def make(end: socket.socket, driver: Driver, num_bytes: int, seed: int) -> None:
    """Make memory in this process, with the pattern of `seed` in it, for the other process."""
    made = DeviceRange(driver, num_bytes)
    made.populate()
    fill(memory_tensor(made.address, num_bytes, driver.device), seed)
    torch.cuda.synchronize()
    fd = made.export()
    socket.send_fds(end, [b"."], [fd])
    os.close(fd)


def in_fork(sender: Connection, device: int, num_bytes: int) -> None:
    """Offload and load a pattern, and send the number of words that differ then."""
    torch.cuda.set_device(device)
    heap = CudaHeap(num_bytes, load(device))
    extent = memoryview(mmap.mmap(-1, num_bytes))
    heap.pin(extent)
    fill(heap.tensor(), 17)
    heap.copy_out(extent)
    heap.release()
    heap.copy_in(extent)
    sender.send_bytes(num_differing(heap.tensor(), 17).to_bytes(8, "little"))
    heap.close()


def main(role: str, descriptor: str, device: str, num_bytes: str, seed: str) -> None:
    end = socket.socket(fileno=int(descriptor))
    torch.cuda.set_device(int(device))
    work = {"read": read, "make": make}[role]
    work(end, load(int(device)), int(num_bytes), int(seed))
    hear(end)


if __name__ == "__main__":
    main(*sys.argv[1:])
