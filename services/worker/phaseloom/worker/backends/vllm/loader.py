"""A vLLM model loader that finds out where each parameter comes from, and puts it into our heap.

vLLM fuses, shards and pads parameters as it loads them, by rules of each architecture. This loader
needs no such rules. It runs the model's own `load_weights` over empty tensors that record which of
their views is copied where (`trace`). This yields the slice of each checkpoint tensor that this
rank holds, and its offset in the heap. Then every parameter of the model becomes a view of the
heap, at a fixed address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.worker.state.heap import align

LOAD_FORMAT: Final = "phaseloom"

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Placement:
    """The slots and offsets of a model's parameters in a rank's heap."""

    slots: list[TensorSlot]
    """The checkpoint's tensors, sorted by name, or the rank's slices of them."""
    offsets: Mapping[str, int]
    """Offset of each parameter of vLLM's model. A parameter may contain several slots, and
    padding."""
    num_bytes: int


@dataclass(frozen=True)
class _Copy:
    """A copy that `load_weights` made from a view of a checkpoint tensor into a parameter's
    storage."""

    name: str
    view: torch.Tensor
    target: torch.Tensor


class _Traced(torch.Tensor):
    """A checkpoint tensor without content. It tracks its views and records copies out of them."""

    of: str
    """Name of the checkpoint tensor that this is a view of."""
    meta: torch.Tensor
    """The same view of a tensor on the `meta` device."""
    copies: list[_Copy]

    @staticmethod
    def __new__(
        cls, of: str, view: torch.Tensor, copies: list[_Copy], device: torch.device
    ) -> _Traced:
        make: Any = torch.Tensor._make_wrapper_subclass
        traced: _Traced = make(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=device,
        )
        traced.of, traced.meta, traced.copies = of, view, copies
        return traced

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if isinstance(source, cls) and not isinstance(target, cls):
                source.copies.append(_Copy(source.of, source.meta.expand(target.shape), target))
                return target
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, cls))
        if func in {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default}:
            return first  # Converts dtype or device. The copy that follows does so anyway.

        def plain(value: Any) -> Any:
            return value.meta if isinstance(value, cls) else value

        def traced(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if _storage(value) != _storage(first.meta):
                raise unsupported(
                    f"loading computes with {first.of} ({func}) instead of copying it"
                )
            return cls(first.of, value, first.copies, first.device)

        out = func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
        return type(out)(map(traced, out)) if isinstance(out, tuple | list) else traced(out)


def place(model: nn.Module, shapes: Shapes, dtype: torch.dtype) -> Placement:
    """Plan the offsets of a vLLM model's parameters in a heap, and the slices that they hold.

    The model may be on the `meta` device. No content is touched except padding.

    Args: shapes: shapes of the whole checkpoint tensors.
    Raises: CallerError: FAILED_PRECONDITION: the model does more with its weights than copy them.
    """
    parameters = dict(sorted(model.named_parameters()))
    offsets, end = {}, 0
    for name, parameter in parameters.items():
        offsets[name] = end
        end = align(end + parameter.numel() * parameter.element_size())
    owner_of = {_storage(parameter): name for name, parameter in parameters.items()}
    slots = {}
    for copied in trace(model, shapes, dtype):
        if not copied.view.numel():
            continue  # this rank holds only padding of it
        owner = owner_of.get(_storage(copied.target))
        if owner is None:
            raise unsupported(f"loading copies {copied.name} outside of all parameters")
        if copied.name in slots:
            raise unsupported(f"loading copies {copied.name} more than once")
        at = int(copied.target.storage_offset()) - int(parameters[owner].storage_offset())
        item = copied.target.element_size()
        slots[copied.name] = _slot(copied, shapes[copied.name], offsets[owner] + at * item)
    return Placement([slots[name] for name in sorted(slots)], offsets, end)


def trace(model: Any, shapes: Shapes, dtype: torch.dtype) -> list[_Copy]:
    """Return the copies that the model makes when it loads a checkpoint with these tensors.

    Raises: CallerError: FAILED_PRECONDITION: the model cannot load them.
    """
    copies: list[_Copy] = []
    device = next(model.parameters()).device

    def empty(name: str, shape: Sequence[int]) -> torch.Tensor:
        return _Traced(name, torch.empty(shape, dtype=dtype, device="meta"), copies, device)

    try:
        model.load_weights((name, empty(name, shape)) for name, shape in shapes.items())
    except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError) as error:
        raise unsupported(f"{type(error).__name__}: {error}") from error
    return copies


def _slot(copied: _Copy, shape: Sequence[int], offset: int) -> TensorSlot:
    size, start = list(copied.view.shape), _start(copied.view, shape)
    if not copied.target.is_contiguous():
        raise unsupported(f"{copied.name} is not contiguous in memory")
    if offset % 64:
        raise unsupported(f"{copied.name} would be at offset {offset}, not a multiple of 64 bytes")
    num_bytes = copied.target.numel() * copied.target.element_size()
    dtype = str(copied.target.dtype).removeprefix("torch.")
    slot = TensorSlot(copied.name, Role.WEIGHT, dtype, size, offset, num_bytes)
    if size == list(shape):
        return slot
    return TensorSlot(copied.name, Role.WEIGHT, dtype, size, offset, num_bytes, list(shape), start)


def _start(view: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Return the index of a view's first element in the whole tensor.

    Raises: CallerError: the view is not a slice.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if view.dim() != len(shape) or any(
        size > 1 and have != want
        for size, have, want in zip(view.shape, view.stride(), strides, strict=True)
    ):
        raise unsupported(f"a view {list(view.shape)} of {list(shape)} is not a slice")
    start, remaining = [], int(view.storage_offset())
    for stride in strides:
        start.append(remaining // stride)
        remaining %= stride
    return start


def _storage(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def unsupported(reason: str) -> CallerError:
    return CallerError(
        f"the vllm backend cannot run this model: {reason}",
        code=Code.FAILED_PRECONDITION,
        field="model.config",
        remedy="use the backend 'sampler', or another model",
    )


Place = Callable[[nn.Module, torch.dtype], None]
_place: Place | None = None
"""Places the parameters of the next model in a heap. It is a global because vLLM creates the loader
and passes it no arguments."""


def load_into(place_parameters: Place | None) -> None:
    """Set how the loader places a model's parameters. With None, no model may be loaded."""
    global _place  # noqa: PLW0603
    _place = place_parameters


@register_model_loader(LOAD_FORMAT)
class HeapLoader(BaseModelLoader):  # type: ignore[misc]
    """A loader that makes each parameter of a model a view of the heap, and loads no content."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: there are no files."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        assert _place is not None, "`load_into` comes first"
        _place(model, model_config.dtype)
        if next(model.parameters()).device.type == "cpu":
            _use_weights_in_place(model.modules())


def move(model: nn.Module, placement: Placement, memory: torch.Tensor, *, is_filled: bool) -> None:
    """Make each parameter a view of `memory`, uint8, which is at least as large as the placement.

    Args: is_filled: the memory holds its content already and must not be written to.
    """
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.element_size()
        at = placement.offsets[name]
        view = memory[at : at + num_bytes].view(parameter.dtype).view(parameter.shape)
        if not is_filled:
            view.copy_(parameter.data)  # writes the padding, which is zero
        parameter.data = view


def _use_weights_in_place(modules: Iterable[nn.Module]) -> None:
    """Keep vLLM from repacking the weights of linear layers into its own memory, as it does on
    CPUs."""

    def use(layer: Any) -> None:
        layer.cpu_linear = nn.functional.linear

    for module in modules:
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            method.process_weights_after_loading = use
