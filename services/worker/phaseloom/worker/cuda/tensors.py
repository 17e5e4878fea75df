"""A torch tensor over memory that torch did not allocate, through DLPack.

Host and device memory are wrapped the same way, so that tests need no device.
Source: the DLPack specification, `DLManagedTensor`.
"""

from __future__ import annotations

import ctypes

import torch

_CPU, _CUDA = 1, 2
_UNSIGNED = 1


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _TensorBlock(ctypes.Structure):
    """A DLPack tensor with its shape and strides in one malloc block, whose deleter is `free`."""

    _fields_ = (
        ("managed", _ManagedTensor),
        ("shape", ctypes.c_int64 * 1),
        ("strides", ctypes.c_int64 * 1),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def memory_tensor(address: int, num_bytes: int, device: int | None) -> torch.Tensor:
    """A tensor over the bytes at an address. The caller must keep the memory valid.

    Args: device: the number of the CUDA device; None: host memory.
    """
    block = _libc.malloc(ctypes.sizeof(_TensorBlock))
    if not block:
        raise MemoryError
    tensor_block = _TensorBlock.from_address(block)
    tensor_block.shape[0], tensor_block.strides[0] = num_bytes, 1
    tensor_block.managed = _ManagedTensor(
        _Tensor(
            data=address,
            device=_Device(_CPU, 0) if device is None else _Device(_CUDA, device),
            ndim=1,
            dtype=_DataType(_UNSIGNED, 8, 1),
            shape=block + _TensorBlock.shape.offset,
            strides=block + _TensorBlock.strides.offset,
            byte_offset=0,
        ),
        None,
        # torch calls this with the block when the last view is gone, possibly late during exit.
        ctypes.cast(_libc.free, ctypes.c_void_p).value,
    )
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(_new_capsule(block, b"dltensor", None))
    return tensor


def return_cached_memory() -> None:
    """Free the device memory that torch has cached and no tensor uses."""
    torch.cuda.empty_cache()
