"""Device memory of a GPU, over an emulated driver that does nothing before it must.

What a real device does with the same calls, `make gpu-check` proves on a machine that has one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.contract.specs import DeviceKind
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.blockhash import digest_in_threads
from phaseloom.worker.cuda import driver as cuda
from phaseloom.worker.cuda import tensors
from phaseloom.worker.cuda.driver import CudaError, CudaUnavailable
from phaseloom.worker.cuda.memory import (
    CudaHeap,
    DeviceRange,
    PinnedMemory,
    check_parts,
    host_address,
)
from phaseloom.worker.cuda.tensors import memory_tensor
from phaseloom.worker.state import devicememory
from phaseloom.worker.state.heap import Heap
from tests.support.emulatedcuda import (
    ALL_PROTOTYPES,
    C_TYPES,
    GRANULARITY_BYTES,
    EmulatedDriver,
)

ROOT = Path(__file__).parents[4]
SIZE = 3 * GRANULARITY_BYTES // 2
MAPPED = 2 * GRANULARITY_BYTES
DEVICE_BYTES = 64 * MAPPED
"""Of a device that some tests fill."""


def extent(content: bytes) -> memoryview:
    memory = memoryview(mmap.mmap(-1, len(content)))
    memory[:] = content
    return memory


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver(DEVICE_BYTES)


@pytest.fixture(params=["emulated", "cuda"])
def memory(request: pytest.FixtureRequest) -> devicememory.DeviceMemory:
    """Both kinds, for what must be the same above the seam."""
    return Heap(SIZE) if request.param == "emulated" else CudaHeap(SIZE, EmulatedDriver())


def test_memory_comes_back_bit_by_bit_at_the_same_address(
    memory: devicememory.DeviceMemory,
) -> None:
    tensor = _bytes(memory)
    assert not tensor.any()
    content, address = os.urandom(SIZE), tensor.data_ptr()
    tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    host = extent(bytes(SIZE + 100))
    host[SIZE:] = b"behind" + bytes(94)
    devicememory.copy_out(memory, host)
    assert bytes(host) == content + b"behind" + bytes(94)
    memory.release()
    assert devicememory.resident_bytes(memory) == 0
    assert devicememory.copy_in(host, memory) == digest_in_threads(host)
    assert devicememory.resident_bytes(memory) >= SIZE
    assert _bytes(memory).data_ptr() == address
    assert bytes(tensor.numpy()) == content


def test_tensors_are_gathered_and_scattered(memory: devicememory.DeviceMemory) -> None:
    content = os.urandom(SIZE)
    _bytes(memory).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    here = [_slot("a", 128, 60), _slot("b", 192, 64), _slot("c", 4096, 4)]
    there = [_slot("a", 0, 60), _slot("b", 64, 64), _slot("c", 128, 4)]
    version = extent(b"\xff" * 192)
    digest = devicememory.gather(memory, version, list(zip(here, there, strict=True)))
    expected = content[128:188] + bytes(4) + content[192:256] + content[4096:4100] + bytes(60)
    assert bytes(version) == expected
    assert digest == digest_in_threads(version)
    version[:60] = b"\x07" * 60
    devicememory.scatter(version, memory, list(zip(there, here, strict=True)))
    after = bytes(_bytes(memory).numpy())
    assert after[128:188] == b"\x07" * 60
    assert (after[:128], after[192:]) == (content[:128], content[192:])


def test_release_gives_all_memory_back_and_a_load_takes_it_again(driver: EmulatedDriver) -> None:
    before = driver.free_bytes()
    heap = CudaHeap(SIZE, driver)
    assert before - driver.free_bytes() == MAPPED == heap.resident_bytes()
    heap.release()
    assert driver.free_bytes() == before
    heap.release()
    heap.copy_in(extent(bytes(SIZE)))
    assert before - driver.free_bytes() == MAPPED
    heap.close()
    assert driver.free_bytes() == before


def test_load_that_finds_no_memory_takes_none_and_can_be_tried_again(
    driver: EmulatedDriver,
) -> None:
    heap = CudaHeap(SIZE, driver)
    heap.release()
    other = DeviceRange(driver, driver.free_bytes() - GRANULARITY_BYTES)
    other.populate()
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        heap.copy_in(extent(bytes(SIZE)))
    assert heap.resident_bytes() == 0
    other.vacate()
    heap.copy_in(extent(b"\x01" * SIZE))
    assert driver.bytes_at(heap.address, SIZE) == b"\x01" * SIZE


def test_kernel_launched_after_a_load_began_sees_it(driver: EmulatedDriver) -> None:
    heap, seen, host = CudaHeap(SIZE, driver), [], extent(b"\x02" * SIZE)
    heap.start_copy_in(host)
    driver.launch(lambda: seen.append(driver.bytes_at(heap.address, SIZE)))
    driver.synchronize(cuda.DEFAULT_STREAM)
    assert seen == [b"\x02" * SIZE]


def test_kernel_launched_before_a_load_does_not_see_it(driver: EmulatedDriver) -> None:
    heap, seen = CudaHeap(SIZE, driver), []
    driver.launch(lambda: seen.append(driver.bytes_at(heap.address, SIZE)))
    heap.copy_in(extent(b"\x03" * SIZE))
    assert seen == [bytes(SIZE)]


def test_offload_waits_for_every_stream(driver: EmulatedDriver) -> None:
    """A backend may have worked on streams of its own."""
    heap, host, stream = CudaHeap(SIZE, driver), extent(bytes(SIZE)), driver.create_stream()
    _launch_write(driver, heap.address, b"late", cuda.DEFAULT_STREAM)
    _launch_write(driver, heap.address + 4, b"later", stream)
    heap.copy_out(host)
    assert bytes(host[:9]) == b"latelater"


def test_memory_is_not_taken_from_under_a_kernel(driver: EmulatedDriver) -> None:
    heap, stream = CudaHeap(SIZE, driver), driver.create_stream()
    _launch_write(driver, heap.address, b"x", stream)
    heap.release()  # the emulated driver refuses to unmap what is in use


def test_what_the_real_driver_refuses_is_refused(driver: EmulatedDriver) -> None:
    """The emulated one is worth as much as it is strict."""
    library, granule = driver.library, GRANULARITY_BYTES
    assert library.cuCtxSynchronize() == 201, "a thread without a context"
    handle, place = driver.create(granule), driver.reserve(2 * granule)
    heap, host = CudaHeap(SIZE, driver), extent(bytes(SIZE))
    source = host_address(host)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("whole granules", lambda: driver.create(granule + 1)),
        ("not reserved", lambda: driver.map(place + 4 * granule, granule, handle)),
        ("past what is reserved", lambda: driver.map(place + granule, MAPPED, handle)),
        ("larger than its memory", lambda: driver.map(place, MAPPED, handle)),
        ("mapped already", lambda: driver.map(heap.address, granule, handle)),
        ("no device memory", lambda: driver.copy_in(place, source, 1, 0)),
        ("no device memory", lambda: driver.copy_in(heap.address, source, MAPPED + 1, 0)),
        ("whole pages", lambda: driver.register(source + 8, mmap.PAGESIZE)),
        ("no host memory", lambda: driver.register(mmap.PAGESIZE, mmap.PAGESIZE)),
        ("not registered", lambda: driver.unregister(source)),
        ("no such stream", lambda: driver.synchronize(77)),
        ("with its memory", lambda: driver.unreserve(heap.address, MAPPED)),
    ]
    for why, call in refused:
        with pytest.raises(CudaError, match=why):
            call()
    driver.copy_in(heap.address, source, 1, 0)
    with pytest.raises(CudaError, match="work is under way"):
        driver.unmap(heap.address, MAPPED)


def test_private_mapping_of_a_file_is_not_pinned(driver: EmulatedDriver) -> None:
    """Its pages would become copies of their own, and take memory a second time."""
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        memory = memoryview(mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE))
    heap = CudaHeap(SIZE, driver)
    heap.pin(memory)
    assert not heap.is_pinned
    assert "would become copies" in heap.unpinned_because


def test_copies_run_in_any_thread(driver: EmulatedDriver) -> None:
    heap, host = CudaHeap(SIZE, driver), extent(b"\x04" * SIZE)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(heap.copy_in, host).result()
    assert driver.bytes_at(heap.address, SIZE) == bytes(host)


def test_host_copy_is_pinned_in_whole_pages_until_it_is_unpinned(driver: EmulatedDriver) -> None:
    heap, host = CudaHeap(SIZE, driver), memoryview(mmap.mmap(-1, SIZE + 100))
    devicememory.pin(heap, host)
    devicememory.pin(heap, host)
    pages = -(-len(host) // mmap.PAGESIZE) * mmap.PAGESIZE
    assert list(driver.pinned.values()) == [pages]
    assert (driver.num_pins, heap.is_pinned, heap.unpinned_because) == (1, True, "")
    devicememory.unpin(heap)
    devicememory.unpin(heap)
    assert driver.pinned == {}
    devicememory.pin(heap, host)
    heap.close()
    assert driver.pinned == {}


def test_copies_work_where_the_host_copy_cannot_be_pinned(driver: EmulatedDriver) -> None:
    heap, host = CudaHeap(SIZE, driver), extent(b"\x05" * SIZE)
    held = PinnedMemory(driver, host)
    heap.pin(host)
    assert not heap.is_pinned
    assert "ALREADY_REGISTERED" in heap.unpinned_because
    heap.copy_in(host)
    assert driver.bytes_at(heap.address, SIZE) == bytes(host)
    held.close()


def test_other_device_memory_is_copied_without_the_host(driver: EmulatedDriver) -> None:
    source, heap = CudaHeap(SIZE, driver), CudaHeap(SIZE, driver)
    source.copy_in(extent(b"\x06" * SIZE))
    shared = DeviceRange(driver, SIZE)
    shared.populate()
    adopted = DeviceRange(driver, SIZE)
    fd = shared.export()
    adopted.adopt(fd)
    os.close(fd)
    ctypes.memset(shared.address, 9, 10)
    heap.copy_from(adopted, [(0, 64, 10)])
    assert driver.bytes_at(heap.address + 63, 12) == b"\0" + b"\x09" * 10 + b"\0"
    shared.close()
    assert driver.bytes_at(adopted.address, 1) == b"\x09"
    adopted.close()


def test_memory_smaller_than_a_range_is_not_adopted(driver: EmulatedDriver) -> None:
    shared, large = DeviceRange(driver, 1), DeviceRange(driver, SIZE)
    shared.populate()
    fd, before = shared.export(), driver.free_bytes()
    with pytest.raises(CudaError, match="larger than its memory"):
        large.adopt(fd)
    os.close(fd)
    assert driver.free_bytes() == before
    assert not large.is_populated


def test_descriptor_of_something_else_is_not_taken(driver: EmulatedDriver) -> None:
    heap = CudaHeap(SIZE, driver)
    fd = os.memfd_create("a file", os.MFD_CLOEXEC)
    os.ftruncate(fd, MAPPED)
    before = driver.free_bytes()
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        heap.copy_shared_in(fd, SIZE, [(0, 0, SIZE)])
    os.close(fd)
    assert driver.free_bytes() == before
    assert driver.bytes_at(heap.address, SIZE) == bytes(SIZE)


def test_device_in_a_sandbox_that_exports_nothing_is_used_without_sharing() -> None:
    driver = EmulatedDriver(exports=False)
    assert not driver.can_share
    assert driver.free_bytes() == 2**30
    heap = CudaHeap(SIZE, driver)
    heap.copy_in(extent(b"\x08" * SIZE))
    with pytest.raises(CudaUnavailable, match="exports no descriptors"):
        heap.share(SIZE, [(0, 0, SIZE)])
    assert driver.bytes_at(heap.address, SIZE) == b"\x08" * SIZE


def test_heap_that_finds_no_memory_leaves_nothing_behind() -> None:
    driver = EmulatedDriver(GRANULARITY_BYTES)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        CudaHeap(SIZE, driver)
    assert driver.library.leftovers() == {"reserved": 0, "mapped": 0, "handles": 0, "streams": 0}


def test_scratch_memory_comes_and_goes_with_the_heap_and_is_never_copied(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "memory_tensor", lambda at, size, _: memory_tensor(at, size, None))
    before = driver.free_bytes()
    heap = CudaHeap(SIZE, driver, scratch_bytes=GRANULARITY_BYTES)
    assert before - driver.free_bytes() == MAPPED + GRANULARITY_BYTES == heap.resident_bytes()
    scratch = devicememory.scratch_tensor(heap)
    assert scratch.numel() == GRANULARITY_BYTES
    scratch.fill_(7)
    host = extent(b"\x01" * SIZE)
    heap.copy_out(host)
    assert bytes(host) == bytes(SIZE), "the heap alone is copied"
    heap.release()
    assert driver.free_bytes() == before
    heap.copy_in(extent(b"\x02" * SIZE))
    assert before - driver.free_bytes() == MAPPED + GRANULARITY_BYTES
    again = devicememory.scratch_tensor(heap)
    assert again.data_ptr() == scratch.data_ptr()
    again.fill_(9)
    assert driver.bytes_at(heap.address, SIZE) == b"\x02" * SIZE
    heap.close()
    assert driver.library.leftovers() == {"reserved": 0, "mapped": 0, "handles": 0, "streams": 0}


def test_heap_whose_scratch_memory_finds_no_room_takes_none(driver: EmulatedDriver) -> None:
    heap = CudaHeap(SIZE, driver, scratch_bytes=GRANULARITY_BYTES)
    heap.release()
    other = DeviceRange(driver, driver.free_bytes() - MAPPED)
    other.populate()
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        heap.copy_in(extent(bytes(SIZE)))
    assert heap.resident_bytes() == 0
    other.vacate()
    heap.copy_in(extent(bytes(SIZE)))
    assert heap.resident_bytes() == MAPPED + GRANULARITY_BYTES


def test_release_gives_back_what_torch_keeps_for_itself(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank is about to need the room, and cannot use what this process's torch has."""
    resident = []
    heap = CudaHeap(SIZE, driver)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: resident.append(heap.resident_bytes()))
    monkeypatch.setattr(tensors, "memory_tensor", lambda at, size, _: memory_tensor(at, size, None))
    heap.release()
    assert resident == [], "torch was not used"
    heap.copy_in(extent(bytes(SIZE)))
    assert heap.tensor().data_ptr() == heap.address
    heap.release()
    assert resident == [0]


