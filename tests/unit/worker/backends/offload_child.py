"""Run by test_offload_memory: trains, offloads, loads, trains on; prints what it saw as JSON."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path

from phaseloom.common.contract.operations import AdamParams, ForwardBackward, Loss, OptimStep
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.state.heap import Heap
from tests.unit.worker.backends.models import batch, running, spec

FIRST, SECOND = (ForwardBackward(batch(seed), Loss.PPO) for seed in (1, 2))


def rss_anon_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def step(backend: Backend) -> list[float]:
    """A step begun before, ended, and the loss of what follows."""
    norm = backend.optim_step(OptimStep(AdamParams(1e-3))).metrics["grad_norm:mean"]
    return [norm, backend.forward_backward(SECOND).metrics["loss:sum"]]


def observe(backend: Backend, heap: Heap) -> dict[str, object]:
    backend.forward_backward(FIRST)
    backend.optim_step(OptimStep(AdamParams(1e-3)))
    loss_before = backend.forward_backward(FIRST).metrics["loss:sum"]
    # A shared mapping, as the host arena is: it does not count as anonymous memory.
    arena = mmap.mmap(-1, heap.num_bytes)
    arena[:] = heap.buffer
    next_before = step(backend)

    rss_anon_before = rss_anon_bytes()
    heap.release()
    rss_anon_after, heap_resident_after = rss_anon_bytes(), heap.resident_bytes()

    heap.buffer[:] = arena[:]
    backend.weights_changed()
    return {
        "state_bytes": heap.num_bytes,
        "rss_anon_before": rss_anon_before,
        "rss_anon_after": rss_anon_after,
        "heap_resident_after": heap_resident_after,
        "loss_before": loss_before,
        "loss_after": backend_loss_again(backend, heap, arena),
        "next_before": next_before,
        "next_after": step(backend),
    }


def backend_loss_again(backend: Backend, heap: Heap, arena: mmap.mmap) -> float:
    """The same loss once more on the loaded weights, then the state as it was loaded."""
    loss = backend.forward_backward(FIRST).metrics["loss:sum"]
    heap.buffer[:] = arena[:]
    return loss


def main() -> None:
    large = spec("fsdp", hidden_size=256, intermediate_size=1024, num_hidden_layers=10, head_dim=64)
    with running(large) as (backend, heap):
        print(json.dumps(observe(backend, heap)))


if __name__ == "__main__":
    main()
