"""A model loader for vLLM that finds out where each parameter lands, and keeps it in our heap.

vLLM fuses, shards and pads parameters as it loads them, by rules of each architecture. This loader
has no such rules: it runs the model's own `load_weights` over tensors that hold nothing and note
which view of which of them is copied where (`trace`). What comes out is the slice of each
checkpoint tensor that this rank has, and its place in the heap. Then every parameter of the model
becomes a view of the heap, at an address that never moves.
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
    """The places of a model's parameters in a rank's heap."""

    slots: list[TensorSlot]
    """The tensors of the checkpoint, sorted by name; a slice where the rank does not have all of
    one."""
    offsets: Mapping[str, int]
    """The offset of each parameter of vLLM's model. The parts of one may be several slots, and
    padding."""
    num_bytes: int


@dataclass(frozen=True)
class _Copy:
    """One copy that `load_weights` made, from a view of a checkpoint tensor to a parameter's
    storage."""

    name: str
    view: torch.Tensor
    target: torch.Tensor


class _Traced(torch.Tensor):
    """A checkpoint tensor without content: its views are followed, and copies out of it are
    noted."""

    of: str
    """The name of the checkpoint tensor that this is a view of."""
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
            return first  # another dtype or device: the copy that follows would cast

        def plain(value: Any) -> Any:
            return value.meta if isinstance(value, cls) else value

        def traced(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not _is_same_storage(value, first.meta):
                raise unsupported(f"{first.of} is computed with ({func}), not only copied")
            return cls(first.of, value, first.copies, first.device)

        out = func(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
        return type(out)(map(traced, out)) if isinstance(out, tuple | list) else traced(out)


def place(model: nn.Module, shapes: Shapes, dtype: torch.dtype) -> Placement:
    """The places of the parameters of one of vLLM's models in a heap, and the slices that they are.

    Works on a model on the `meta` device too. No parameter's content is touched, except padding.

    Args:   shapes: the shapes of the whole checkpoint tensors.
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
            continue  # the padding is all that this rank has
        owner = owner_of.get(_storage(copied.target))
        if owner is None:
            raise unsupported(f"{copied.name} goes where no parameter is")
        if copied.name in slots:
            raise unsupported(f"{copied.name} goes to several places")
        at = int(copied.target.storage_offset()) - int(parameters[owner].storage_offset())
        item = copied.target.element_size()
        slots[copied.name] = _slot(copied, shapes[copied.name], offsets[owner] + at * item)
    return Placement([slots[name] for name in sorted(slots)], offsets, end)


def trace(model: Any, shapes: Shapes, dtype: torch.dtype) -> list[_Copy]:
    """The copies that the model makes when it loads a checkpoint of these tensors.

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
        raise unsupported(f"{copied.name} does not lie in one run")
    if offset % 64:
        raise unsupported(f"{copied.name} would lie at {offset}, no multiple of 64 bytes")
    num_bytes = copied.target.numel() * copied.target.element_size()
    dtype = str(copied.target.dtype).removeprefix("torch.")
    slot = TensorSlot(copied.name, Role.WEIGHT, dtype, size, offset, num_bytes)
    if size == list(shape):
        return slot
    return TensorSlot(copied.name, Role.WEIGHT, dtype, size, offset, num_bytes, list(shape), start)


def _start(view: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """The index, in the whole tensor, of a view's first element. Raises: CallerError: it is no
    slice."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if view.dim() != len(shape) or any(
        size > 1 and have != want
        for size, have, want in zip(view.shape, view.stride(), strides, strict=True)
    ):
        raise unsupported(f"a view {list(view.shape)} of {list(shape)} is no slice")
    start, remaining = [], int(view.storage_offset())
    for stride in strides:
        start.append(remaining // stride)
        remaining %= stride
    return start


def _storage(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)


def _is_same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return _storage(first) == _storage(second)


def unsupported(reason: str) -> CallerError:
    return CallerError(
        f"vLLM cannot run this model in a rank: {reason}",
        code=Code.FAILED_PRECONDITION,
        field="model.config",
        remedy="use the backend 'sampler', or another model",
    )


Place = Callable[[nn.Module, torch.dtype], None]
_place: Place | None = None
"""Places the parameters of the next model in a heap. It is a global because vLLM makes the loader,
and passes it nothing."""


def load_into(place_parameters: Place | None) -> None:
    """Set how the loader places a model's parameters; None: no model may be loaded."""
    global _place  # noqa: PLW0603
    _place = place_parameters


@register_model_loader(LOAD_FORMAT)
class HeapLoader(BaseModelLoader):  # type: ignore[misc]
    """A loader that makes each parameter of a model a view of the heap, and writes no content."""

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
    """Make each parameter a view of `memory`, uint8, which has the placement's size or more.

    Args: is_filled: whether the memory has its content, and may not be written to.
    """
    for name, parameter in model.named_parameters():
        num_bytes = parameter.numel() * parameter.element_size()
        at = placement.offsets[name]
        view = memory[at : at + num_bytes].view(parameter.dtype).view(parameter.shape)
        if not is_filled:
            view.copy_(parameter.data)  # padding is zero
        parameter.data = view


def _use_weights_in_place(modules: Iterable[nn.Module]) -> None:
    """Keep vLLM from packing the weights of linear layers into memory of its own, as it does on
    CPUs."""

    def use(layer: Any) -> None:
        layer.cpu_linear = nn.functional.linear

    for module in modules:
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
            method.process_weights_after_loading = use