@pytest.mark.parametrize("part", [(0, 0, 11), (1, 0, 10), (0, 1, 10), (-1, 0, 1), (0, 0, -1)])
def test_parts_out_of_bounds_are_refused(part: tuple[int, int, int]) -> None:
    check_parts([(0, 0, 10)], 10, 10)
    with pytest.raises(ValueError, match="bytes from"):
        check_parts([part], 10, 10)


def test_host_memory_of_another_size_is_refused(driver: EmulatedDriver) -> None:
    heap = CudaHeap(SIZE, driver)
    for copy in (heap.copy_in, heap.copy_out):
        with pytest.raises(ValueError, match="host memory must have"):
            copy(memoryview(bytearray(SIZE - 1)))


def test_tensor_over_memory_outlives_what_made_it() -> None:
    buffer = (ctypes.c_ubyte * 4096)(*range(8))
    view = memory_tensor(ctypes.addressof(buffer), 4096, None)[:8].view(torch.int32)
    assert view.data_ptr() == ctypes.addressof(buffer)
    assert view.tolist() == [0x03020100, 0x07060504]
    view[1] = 7
    assert buffer[4:8] == [7, 0, 0, 0]


def test_gpu_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-of-nobody.so.1")
    with pytest.raises(ResourceError, match=r"there is no CUDA driver: libcuda-of-nobody") as gone:
        devicememory.allocate(DeviceKind.CUDA, 0, SIZE)
    assert gone.value.info.code is Code.UNAVAILABLE
    assert isinstance(devicememory.allocate(DeviceKind.EMULATED, 0, SIZE), Heap)


