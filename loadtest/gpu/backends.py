"""Proofs that whole backends give the same results over switches, on memory of the GPU.

The proofs run the code that ranks run: a small bfloat16 model trains by `fsdp` and by `megatron`,
and is sampled by `sampler` and by `vllm`, once undisturbed and once with an offload and a load
after every call. A backend whose runtime is not installed in this Python is skipped, by the name of
the missing package. Our Megatron backend uses no layer of Transformer Engine, but where that is
installed Megatron takes it for the routers of experts: `megatron` is proved with it, too, on a
model that has some.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from loadtest.gpu.proofs import (
    Found,
    Skipped,
    offload_and_load,
    require,
    with_heap,
)
from phaseloom.worker.cuda.driver import Driver

if TYPE_CHECKING:
    from phaseloom.worker.state.devicememory import DeviceMemory

MiB = 1024 * 1024
CALLS = 3
TRAINED = ("fsdp", "megatron")
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""A model that a GPU makes in no time, of the widths that its kernels are made for."""

EXPERTS: dict[str, Any] = {
    **MODEL,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""The same model with experts in place of each MLP."""

Disturb = Callable[[], None]


def backend_over_switches(
    driver: Driver, name: str, *, model: dict[str, Any] = MODEL, needs: str = ""
) -> Found:
    """A backend's results are equal bit by bit with and without an offload after every call.

    Args: needs: a module that must be installed beside the backend's own.
    """
    _require_installed(name, needs)
    undisturbed, _ = _results(driver, name, model, is_disturbed=False)
    disturbed, kept = _results(driver, name, model, is_disturbed=True)
    require(undisturbed == disturbed, "results differ after switches")
    return Found(
        f"{CALLS} calls, equal with and without switches", {"kept beside the heap, MiB": kept}
    )


def _require_installed(name: str, needs: str) -> None:
    """Check that a backend's modules, and this one, are installed. Raises: Skipped: one is not."""
    try:
        from phaseloom.worker.backends import backend_factory, missing_modules

        also = [needs] if needs and find_spec(needs) is None else []
        if missing := [*missing_modules(name), *also]:
            raise Skipped(f"not installed in this Python: {', '.join(missing)}")
        backend_factory(name)
    except ModuleNotFoundError as error:
        raise Skipped(f"not installed in this Python: {error.name}") from error


def _results(
    driver: Driver, name: str, model: dict[str, Any], *, is_disturbed: bool
) -> tuple[list[object], float]:
    """The results of each call, and the MiB that the backend keeps on the device while its heap is
    off it."""
    from phaseloom.worker.backends import backend_factory

    factory = backend_factory(name)
    torch.cuda.set_device(driver.device)
    free = driver.free_bytes()
    with with_heap(driver, factory.plan(spec(name, model)).heap_bytes) as (heap, extent):
        kept = 0.0

        def disturb() -> None:
            nonlocal kept
            if is_disturbed:
                offload_and_load(heap, extent)
                gc.collect()
                torch.cuda.empty_cache()
                kept = (free - driver.free_bytes() - heap.resident_bytes()) / MiB

        return results(name, heap, disturb, model), kept


def spec(name: str, model: dict[str, Any] = MODEL) -> Any:
    """A deployment of a model; a trained one where the backend trains."""
    from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec

    return DeploymentSpec(
        "checked", "gpu", name, ModelSpec(model, init_seed=7), trainable=name in TRAINED
    )


def results(
    name: str, memory: DeviceMemory, disturb: Disturb, model: dict[str, Any] = MODEL
) -> list[object]:
    """The results of the backend on this memory; `disturb` is called after every call of it."""
    from phaseloom.worker.backends import backend_factory

    backend = backend_factory(name)(spec(name, model), memory)
    try:
        call = _train if name in TRAINED else _generate
        found: list[object] = []
        for number in range(CALLS):
            found.append(call(backend, number))
            disturb()
        return [*found, backend.weights_sha256()]
    finally:
        backend.close()


def _train(backend: Any, number: int) -> object:
    from phaseloom.common.contract.operations import (
        AdamParams,
        Datum,
        ForwardBackward,
        Loss,
        OptimStep,
    )

    text = [(7 * i + number) % 4000 for i in range(65)]
    batch = [Datum(text[:-1], text[1:], weights=[1.0] * 64)] * 4
    trained = backend.forward_backward(ForwardBackward(batch, Loss.CROSS_ENTROPY))
    stepped = backend.optim_step(OptimStep(AdamParams(1e-3)))
    return (trained.metrics, stepped.metrics)


def _generate(backend: Any, number: int) -> object:
    from phaseloom.common.contract.operations import Generate, Prompt, SamplingParams

    prompts = [Prompt([5 * i + number, 17, 4], seed=i) for i in range(8)]
    ended = _Ended()
    backend.generate([Generate(prompts, SamplingParams(32), 4)], ended)
    return ended.results


class _Ended:
    """A watch that waits for the requests of a call, and cancels none."""

    def __init__(self) -> None:
        self.results: list[object] = []

    def joined(self) -> tuple[()]:
        return ()

    def adapter(self, i: int) -> None:
        """None: all requests are generated with the deployment's own weights."""

    def is_cancelled(self, i: int) -> bool:
        return False

    def is_stopped(self, i: int) -> bool:
        return False

    def stepped(self, tokens: int) -> None:
        """Do nothing: nobody asks how the steps went."""

    def progress(self, i: int, num_done: int, num_total: int) -> None:
        """Do nothing: nobody asks."""

    def wants_tokens(self, i: int) -> bool:
        return False

    def drawn(self, i: int, tokens: object) -> None:
        """Do nothing: nobody asks."""

    def still_open(self, i: int, num_samples: int) -> None:
        """Do nothing: nobody asks."""

    def ended(self, i: int, result: object) -> None:
        self.results.append(result)
