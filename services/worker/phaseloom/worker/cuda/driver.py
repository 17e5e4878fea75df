"""Checked ctypes calls of the CUDA driver for managing device memory.

Torch's allocator can neither free memory while keeping its address nor export it to another process
as a descriptor; the driver's virtual memory calls can. This module also makes streams and events,
so that everything except the tensor view works, and is tested, without torch.

Names, types and values follow `cuda.h` (CUDA 13.0). Functions with a `_v2` variant are called by
that name, which the header's macros hide. Never call `load` in a process that forks afterwards.
Source: CUDA Driver API, "Virtual Memory Management" and "Memory Management".
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from typing import Any, Final, Protocol

log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"

DEFAULT_STREAM = 0
"""The legacy default stream, which torch uses too."""

_Pointer = ctypes.c_uint64
"""The type CUdeviceptr. A handle of physical memory has the same type."""

_PINNED_ALLOCATION = 1
_POSIX_DESCRIPTOR = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_MINIMUM_GRANULARITY = 0
_REGISTER_PORTABLE = 1
_STREAM_NON_BLOCKING = 1
_EVENT_WITHOUT_TIMING = 2
_HAS_VIRTUAL_MEMORY = 102
_HAS_DESCRIPTORS = 103

_NO_DEVICE = 100
_STUB_LIBRARY = 34
_OUT_OF_MEMORY = 2

QUIET_CHECK = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""Environment variable and value for processes that fork. It makes torch detect a GPU without
initialising the driver, which a child cannot use once its parent has initialised it."""


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", Location), ("flags", c_int))


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(_Pointer), c_size_t, c_size_t, _Pointer, ctypes.c_uint64),
    "cuMemAddressFree": (_Pointer, c_size_t),
    "cuMemCreate": (
        POINTER(_Pointer),
        c_size_t,
        POINTER(AllocationProperties),
        ctypes.c_uint64,
    ),
    "cuMemRelease": (_Pointer,),
    "cuMemMap": (_Pointer, c_size_t, c_size_t, _Pointer, ctypes.c_uint64),
    "cuMemUnmap": (_Pointer, c_size_t),
    "cuMemSetAccess": (_Pointer, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, _Pointer, c_int, ctypes.c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(_Pointer), c_void_p, c_int),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_Pointer, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _Pointer, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (_Pointer, _Pointer, c_size_t, c_void_p),
    "cuMemsetD8Async": (_Pointer, c_ubyte, c_size_t, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}
"""The argument types of each function. Every function returns a CUresult, an int."""


class CudaError(RuntimeError):
    """A driver call failed. Side effects are limited to those that the driver documents."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class CudaUnavailable(RuntimeError):
    """No driver or no such device, or the device lacks a feature; the message says which."""


class Driver(Protocol):
    """Driver calls for one device in its primary context, which torch shares. Raises: CudaError.

    Addresses, streams, events and handles of physical memory are plain integers.
    """

    device: int
    granularity_bytes: int
    """Sizes of physical memory are multiples of this."""
    can_share: bool
    """Whether physical memory can be exported to another process."""

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range without memory."""
        ...

    def unreserve(self, address: int, num_bytes: int) -> None: ...

    def create(self, num_bytes: int) -> int:
        """Allocate physical memory with undefined content and return its handle."""
        ...

    def release(self, handle: int) -> None:
        """Drop a handle. The memory is freed when no process maps it or holds a handle."""
        ...

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map the whole memory, readable and writable by this device."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None: ...

    def export(self, handle: int) -> int:
        """Return a descriptor that keeps the memory alive. The caller closes it."""
        ...

    def import_(self, fd: int) -> int:
        """Return a handle of another process's memory. The caller still owns `fd`."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory. Both ends must be page-aligned."""
        ...

    def unregister(self, address: int) -> None: ...

    def create_stream(self) -> int:
        """Create a stream that does not synchronise implicitly with the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Wait until all work in the stream is done."""
        ...

    def synchronize_all(self) -> None:
        """Wait until all work that this process submitted to the device is done."""
        ...

    def order(self, first: int, then: int) -> None:
        """Make later work in the stream `then` wait for the work now in the stream `first`."""
        ...

    def copy_in(self, address: int, host_address: int, num_bytes: int, stream: int) -> None: ...

    def copy_out(self, host_address: int, address: int, num_bytes: int, stream: int) -> None: ...

    def copy_within(self, target: int, source: int, num_bytes: int, stream: int) -> None: ...

    def clear(self, address: int, num_bytes: int, stream: int) -> None: ...

    def free_bytes(self) -> int:
        """Free bytes of the whole device, including what other processes could allocate."""
        ...


class Library(Protocol):
    """The driver's functions as ctypes exposes them."""

    def __getattr__(self, name: str) -> Any: ...


