"""Hugging Face causal LMs whose parameters live in a rank's device memory.

All torch backends share this module, so the same spec gives the same weights at the same offsets in
each of them. Buffers that follow from the config alone, such as rotary frequencies, are not state
and stay outside the heap. Weights are drawn in float32 and rounded to the config's `dtype`, float32
or bfloat16.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.modelconfig import context_tokens
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_layout import TensorSlot, host_start
from phaseloom.common.process import machine
from phaseloom.worker.backends.architectures import (
    attention_kernel,
    check_attention,
    check_model_type,
    separate_lengths,
)
from phaseloom.worker.backends.filetensors import ParameterShapes
from phaseloom.worker.backends.layout import BFLOAT16, FLOAT32, Region
from phaseloom.worker.backends.lora.adapters import LowRank, adapt, adapter_config, own_parameters
from phaseloom.worker.backends.modelnames import ModelNames, saved_shapes
from phaseloom.worker.state.devicememory import DeviceMemory, as_tensor

TORCH_DTYPES: Final = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}


def model_config(spec: ModelSpec) -> PreTrainedConfig:
    """Build the model's config.

    Raises: CallerError: an architecture, a dtype or a value is not supported.
    """
    values = dict(spec.config)
    model_type = values.pop("model_type", None)
    check_model_type(model_type)
    weights_dtype(spec)
    try:
        config = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # only the config decides what it raises
        name = re.search(r"field '(\w+)'", str(error))
        raise CallerError(
            f"the model config is invalid: {type(error).__name__}: {error}",
            field=f"model.config.{name[1]}" if name else "model.config",
            remedy="correct the value",
        ) from error
    check_attention(config)
    if spec.token_texts and len(spec.token_texts) != config.vocab_size:
        raise CallerError(
            f"expected one text for each of {config.vocab_size} token ids, got "
            f"{len(spec.token_texts)}",
            field="model.token_texts",
            remedy="pass one text per token id, and an empty one if a token has no text",
        )
    return config


def max_positions(config: PreTrainedConfig) -> int:
    """Return the longest sequence that the model supports, in tokens."""
    return context_tokens(config.to_dict()) or int(config.max_position_embeddings)


def weights_dtype(spec: ModelSpec) -> str:
    """Return the dtype of the model's weights. Raises: CallerError: it is not supported."""
    dtype = spec.config.get("dtype", spec.config.get("torch_dtype")) or FLOAT32
    if dtype not in (FLOAT32, BFLOAT16):
        raise CallerError(
            f"weights in {dtype} are not supported",
            field="model.config.dtype",
            remedy=f"use {FLOAT32} or {BFLOAT16}",
        )
    return str(dtype)


def config_dict(model: PreTrainedModel, spec: ModelSpec) -> dict[str, Any]:
    """Return the config to save with the deployment's weights: the model's `config.json`, or the
    adapter's config."""
    if spec.adapter is not None:
        return adapter_config(spec, model)
    return {**model.config.to_dict(), "dtype": weights_dtype(spec)}


def _from_config(config: PreTrainedConfig) -> PreTrainedModel:
    factory: Any = AutoModelForCausalLM
    try:
        model = factory.from_config(
            config, attn_implementation=attention_kernel(config), dtype=torch.float32
        )
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise ResourceError(
                f"there is not enough memory for the model: {error}",
                code=Code.RESOURCE_EXHAUSTED,
                field="model.config",
                remedy="use a smaller model, or a machine with more memory",
            ) from error
        # Otherwise only the config decides, so another start would fail in the same way.
        raise CallerError(
            "transformers cannot build a causal language model from this config: "
            f"{type(error).__name__}: {error}",
            field="model.config",
            remedy="pass the `config.to_dict()` of a causal language model",
        ) from error
    separate_lengths(model)
    # Never train(): dropout would draw from the global generator.
    return model.eval()  # type: ignore[no-any-return]