def test_gpu_that_is_full_says_so(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devicememory, "load", lambda device: driver)
    with pytest.raises(ResourceError, match=r"OUT_OF_MEMORY") as full:
        devicememory.allocate(DeviceKind.CUDA, 0, 2**40)
    assert full.value.info.code is Code.RESOURCE_EXHAUSTED


def test_structures_have_the_sizes_and_offsets_of_the_drivers_header() -> None:
    """Of CUDA 13.0's cuda.h on 64-bit Linux, by a compiler."""
    properties = cuda.AllocationProperties
    assert ctypes.sizeof(properties) == 32
    assert [getattr(properties, name).offset for name, _ in properties._fields_] == [
        0,
        4,
        8,
        16,
        24,
    ]
    assert ctypes.sizeof(cuda.AccessDescription) == 12
    assert ctypes.sizeof(cuda.AllocationFlags) == 8


def test_functions_have_the_arguments_of_the_drivers_header() -> None:
    def shape(of: Any) -> tuple[int, bool, bool]:
        is_pointer = of is ctypes.c_void_p or hasattr(of, "contents")
        return ctypes.sizeof(of), is_pointer, not is_pointer and of(-1).value < 0

    declared = {name: [*map(shape, types)] for name, types in cuda._SIGNATURES.items()}
    assert declared == {
        name: [shape(C_TYPES[kind]) for kind in kinds] for name, kinds in ALL_PROTOTYPES.items()
    }