class LibCuda:
    """The `Driver` of this machine.

    Every call pushes the context first, because torch makes it current only in its own threads.
    """

    def __init__(self, library: Library, device: int) -> None:
        """Initialise the driver for a device. Raises: CudaUnavailable, CudaError."""
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = c_int
        try:
            self._call("cuInit", 0)
        except CudaError as error:
            if error.code == _NO_DEVICE:
                raise CudaUnavailable("the CUDA driver finds no device") from error
            if error.code == _STUB_LIBRARY:
                raise CudaUnavailable(f"{LIBRARY} is a stub to link with") from error
            raise
        count, ordinal, context = c_int(), c_int(), c_void_p()
        self._call("cuDeviceGetCount", byref(count))
        if not 0 <= device < count.value:
            raise CudaUnavailable(f"there is no device {device}: the driver has {count.value}")
        self._call("cuDeviceGet", byref(ordinal), device)
        self.device = device
        self._ordinal = ordinal.value
        if not self._attribute(_HAS_VIRTUAL_MEMORY):
            raise CudaUnavailable(f"device {device} has no virtual memory management")
        # Never released: torch shares the context, and both live as long as the process.
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._ordinal)
        self._context = context
        self.can_share = bool(self._attribute(_HAS_DESCRIPTORS))
        granularity = c_size_t()
        self._call_in_context(
            "cuMemGetAllocationGranularity",
            byref(granularity),
            byref(self._properties()),
            _MINIMUM_GRANULARITY,
        )
        self.granularity_bytes = granularity.value
        self.can_share = self.can_share and self._exports()

    def reserve(self, num_bytes: int) -> int:
        address = _Pointer()
        self._call_in_context("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def unreserve(self, address: int, num_bytes: int) -> None:
        self._call_in_context("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> int:
        handle = _Pointer()
        self._call_in_context("cuMemCreate", byref(handle), num_bytes, byref(self._properties()), 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call_in_context("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call_in_context("cuMemMap", address, num_bytes, 0, handle, 0)
        access = AccessDescription(Location(_ON_DEVICE, self._ordinal), _READ_WRITE)
        try:
            self._call_in_context("cuMemSetAccess", address, num_bytes, byref(access), 1)
        except CudaError:
            self._call_in_context("cuMemUnmap", address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call_in_context("cuMemUnmap", address, num_bytes)

    def export(self, handle: int) -> int:
        fd = c_int(-1)
        self._call_in_context(
            "cuMemExportToShareableHandle", byref(fd), handle, _POSIX_DESCRIPTOR, 0
        )
        return fd.value

    def import_(self, fd: int) -> int:
        handle = _Pointer()
        # The API passes the descriptor itself in the pointer argument.
        self._call_in_context(
            "cuMemImportFromShareableHandle", byref(handle), fd, _POSIX_DESCRIPTOR
        )
        return handle.value

    def register(self, address: int, num_bytes: int) -> None:
        self._call_in_context("cuMemHostRegister_v2", address, num_bytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        self._call_in_context("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        stream = c_void_p()
        self._call_in_context("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        self._call_in_context("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        self._call_in_context("cuStreamSynchronize", stream)

    def synchronize_all(self) -> None:
        self._call_in_context("cuCtxSynchronize")

    def order(self, first: int, then: int) -> None:
        event = c_void_p()
        with self._current():
            self._call("cuEventCreate", byref(event), _EVENT_WITHOUT_TIMING)
            try:
                self._call("cuEventRecord", event, first)
                self._call("cuStreamWaitEvent", then, event, 0)
            finally:
                # The driver keeps the event until its waiters are done.
                self._call("cuEventDestroy_v2", event)

    def copy_in(self, address: int, host_address: int, num_bytes: int, stream: int) -> None:
        self._call_in_context("cuMemcpyHtoDAsync_v2", address, host_address, num_bytes, stream)

    def copy_out(self, host_address: int, address: int, num_bytes: int, stream: int) -> None:
        self._call_in_context("cuMemcpyDtoHAsync_v2", host_address, address, num_bytes, stream)

    def copy_within(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call_in_context("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        self._call_in_context("cuMemsetD8Async", address, 0, num_bytes, stream)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call_in_context("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def _call_in_context(self, name: str, *arguments: Any) -> None:
        with self._current():
            self._call(name, *arguments)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            before = c_void_p()
            self._call("cuCtxPopCurrent_v2", byref(before))

    def _exports(self) -> bool:
        """Try whether memory can be exported, because a sandbox may forbid what the device
        supports.

        A full device has no memory for the attempt; then assume that exporting works.
        """
        try:
            handle = self.create(self.granularity_bytes)
        except CudaError as error:
            return error.is_out_of_memory
        try:
            os.close(self.export(handle))
        except CudaError as error:
            log.warning("device memory cannot be shared: %s", error)
            return False
        finally:
            self.release(handle)
        return True

    def _properties(self) -> AllocationProperties:
        return AllocationProperties(
            type=_PINNED_ALLOCATION,
            requested_handle_types=_POSIX_DESCRIPTOR if self.can_share else 0,
            location=Location(_ON_DEVICE, self._ordinal),
        )

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, self._ordinal)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            error_name = self._error_text("cuGetErrorName", code)
            raise CudaError(name, code, error_name, self._error_text("cuGetErrorString", code))

    def _error_text(self, name: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, name)(code, byref(text))
        return (text.value or b"unknown").decode(errors="replace")


def load(device: int = 0) -> LibCuda:
    """Load this machine's driver. Raises: CudaUnavailable: no usable driver; CudaError."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaUnavailable(f"there is no CUDA driver: {error}") from error
    try:
        return LibCuda(library, device)
    except AttributeError as error:
        raise CudaUnavailable(f"the CUDA driver is too old: {error}") from error
