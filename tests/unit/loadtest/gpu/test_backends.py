"""What `make gpu-check` has backends do, on an emulated device."""

from __future__ import annotations

import sys

import pytest

from loadtest.gpu import backends
from loadtest.gpu.proofs import Skipped
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.cuda.driver import Driver
from phaseloom.worker.state.heap import Heap

SMALL = {
    **backends.MODEL,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
"""The model, as small as a CPU likes it."""


@pytest.mark.parametrize("name", ["fsdp", "sampler"])
def test_results_are_the_same_over_switches_and_differ_where_bytes_do(name: str) -> None:
    def run(*, is_switched: bool, is_lossy: bool = False) -> list[object]:
        heap = Heap(backend_factory(name).plan(backends.spec(name, SMALL)).heap_bytes)

        def switch() -> None:
            if is_switched:
                kept = bytes(heap.buffer)
                heap.buffer[:] = b"\xff" * heap.num_bytes
                heap.buffer[:] = bytes(heap.num_bytes) if is_lossy else kept

        return backends.results(name, heap, switch, SMALL)

    undisturbed = run(is_switched=False)
    assert len(undisturbed) == backends.CALLS + 1
    assert run(is_switched=True) == undisturbed
    assert run(is_switched=True, is_lossy=True) != undisturbed


def test_backend_whose_runtime_is_missing_is_skipped_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "phaseloom.worker.backends.missing_modules", lambda name: ["vllm"] if name == "vllm" else []
    )
    driver: Driver = sys  # type: ignore[assignment]  # nothing of it is used
    with pytest.raises(Skipped, match="not installed in this Python: vllm"):
        backends.backend_over_switches(driver, "vllm")
    with pytest.raises(Skipped, match="not installed in this Python: transformer_engine"):
        backends.backend_over_switches(driver, "fsdp", needs="transformer_engine")