def test_fork_server_asks_torch_for_a_gpu_without_starting_the_driver() -> None:
    """What it imports may ask; the ranks that fork from it could use no GPU then."""
    name, value = cuda.QUIET_CHECK
    patched = "importlib.import_module = lambda _: seen.append(os.environ.get(name))"
    code = f"import importlib, os; name, seen = {name!r}, []; {patched}"
    preloads = "from phaseloom.worker.agent import preload; preload.preload(['fsdp'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {preloads}; print(*set(seen))"],
        env={key: kept for key, kept in os.environ.items() if key != name},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{value}\n"), done.stderr


@pytest.mark.gpu
def test_this_machines_gpu_keeps_every_promise() -> None:
    try:
        cuda.load()
    except CudaUnavailable as why:
        pytest.skip(str(why))
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu", "--sizes-mib", "64,1024"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _slot(name: str, offset: int, num_bytes: int) -> TensorSlot:
    return TensorSlot(name, Role.WEIGHT, "uint8", [num_bytes], offset, num_bytes)


def _bytes(memory: devicememory.DeviceMemory) -> torch.Tensor:
    """The emulated driver's memory is the host's."""
    if isinstance(memory, CudaHeap):
        return memory_tensor(memory.address, memory.num_bytes, None)
    return devicememory.as_tensor(memory)


def _launch_write(driver: EmulatedDriver, address: int, content: bytes, stream: int) -> None:
    def work() -> None:
        ctypes.memmove(address, content, len(content))

    driver.launch(work, stream)