def _check_memory(config: PreTrainedConfig) -> None:
    """Refuse a model whose weights this machine cannot draw, before anything is allocated."""
    with torch.device("meta"):
        parameters = _from_config(config).parameters()
    num_bytes = sum(4 * parameter.numel() for parameter in parameters)
    if num_bytes > machine.memory_bytes():
        raise ResourceError(
            f"drawing the model's weights needs {num_bytes} bytes; this machine has "
            f"{machine.memory_bytes()}",
            code=Code.RESOURCE_EXHAUSTED,
            field="model.config",
            remedy="use smaller sizes in the config, or a machine with more memory",
        )


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """Build the float32 model, drawn from `init_seed`, without changing the global generator.

    A registered model's weights stay uninitialized, so that they take no memory. `pretrained.fill`
    later reads them into the heap. Under an adapter, `SharedBase` maps them instead; the adapter
    itself is drawn here.
    """
    config = model_config(spec)
    if spec.pinned is not None:
        with no_init_weights():
            model = _from_config(config)
        model.tie_weights()
        if spec.adapter is not None:
            adapt(model, spec.adapter)
        return model
    _check_memory(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.init_seed)
        return _from_config(config)


def parameter_shapes(spec: ModelSpec) -> ParameterShapes:
    """Return the shapes of a deployment's own parameters (`own_parameters`). Allocates nothing."""
    model = meta_model(spec)
    if spec.adapter is None:
        return saved_shapes(model)
    return ParameterShapes({name: each.shape for name, each in own_parameters(model).items()})


def model_names(spec: ModelSpec) -> ModelNames:
    """Return the names of a model's tensors in files, without an adapter's. Allocates nothing."""
    return ModelNames(meta_model(replace(spec, adapter=None)))


def meta_model(spec: ModelSpec) -> PreTrainedModel:
    """Build a model without content, with its adapter."""
    with torch.device("meta"):
        model = _from_config(model_config(spec))
        if spec.adapter is not None:
            adapt(model, spec.adapter)
    return model


def adapted_weights(spec: ModelSpec) -> dict[str, str]:
    """Return the weight's parameter name for each layer with an adapter. Tied weights have their
    first name. Allocates nothing."""
    model = meta_model(spec)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: names[id(module.weight)]
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
    }


class HeapTensors:
    """torch tensors over a heap, and over the state behind it that lives in host memory.

    The tensors keep the mappings alive, but not their content.
    """

    def __init__(self, heap: DeviceMemory) -> None:
        self._bytes = as_tensor(heap)
        self.device = self._bytes.device
        """Device of the heap."""
        self._host_start = host_start(heap.num_bytes)
        self._host = torch.empty(0, dtype=torch.uint8)

    def use_host_memory(self, buffer: memoryview) -> None:
        """Use this memory for the state behind the heap, from `host_start` on."""
        self._host = torch.frombuffer(buffer, dtype=torch.uint8)

    def view(self, slot: TensorSlot, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the tensor over a slot. Args: shape: the slot's shape with extra rows of
        padding."""
        shape = slot.shape if shape is None else shape
        dtype = TORCH_DTYPES[slot.dtype]
        stop = slot.offset + math.prod(shape) * dtype.itemsize
        return self._between(slot.offset, stop).view(dtype).view(shape)

    def views(self, region: Region) -> dict[str, torch.Tensor]:
        return {name: self.view(slot) for name, slot in region.slots.items()}

    def flat(self, region: Region) -> torch.Tensor:
        """Return the region as one vector, including the zero padding between tensors."""
        return self._between(region.start, region.stop).view(TORCH_DTYPES[region.dtype])

    def nonfinite(self, slots: Iterable[TensorSlot]) -> list[str]:
        """Return the names of the tensors that hold NaN or infinity."""
        return [slot.name for slot in slots if not is_finite(self.view(slot))]

    def _between(self, start: int, stop: int) -> torch.Tensor:
        if start < self._host_start:
            return self._bytes[start:stop]
        return self._host[start - self._host_start : stop - self._host_start]


def is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # A sum is several times as fast as a look at each number. It may overflow by itself, so the
    # numbers decide if it is not finite.
    total = tensor.sum(dtype=torch.float32)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def as_little_endian(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield tensors as little-endian arrays, without a copy where possible. bfloat16, which numpy
    lacks, becomes int16."""
    for name, tensor in tensors:
        on_host = tensor.detach().cpu()
        array = (on_host.view(torch.int16) if on_host.dtype == torch.bfloat16 else on_host).numpy()
        yield name, array.astype(array.dtype.newbyteorder("<"), copy=False)


def return_freed_memory() -> None:
    """Return to the system the memory that malloc keeps after a model moved into its heap."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
