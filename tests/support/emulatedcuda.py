"""A CUDA driver over this machine's memory, as lazy as a GPU may be and as strict as the real one.

It stands where `libcuda` does: C functions with the prototypes of `cuda.h`, written down here once
more, reading structures byte by byte. So the arguments' types, the structures' layout and the
context of each call are tried too.

What enters a stream runs only when somebody waits for it, or for what is ordered after it. So a
copy that nobody ordered or waited for is not there, which a real device would often forgive.
Descriptors of its memory work between processes.

It refuses what the real one refuses: a call from a thread without a current context, sizes that are
no whole granules, addresses that are not reserved, not mapped or not accessible, a mapping larger
than its memory, host memory that is registered already or not there. And what the real one leaves
undefined: memory that is unmapped while work is under way, host memory that is unmapped while it is
registered, and registering a private mapping of a file, whose pages would become copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from phaseloom.worker.cuda.driver import LibCuda

GRANULARITY_BYTES = 64 * 1024
ALL_PROTOTYPES: Final = {
    "cuInit": "u",
    "cuDeviceGetCount": "p",
    "cuDeviceGet": "pi",
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuCtxSynchronize": "",
    "cuMemGetInfo_v2": "pp",
    "cuMemGetAllocationGranularity": "ppi",
    "cuMemAddressReserve": "pzzdd",
    "cuMemAddressFree": "dz",
    "cuMemCreate": "pzpd",
    "cuMemRelease": "d",
    "cuMemMap": "dzzdd",
    "cuMemUnmap": "dz",
    "cuMemSetAccess": "dzpz",
    "cuMemExportToShareableHandle": "pdid",
    "cuMemImportFromShareableHandle": "ppi",
    "cuMemHostRegister_v2": "pzu",
    "cuMemHostUnregister": "p",
    "cuStreamCreate": "pu",
    "cuStreamDestroy_v2": "p",
    "cuStreamSynchronize": "p",
    "cuStreamWaitEvent": "ppu",
    "cuEventCreate": "pu",
    "cuEventRecord": "pp",
    "cuEventDestroy_v2": "p",
    "cuMemcpyHtoDAsync_v2": "dpzp",
    "cuMemcpyDtoHAsync_v2": "pdzp",
    "cuMemcpyDtoDAsync_v2": "ddzp",
    "cuMemsetD8Async": "dbzp",
    "cuGetErrorName": "ip",
    "cuGetErrorString": "ip",
}
"""Arguments: p a pointer, also one that stands for a stream, an event or a context; d 64 bits
without a sign; z size_t; i int, also an enumeration; u unsigned int; b unsigned char."""
C_TYPES: Final[dict[str, Any]] = {
    "p": ctypes.c_void_p,
    "d": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "b": ctypes.c_ubyte,
}

_INVALID_VALUE, _OUT_OF_MEMORY, _NOT_INITIALIZED, _INVALID_CONTEXT = 1, 2, 3, 201
_INVALID_HANDLE, _LAUNCH_FAILED, _NOT_SUPPORTED = 400, 719, 801
_REGISTERED, _NOT_REGISTERED, _UNKNOWN = 712, 713, 999
_NAMES = {
    _INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
    _OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    _NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED",
    _INVALID_CONTEXT: "CUDA_ERROR_INVALID_CONTEXT",
    _INVALID_HANDLE: "CUDA_ERROR_INVALID_HANDLE",
    _REGISTERED: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    _NOT_REGISTERED: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    _LAUNCH_FAILED: "CUDA_ERROR_LAUNCH_FAILED",
    _NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED",
    _UNKNOWN: "CUDA_ERROR_UNKNOWN",
}
_ATTRIBUTES = {102: 1, 103: 1}
_CONTEXT = 0xC0DE
_WITHOUT_CONTEXT = frozenset(
    {
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuGetErrorName",
        "cuGetErrorString",
    }
)
_LEGACY_STREAM = 1
"""Another name of stream 0."""
_MEMORY_NAME = "emulated device memory"
_MAP_FIXED = 0x10
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Refused(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


def _require(holds: bool, why: str, code: int = _INVALID_VALUE) -> None:
    if not holds:
        raise _Refused(code, why)


@dataclass
class _Stream:
    work: list[Callable[[], None]] = field(default_factory=list)
    num_done: int = 0

    def run(self, count: int) -> None:
        """The first `count` of what has ever entered it."""
        while self.num_done < count:
            self.num_done += 1
            self.work[self.num_done - 1]()


@dataclass
class _Mapped:
    num_bytes: int
    fd: int
    is_accessible: bool = False


@dataclass
class _Handle:
    fd: int
    can_export: bool


class EmulatedLibrary:
    """What `ctypes.CDLL("libcuda.so.1")` would be."""

    def __init__(self, memory_bytes: int) -> None:
        self.pinned: dict[int, int] = {}
        """address → bytes"""
        self.num_pins = 0
        self.num_bytes_in = 0
        """Copied from the host, ever."""
        self.exports = True
        """Whether it gives descriptors, as not every sandbox lets the real one do."""
        self._functions: dict[str, Any] = {}
        self._memory_bytes = memory_bytes
        self._taken: dict[int, tuple[int, int]] = {}
        """Physical memory by inode: its bytes, and how many handles and mappings hold it."""
        self._handles: dict[int, _Handle] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, _Mapped] = {}
        self._streams = {0: _Stream()}
        self._events: dict[int, tuple[_Stream, int] | None] = {}
        self._contexts = threading.local()
        self._is_initialized = False
        self._said: dict[int, bytes] = {}
        """What the error codes meant when they were given last."""
        self._last = 1000
        for name, arguments in ALL_PROTOTYPES.items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *(C_TYPES[kind] for kind in arguments))
            self._functions[name] = prototype(partial(self._call, name))

    def __getattr__(self, name: str) -> Any:
        """As of a library: a function of that name."""
        if name in ALL_PROTOTYPES:
            return self._functions[name]
        raise AttributeError(name)

    def launch(self, kernel: Callable[[], None], stream: int) -> None:
        self._stream(stream).work.append(kernel)

    def free_bytes(self) -> int:
        return self._memory_bytes - sum(num_bytes for num_bytes, _ in self._taken.values())

    def leftovers(self) -> dict[str, int]:
        """What was not given back, the default stream apart."""
        return {
            "reserved": len(self._reserved),
            "mapped": len(self._mapped),
            "handles": len(self._handles),
            "streams": len(self._streams) - 1,
        }

    # --- the frame of every function ---

    def _call(self, name: str, *arguments: int | None) -> int:
        """Nothing may be raised through C: what goes wrong is a code, and what it says."""
        numbers = [argument or 0 for argument in arguments]
        try:
            if name not in {"cuInit", "cuGetErrorName", "cuGetErrorString"}:
                _require(self._is_initialized, "cuInit was not called", _NOT_INITIALIZED)
            if name not in _WITHOUT_CONTEXT:
                _require(bool(self._stack()), f"{name} without a context", _INVALID_CONTEXT)
            getattr(self, f"_{name}")(*numbers)
        except _Refused as refusal:
            self._said[refusal.code] = str(refusal).encode()
            return refusal.code
        except Exception as error:
            self._said[_UNKNOWN] = f"of the emulation: {error!r}".encode()
            return _UNKNOWN
        return 0

    def _stack(self) -> list[int]:
        """The contexts that this thread has made current."""
        if not hasattr(self._contexts, "stack"):
            self._contexts.stack = []
        stack: list[int] = self._contexts.stack
        return stack

    def _cuGetErrorName(self, code: int, text: int) -> None:
        self._say(text, _NAMES[code].encode())

    def _cuGetErrorString(self, code: int, text: int) -> None:
        self._say(text, self._said[code])

    def _say(self, target: int, text: bytes) -> None:
        self._said[-target] = text
        ctypes.c_char_p.from_address(target).value = self._said[-target]

    # --- the device and its context ---

    def _cuInit(self, flags: int) -> None:
        _require(flags == 0, "flags")
        self._is_initialized = True

    def _cuDeviceGetCount(self, count: int) -> None:
        _put_int(count, 1)

    def _cuDeviceGet(self, device: int, ordinal: int) -> None:
        _require(ordinal == 0, "no such device")
        _put_int(device, 0)

    def _cuDeviceGetAttribute(self, value: int, attribute: int, device: int) -> None:
        _require(device == 0 and attribute in _ATTRIBUTES, "attribute")
        _put_int(value, _ATTRIBUTES[attribute])

    def _cuDevicePrimaryCtxRetain(self, context: int, device: int) -> None:
        _require(device == 0, "no such device")
        _put(context, _CONTEXT)

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        _require(context == _CONTEXT, "no such context", _INVALID_CONTEXT)
        self._stack().append(context)

    def _cuCtxPopCurrent_v2(self, context: int) -> None:
        _put(context, self._stack().pop())

    def _cuCtxSynchronize(self) -> None:
        for stream in self._streams.values():
            stream.run(len(stream.work))

    def _cuMemGetInfo_v2(self, free: int, total: int) -> None:
        _put(free, self.free_bytes())
        _put(total, self._memory_bytes)

    # --- virtual memory ---

    def _cuMemGetAllocationGranularity(self, granularity: int, prop: int, option: int) -> None:
        _require(option in {0, 1}, "option")
        _check_properties(prop)
        _put(granularity, GRANULARITY_BYTES)

    def _cuMemAddressReserve(
        self, address: int, num_bytes: int, alignment: int, wanted: int, flags: int
    ) -> None:
        _check_whole(num_bytes)
        _require(alignment == wanted == flags == 0, "only any address")
        placed = self._place(0, num_bytes, _NO_ACCESS, -1)
        self._reserved[placed] = num_bytes
        _put(address, placed)

    def _cuMemAddressFree(self, address: int, num_bytes: int) -> None:
        _require(self._reserved.get(address) == num_bytes, "not what was reserved")
        _require(not self._mapped_within(address, num_bytes), "freed with its memory")
        del self._reserved[address]
        assert _libc.munmap(address, num_bytes) == 0

    def _cuMemCreate(self, handle: int, num_bytes: int, prop: int, flags: int) -> None:
        _require(flags == 0, "flags")
        _check_whole(num_bytes)
        can_export = _check_properties(prop)
        _require(num_bytes <= self.free_bytes(), "out of memory", _OUT_OF_MEMORY)
        fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, b"\xa5" * num_bytes, 0)
        _put(handle, self._keep(fd, can_export))

    def _cuMemRelease(self, handle: int) -> None:
        _require(handle in self._handles, "no such handle")
        self._let_go(self._handles.pop(handle).fd)

    def _cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> None:
        _require(offset == flags == 0, "offset or flags")
        _require(handle in self._handles, "no such handle")
        _check_whole(num_bytes)
        start, size = self._reservation(address)
        _require((address - start) % GRANULARITY_BYTES == 0, "no whole granules")
        _require(address + num_bytes <= start + size, "past what is reserved")
        _require(not self._mapped_within(address, num_bytes), "mapped already")
        fd = self._handles[handle].fd
        _require(num_bytes <= os.fstat(fd).st_size, "larger than its memory")
        self._place(address, num_bytes, _NO_ACCESS, fd)
        self._mapped[address] = _Mapped(num_bytes, self._hold(os.dup(fd)))

    def _cuMemSetAccess(self, address: int, num_bytes: int, access: int, count: int) -> None:
        description = struct.unpack("=iii", ctypes.string_at(access, 12))
        _require((count, *description) == (1, 1, 0, 3), "not for this device to read and write")
        mapped = self._whole_mapping(address, num_bytes)
        self._place(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mapped.fd)
        mapped.is_accessible = True

    def _cuMemUnmap(self, address: int, num_bytes: int) -> None:
        mapped = self._whole_mapping(address, num_bytes)
        is_idle = all(s.num_done == len(s.work) for s in self._streams.values())
        _require(is_idle, "unmapped while work is under way", _LAUNCH_FAILED)
        del self._mapped[address]
        self._place(address, num_bytes, _NO_ACCESS, -1)
        self._let_go(mapped.fd)

    def _cuMemExportToShareableHandle(
        self, target: int, handle: int, handle_type: int, flags: int
    ) -> None:
        _require(self.exports, "operation not supported", _NOT_SUPPORTED)
        _require(handle_type == 1 and flags == 0, "type or flags")
        _require(handle in self._handles, "no such handle")
        _require(self._handles[handle].can_export, "it was not made to be exported")
        _put_int(target, os.dup(self._handles[handle].fd))

    def _cuMemImportFromShareableHandle(self, handle: int, fd: int, handle_type: int) -> None:
        _require(handle_type == 1, "type")
        link = Path(f"/proc/self/fd/{fd}")
        is_memory = link.is_symlink() and _MEMORY_NAME in os.readlink(link)
        _require(is_memory, "a descriptor of something else")
        _put(handle, self._keep(os.dup(fd), can_export=True))

    # --- host memory ---

    def _cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> None:
        _require(flags == 1, "flags")
        _require(num_bytes > 0, "nothing")
        _require(address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0, "no whole pages")
        for other, size in self.pinned.items():
            is_apart = other + size <= address or address + num_bytes <= other
            _require(is_apart, "registered already", _REGISTERED)
        _check_host_memory(address, num_bytes)
        self.pinned[address] = num_bytes
        self.num_pins += 1

    def _cuMemHostUnregister(self, address: int) -> None:
        _require(address in self.pinned, "not registered", _NOT_REGISTERED)
        num_bytes = self.pinned.pop(address)
        _check_host_memory(address, num_bytes)

    # --- streams and what enters them ---

    def _cuStreamCreate(self, stream: int, flags: int) -> None:
        _require(flags == 1, "only streams that do not wait for the default one")
        number = self._next()
        self._streams[number] = _Stream()
        _put(stream, number)

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        _require(stream > _LEGACY_STREAM, "the default stream", _INVALID_HANDLE)
        self._cuStreamSynchronize(stream)
        del self._streams[stream]

    def _cuStreamSynchronize(self, stream: int) -> None:
        waited = self._stream(stream)
        waited.run(len(waited.work))

    def _cuEventCreate(self, event: int, flags: int) -> None:
        _require(flags == 2, "only events without a time")
        number = self._next()
        self._events[number] = None
        _put(event, number)

    def _cuEventRecord(self, event: int, stream: int) -> None:
        _require(event in self._events, "no such event", _INVALID_HANDLE)
        source = self._stream(stream)
        self._events[event] = (source, len(source.work))

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        _require(flags == 0, "flags")
        _require(event in self._events, "no such event", _INVALID_HANDLE)
        recorded = self._events[event]
        if recorded is not None:
            source, count = recorded
            self.launch(lambda: source.run(count), stream)

    def _cuEventDestroy_v2(self, event: int) -> None:
        _require(event in self._events, "no such event", _INVALID_HANDLE)
        del self._events[event]

    def _cuMemcpyHtoDAsync_v2(self, target: int, source: int, size: int, stream: int) -> None:
        self._check_device_memory(target, size)
        self.num_bytes_in += size
        self._move(target, source, size, stream)

    def _cuMemcpyDtoHAsync_v2(self, target: int, source: int, size: int, stream: int) -> None:
        self._check_device_memory(source, size)
        self._move(target, source, size, stream)

    def _cuMemcpyDtoDAsync_v2(self, target: int, source: int, size: int, stream: int) -> None:
        self._check_device_memory(target, size)
        self._check_device_memory(source, size)
        self._move(target, source, size, stream)

    def _cuMemsetD8Async(self, target: int, value: int, size: int, stream: int) -> None:
        self._check_device_memory(target, size)

        def work() -> None:
            ctypes.memset(target, value, size)

        self.launch(work, stream)

    def _move(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        def work() -> None:
            ctypes.memmove(target, source, num_bytes)

        self.launch(work, stream)

    # --- books ---

    def _stream(self, stream: int) -> _Stream:
        number = 0 if stream == _LEGACY_STREAM else stream
        _require(number in self._streams, "no such stream", _INVALID_HANDLE)
        return self._streams[number]

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _keep(self, fd: int, can_export: bool) -> int:
        number = self._next()
        self._handles[number] = _Handle(self._hold(fd), can_export)
        return number

    def _hold(self, fd: int) -> int:
        status = os.fstat(fd)
        _, num_holders = self._taken.get(status.st_ino, (0, 0))
        self._taken[status.st_ino] = (status.st_size, num_holders + 1)
        return fd

    def _let_go(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        num_bytes, num_holders = self._taken.pop(inode)
        if num_holders > 1:
            self._taken[inode] = (num_bytes, num_holders - 1)
        os.close(fd)

    def _reservation(self, address: int) -> tuple[int, int]:
        for start, num_bytes in self._reserved.items():
            if start <= address < start + num_bytes:
                return start, num_bytes
        raise _Refused(_INVALID_VALUE, "not reserved")

    def _mapped_within(self, address: int, num_bytes: int) -> bool:
        return any(
            start < address + num_bytes and address < start + mapped.num_bytes
            for start, mapped in self._mapped.items()
        )

    def _whole_mapping(self, address: int, num_bytes: int) -> _Mapped:
        mapped = self._mapped.get(address)
        if mapped is None or mapped.num_bytes != num_bytes:
            raise _Refused(_INVALID_VALUE, "not what was mapped")
        return mapped

    def _check_device_memory(self, address: int, num_bytes: int) -> None:
        for start, mapped in self._mapped.items():
            if start <= address and address + num_bytes <= start + mapped.num_bytes:
                _require(mapped.is_accessible, "no access was given")
                return
        raise _Refused(_INVALID_VALUE, "no device memory is there")

    def _place(self, address: int, num_bytes: int, access: int, fd: int) -> int:
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        fixed = _MAP_FIXED if address else 0
        placed = _libc.mmap(address, num_bytes, access, flags | fixed, fd, 0)
        assert placed not in {None, ctypes.c_void_p(-1).value}, os.strerror(ctypes.get_errno())
        return int(placed)


class EmulatedDriver(LibCuda):
    """The product's own driver over the emulated library, and what a test does beside it."""

    def __init__(self, memory_bytes: int = 2**30, *, exports: bool = True) -> None:
        self.library = EmulatedLibrary(memory_bytes)
        self.library.exports = exports
        super().__init__(self.library, 0)

    def launch(self, kernel: Callable[[], None], stream: int = 0) -> None:
        self.library.launch(kernel, stream)

    def bytes_at(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    @property
    def pinned(self) -> dict[int, int]:
        return self.library.pinned

    @property
    def num_pins(self) -> int:
        return self.library.num_pins

    @property
    def num_bytes_in(self) -> int:
        return self.library.num_bytes_in


def _put_int(address: int, value: int) -> None:
    ctypes.c_int.from_address(address).value = value


def _put(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _check_whole(num_bytes: int) -> None:
    _require(num_bytes > 0 and num_bytes % GRANULARITY_BYTES == 0, "no whole granules")


def _check_properties(prop: int) -> bool:
    """Returns: whether what is made so can be exported."""
    kind, handle_types, location, device, windows, compression, rdma, usage, reserved = (
        struct.unpack("=iiiiQBBHI", ctypes.string_at(prop, 32))
    )
    _require((kind, location, device) == (1, 1, 0), "not memory of this device")
    _require(handle_types in {0, 1}, "handle types")
    _require(windows == compression == rdma == usage == reserved == 0, "what must be zero")
    return bool(handle_types)


def _check_host_memory(address: int, num_bytes: int) -> None:
    """That all of it is mapped, to be written, and no private mapping of a file."""
    end = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode = line.split(maxsplit=5)[:5]
        start, stop = (int(part, 16) for part in place.split("-"))
        if start <= end < stop and end < address + num_bytes:
            _require("w" in access, "read-only host memory")
            _require("s" in access or inode == "0", "its pages would become copies")
            end = stop
    _require(end >= address + num_bytes, "no host memory is there", _LAUNCH_FAILED)
