"""Proofs about FSDP2 over NCCL: weights in a heap train the same over switches, and the memory that
NCCL keeps on the device meanwhile does not grow.

The first works as the `fsdp` backend does: every parameter's shard is a view into the heap, and
FSDP2 rebuilds the tensors that it derives from it. One rank only, because there may be only one
device: with more, NCCL keeps more.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from loadtest.gpu.proofs import (
    SLACK_BYTES,
    Found,
    MiB,
    Skipped,
    offload_and_load,
    require,
    with_heap,
)
from phaseloom.worker.cuda.driver import Driver

WIDTH, LAYERS, STEPS = 1024, 3, 4
RATE = 10.0
"""The learning rate: large, because the loss is a mean over many outputs and the weights are
small."""
TIMEOUT_S = 60.0


def sharded_training(driver: Driver) -> Found:
    """FSDP2's weights are equal bit by bit with and without an offload after every step."""
    if not dist.is_available() or not dist.is_nccl_available():
        raise Skipped("this torch has no NCCL")
    with _group(driver.device) as mesh:
        undisturbed = _trained(driver, mesh, is_disturbed=False)
        disturbed = _trained(driver, mesh, is_disturbed=True)
    require(torch.equal(undisturbed, disturbed), "weights differ")
    return Found(f"{STEPS} steps of {undisturbed.numel()} weights, equal with and without")


def nccl_residue(driver: Driver) -> Found:
    """The memory that NCCL keeps on the device while a rank's heap is off it does not grow with
    switches."""
    if not dist.is_available() or not dist.is_nccl_available():
        raise Skipped("this torch has no NCCL")
    before = driver.free_bytes()
    with with_heap(driver, 64 * MiB) as (heap, extent):

        def kept() -> int:
            """Bytes that are taken while the heap is off the device."""
            heap.copy_out(extent)
            heap.release()
            gc.collect()
            torch.cuda.empty_cache()
            taken = before - driver.free_bytes()
            heap.copy_in(extent)
            return taken

        alone, turns = kept(), []
        with _group(driver.device):
            for _ in range(STEPS):
                dist.all_reduce(heap.tensor().view(torch.float32))
                torch.cuda.synchronize(driver.device)
                turns.append(kept() - alone)
        left = kept() - alone
    grown = turns[-1] - turns[0]
    require(grown <= SLACK_BYTES, f"{grown} bytes more after {STEPS} switches than after one")
    figures = {"kept with a group, MiB": turns[-1] / MiB, "left after it, MiB": left / MiB}
    return Found(f"the same after {STEPS} switches", figures)


@contextmanager
def _group(device: int) -> Iterator[DeviceMesh]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=(Path(directory) / "store").as_uri(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        try:
            yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
        finally:
            torch.cuda.synchronize(device)
            dist.destroy_process_group()


def _trained(driver: Driver, mesh: DeviceMesh, *, is_disturbed: bool) -> torch.Tensor:
    """The weights after some steps of plain gradient descent."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    inputs = torch.randn(64, WIDTH, generator=generator).to(f"cuda:{driver.device}")
    num_bytes = LAYERS * WIDTH * WIDTH * 4
    with with_heap(driver, num_bytes) as (heap, extent):
        weights = heap.tensor().view(torch.float32)
        _move_parameters(model, weights.view(LAYERS, WIDTH, WIDTH))
        losses = []
        for _ in range(STEPS):
            loss = model(inputs).square().mean()
            losses.append(loss.item())
            torch.autograd.backward(loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    gradient, parameter.grad = parameter.grad, None
                    _local(parameter).sub_(_local(gradient), alpha=RATE)
            if is_disturbed:
                offload_and_load(heap, extent)
        require(losses[-1] < losses[0], f"it does not learn: losses {losses}")
        return weights.clone()


def _move_parameters(model: nn.Module, views: torch.Tensor) -> None:
    for parameter, view in zip(model.parameters(), views, strict=True):
        view.copy_(_local(parameter))
        parameter._local_tensor = view  # type: ignore[attr-defined]
    apply: Callable[..., nn.Module] = model._apply
    apply(lambda tensor: tensor)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor.detach()
