"""Sizes of the devices and of host memory, from this machine's memory and the models to run.

All devices together get half of the available memory, and host state a quarter. The rest is for
processes and the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from phaseloom.cli.meshconfig import NodeConfig
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.modelconfig import context_tokens
from phaseloom.common.contract.sizes import format_size
from phaseloom.common.tensors.modelfiles import check_directory

ROLLOUT, TRAIN = "rollout-0", "train-0"
ADAPTER_RANK = 32
_SAMPLED, _TRAINED = 4, 16
"""Bytes per parameter of float32 weights; with gradients and AdamW's moments."""
_MARGIN = 1.05
"""Room for padding between tensors."""
_ROUNDED = 2**20


class Footprint:
    """Memory that a model needs on a device, in bytes."""

    def __init__(self, name: str, directory: Path) -> None:
        headers = check_directory(directory, f"mesh.models.{name}")
        shapes = [entry.shape for entry in headers.entries]
        self.name, self.config = name, headers.config
        self.num_parameters = sum(map(prod, shapes))
        self.sampled_bytes = int(_MARGIN * _SAMPLED * self.num_parameters)
        self.trained_bytes = int(_MARGIN * _TRAINED * self.num_parameters)
        linear = [sum(shape) for shape in shapes if len(shape) == 2]
        # The embedding has no adapter, and it is the largest matrix.
        num_values = ADAPTER_RANK * (sum(linear) - max(linear, default=0))
        self.adapter_bytes = max(1, int(_MARGIN * _TRAINED * num_values))


def footprints(models: Mapping[str, str]) -> list[Footprint]:
    """Read what each model needs. Raises: CallerError: a directory is not a model's."""
    return [Footprint(name, Path(directory)) for name, directory in models.items()]


def nodes_for(models: Iterable[Footprint], available_bytes: int) -> list[NodeConfig]:
    """Return a rollout and a train node whose sizes suit the machine and the models.

    Training all weights takes four times the memory of sampling, and the devices are in that
    proportion. If the largest model cannot be trained so, the train device gets what sampling
    leaves, which is enough for adapters.

    Raises: CallerError: RESOURCE_EXHAUSTED: the machine has no room for a model.
    """
    devices, host = available_bytes // 2, available_bytes // 4
    models = list(models)
    largest = max((model.sampled_bytes for model in models), default=0)
    rollout = max(devices // 5, largest)
    adapters = max((model.adapter_bytes for model in models), default=0)
    if rollout + adapters > devices:
        raise CallerError(
            f"sampling and adapters need devices of {format_size(largest + adapters)}, but half "
            f"of the available memory is {format_size(devices)}",
            code=Code.RESOURCE_EXHAUSTED,
            field="--model",
            remedy="use a smaller model or a machine with more memory, or state the nodes and "
            "their sizes in a mesh file",
            details={"needed_bytes": str(largest + adapters), "budget_bytes": str(devices)},
        )
    return [
        NodeConfig(
            name,
            pool,
            [_rounded(device)],
            host_memory_bytes=_rounded(host * share // 3),
        )
        for name, pool, device, share in (
            (ROLLOUT, "rollout", rollout, 1),
            (TRAIN, "train", devices - rollout, 2),
        )
    ]


def what_fits(model: Footprint, nodes: Iterable[NodeConfig]) -> list[str]:
    """Describe in lines how much of a model's work the nodes have room for."""
    sizes = [(node.pool, max(node.devices), node.host_memory_bytes) for node in nodes]
    train, host = max(((d, h) for pool, d, h in sizes if pool == "train"), default=(0, 0))
    rollout = max((d for pool, d, _ in sizes if pool == "rollout"), default=0)
    context = context_tokens(model.config)
    lines = [
        f"{model.name}: {model.num_parameters:,} parameters, {format_size(model.sampled_bytes)} to "
        f"sample" + (f", context of {context:,} tokens" if context else "")
    ]
    if model.sampled_bytes > rollout:
        lines.append(f"  does not fit: the rollout device has {format_size(rollout)}")
    adapters = train // model.adapter_bytes
    lines.append(
        f"  adapters of rank {ADAPTER_RANK} on all layers: {format_size(model.adapter_bytes)} "
        f"each, room for {adapters:,} on the train device"
    )
    if model.trained_bytes <= train:
        lines.append(
            f"  training all weights: {format_size(model.trained_bytes)} a job, one at a time on "
            f"the device and {host // model.trained_bytes:,} more waiting in host memory"
        )
    else:
        lines.append(
            f"  training all weights does not fit: it needs {format_size(model.trained_bytes)}, "
            f"and the train device has {format_size(train)}"
        )
    if context and (token_bytes := _cache_bytes(model.config)):
        whole = context * token_bytes
        lines.append(
            f"  a sequence of {context:,} tokens has a KV cache of {format_size(whole)}, outside "
            "the devices' sizes"
        )
    return lines


def _cache_bytes(config: Mapping[str, object]) -> int:
    """Return the bytes of a KV cache per token, or 0 if the config does not say."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    width = config.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return 0
    key_heads, size = config.get("num_key_value_heads"), config.get("head_dim")
    key_heads = key_heads if isinstance(key_heads, int) else heads
    size = size if isinstance(size, int) else width // max(1, heads)
    return 2 * 4 * layers * key_heads * size


def _rounded(num_bytes: int) -> int:
    return max(_ROUNDED, num_bytes // _ROUNDED * _ROUNDED)
