"""Proofs that a GPU's memory keeps what `cuda.memory` promises, on a machine that has one.

Each function proves one thing and raises `Disproved` where it does not hold. They need torch and
the standard library only. `make gpu-check` runs them and prints what they found.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu.patterns import fill, num_differing
from loadtest.gpu.peer import hear, in_fork
from phaseloom.worker.backends.optimizer import Hyperparameters, Moments, take_step
from phaseloom.worker.cuda.driver import QUIET_CHECK, Driver
from phaseloom.worker.cuda.memory import CudaHeap, DeviceRange, PinnedMemory
from phaseloom.worker.cuda.tensors import memory_tensor

MiB = 1024 * 1024
TURNS = 5
RACES = 40
PEER_TIMEOUT_S = 60.0
SETTLED_WITHIN_S = 10.0
"""Seconds for the driver to clean up after a process that the system has ended already."""
SLACK_BYTES = 64 * MiB
"""The bytes that the driver itself may take or give back meanwhile."""
PRELOADED = (
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "loadtest.gpu.peer",
)
"""The modules that a rank's fork server has imported; those that are not installed are passed
over."""


class Disproved(Exception):
    """A claim does not hold; the message says what was seen instead."""


class Skipped(Exception):
    """A claim cannot be tried here; the message says why."""


@dataclass(frozen=True)
class Found:
    """The figures of a proof."""

    detail: str
    figures: dict[str, float] = field(default_factory=dict)


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Disproved(otherwise)


def round_trip(driver: Driver, num_bytes: int) -> Found:
    """An offload comes back bit by bit, its memory was free meanwhile, and nothing moved."""
    _check_room(driver, 3 * num_bytes + 3 * SLACK_BYTES, 2 * num_bytes + SLACK_BYTES)
    with with_heap(driver, num_bytes) as (heap, extent):
        memory, address = heap.tensor(), heap.tensor().data_ptr()
        fill(memory, 1)
        heap.copy_out(extent)
        host = torch.frombuffer(extent, dtype=torch.uint8)
        require(num_differing(host, 1) == 0, "the host copy differs")
        _release_verified(driver, heap)
        _scribble(num_bytes)
        host_bits = num_differing(host, 1)
        require(host_bits == 0, f"{host_bits} words of the host copy changed in the meantime")
        heap.copy_in(extent)
        require(memory.data_ptr() == address == heap.address, "the address has changed")
        differing = num_differing(memory, 1)
        require(differing == 0, f"{differing} words differ after the load")
        figures = _speeds(heap, extent)
        require(num_differing(memory, 1) == 0, "it differs after more turns")
        require(heap.is_pinned, f"the host copy cannot be pinned: {heap.unpinned_because}")
        return Found("bit-identical, memory freed, address kept, host copy pinned", figures)


def _release_verified(driver: Driver, heap: CudaHeap) -> None:
    taken, cached = heap.resident_bytes(), 2 * SLACK_BYTES
    # No tensor has it any more, so torch keeps it.
    torch.empty(cached, dtype=torch.uint8, device=heap.tensor().device)
    before, seen = driver.free_bytes(), torch.cuda.mem_get_info(driver.device)[0]
    require(abs(before - seen) <= SLACK_BYTES, f"torch sees {seen} bytes free, not {before}")
    heap.release()
    freed, expected = driver.free_bytes() - before, taken + cached
    require(freed >= expected - SLACK_BYTES, f"{freed} of {expected} bytes were given back")
    require(heap.resident_bytes() == 0, "it counts itself as resident")


def _speeds(heap: CudaHeap, extent: memoryview) -> dict[str, float]:
    """Medians in GB/s, each beside a plain copy of as much, pinned by torch."""
    num_bytes = heap.num_bytes
    plain = torch.empty(num_bytes, dtype=torch.uint8, device=heap.tensor().device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def plain_out() -> None:
        pinned.copy_(plain, non_blocking=True)
        torch.cuda.synchronize()

    def plain_in() -> None:
        plain.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    turns: dict[str, Callable[[], None]] = {
        "plain_out": plain_out,
        "offload": lambda: heap.copy_out(extent),
        "release": heap.release,
        "plain_in": plain_in,
        "load": lambda: heap.copy_in(extent),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(TURNS):
        for name, turn in turns.items():
            started_s = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - started_s)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {
        f"{name}_gb_s": num_bytes / seconds_taken / 1e9
        for name, seconds_taken in medians.items()
        if name != "release"
    }
    figures["release_ms"] = medians["release"] * 1e3
    figures["offload_of_plain"] = medians["plain_out"] / medians["offload"]
    figures["load_of_plain"] = medians["plain_in"] / medians["load"]
    return figures


def default_stream(driver: Driver) -> Found:
    """Work launched on the default stream after a load began sees it; earlier work does not."""
    num_bytes = 256 * MiB
    _check_room(driver, 4 * num_bytes, 3 * num_bytes)
    with with_heap(driver, num_bytes) as (heap, first), _extent(num_bytes) as second:
        extents = (first, second)
        pinned = PinnedMemory(driver, second)
        for seed, extent in enumerate(extents):
            fill(torch.frombuffer(extent, dtype=torch.uint8), seed)
        heap.copy_in(first)
        racing = [torch.cuda.Stream(driver.device) for _ in range(2)]  # type: ignore[no-untyped-call]
        stale = [_without_order(driver, heap, extents) for _ in range(10)]
        with ThreadPoolExecutor(1) as thread:
            for turn in range(RACES):
                _race(heap, extents, turn, racing, thread)
        pinned.close()
    num_stale = sum(map(bool, stale))
    require(num_stale > 0, "no race could be provoked without the order: this proves nothing")
    return Found(f"{RACES} races won; {num_stale} of 10 lost where nothing orders the copy")


def _race(
    heap: CudaHeap,
    extents: tuple[memoryview, memoryview],
    turn: int,
    racing: list[torch.cuda.Stream],
    thread: ThreadPoolExecutor,
) -> None:
    """Load one content over the other while streams are busy, and look at once."""
    seed, memory = (turn + 1) % 2, heap.tensor()
    for stream in racing:
        with torch.cuda.stream(stream):
            noise = torch.randn(2048, 2048, device=memory.device)
            for _ in range(4):
                noise = noise @ noise
    before = None
    if turn % 4 == 3:
        heap.release()
    else:
        # Slow: the load begins long before this has read what is there now.
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        before = memory.clone()
    if turn % 2:
        thread.submit(heap.start_copy_in, extents[seed]).result()
    else:
        heap.start_copy_in(extents[seed])
    after = memory.clone()
    heap.finish()
    differing = num_differing(after, seed)
    require(differing == 0, f"turn {turn}: {differing} words were read before they were loaded")
    if before is not None:
        differing = num_differing(before, 1 - seed)
        require(differing == 0, f"turn {turn}: {differing} words were loaded before they were read")


def _without_order(driver: Driver, heap: CudaHeap, extents: tuple[memoryview, memoryview]) -> int:
    """The number of words that an unordered kernel reads too early, which the proof must not
    see."""
    heap.copy_in(extents[0])
    torch.cuda.synchronize()
    stream = driver.create_stream()
    host = torch.frombuffer(extents[1], dtype=torch.uint8)
    driver.copy_in(heap.address, host.data_ptr(), heap.num_bytes, stream)
    seen = heap.tensor().clone()
    driver.synchronize(stream)
    driver.destroy_stream(stream)
    differing = num_differing(seen, 1)
    heap.copy_in(extents[0])
    return differing


def graphs(driver: Driver) -> Found:
    """A captured graph goes on after an offload and a load, because nothing has moved."""
    with with_heap(driver, 64 * MiB) as (heap, extent):
        numbers = heap.tensor().view(torch.float32)
        # Once before: what is loaded at its first use cannot be captured.
        numbers.fill_(0.0).add_(1.0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numbers.add_(1.0)
        for turn in range(3):
            offload_and_load(heap, extent)
            graph.replay()
            torch.cuda.synchronize()
            require(
                bool((numbers == turn + 2.0).all().item()), f"replay {turn} gave something else"
            )
    return Found("replayed 3 times, each after an offload and a load")


def shared_memory(driver: Driver) -> Found:
    """Another process reads and writes this memory by a descriptor; its death harms nobody."""
    if not driver.can_share:
        raise Skipped(f"device {driver.device} exports no descriptors")
    num_bytes = 256 * MiB
    # Once before: what kernels take at their first use stays with this process.
    require(_is_found(torch.empty(MiB, dtype=torch.uint8, device="cuda")), "a pattern is not found")
    torch.cuda.empty_cache()
    before = driver.free_bytes()
    shared = DeviceRange(driver, num_bytes)
    shared.populate()
    memory = memory_tensor(shared.address, num_bytes, driver.device)
    fill(memory, 7)
    torch.cuda.synchronize()
    with _peer("read", driver.device, num_bytes, 7) as (end, process):
        fd = shared.export()
        socket.send_fds(end, [b"."], [fd])
        os.close(fd)
        require(_heard(end) == "differing 0", "the other process sees something else")
        word, differing, seconds = _heard(end).split()
        require((word, differing) == ("copied", "0"), "what it copied differs")
        require(_heard(end) == "wrote", "it could not write")
        require(num_differing(memory, 8) == 0, "what it wrote is not here")
        process.kill()
        process.wait()
    require(num_differing(memory, 8) == 0, "its death changed the memory")
    fill(memory, 9)
    require(num_differing(memory, 9) == 0, "the memory is of no use after its death")
    del memory
    shared.close()
    _outlive(driver, num_bytes)
    torch.cuda.empty_cache()
    left = _left(driver, before)
    require(left <= SLACK_BYTES, f"{left} bytes were not given back in the end")
    rate = num_bytes / float(seconds) / 1e9
    return Found(
        "read, copied and written by a second process, which was killed", {"d2d_gb_s": rate}
    )


def _outlive(driver: Driver, num_bytes: int) -> None:
    """A descriptor alone keeps memory whose maker is killed, though nobody has it mapped."""
    with _peer("make", driver.device, num_bytes, 11) as (end, process):
        fd = _received(end)
        process.kill()
        process.wait()
    adopted = DeviceRange(driver, num_bytes)
    adopted.adopt(fd)
    os.close(fd)
    memory = memory_tensor(adopted.address, num_bytes, driver.device)
    require(num_differing(memory, 11) == 0, "its maker's death took the memory away")
    del memory
    adopted.close()


def _left(driver: Driver, before: int) -> int:
    """The bytes that are taken now and were free before."""
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    while (left := before - driver.free_bytes()) > SLACK_BYTES and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def _is_found(memory: torch.Tensor) -> bool:
    fill(memory, 1)
    return num_differing(memory, 1) == 0


def forked(driver: Driver) -> Found:
    """A process forked from one that has imported torch uses the device, as every rank does."""
    num_bytes = 64 * MiB
    os.environ.setdefault(*QUIET_CHECK)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=in_fork, args=(sender, driver.device, num_bytes), daemon=True)
    process.start()
    sender.close()
    try:
        is_there = receiver.poll(PEER_TIMEOUT_S)
        require(is_there, f"it said nothing for {PEER_TIMEOUT_S:.0f} s")
        differing = int.from_bytes(receiver.recv_bytes(), "little")
    except EOFError:
        raise Disproved("it ended without a word, see what it wrote above") from None
    finally:
        process.kill()
        process.join()
    require(differing == 0, f"{differing} words differ after an offload and a load")
    return Found("offloaded and loaded in a process forked after the imports")


def optimizer(driver: Driver) -> Found:
    """AdamW goes on over offloads and loads as if there had been none, bit by bit."""
    size, steps = 4 * MiB, 6
    results = []
    for is_disturbed in (False, True):
        with with_heap(driver, 4 * 4 * size) as (heap, extent):
            weights, gradients, exp_avg, exp_avg_sq = heap.tensor().view(torch.float32).view(4, -1)
            generator = torch.Generator(weights.device).manual_seed(5)
            weights.normal_(generator=generator)
            parameter = torch.nn.Parameter(weights)
            parameter.grad = gradients
            adamw = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
            for step in range(steps):
                gradients.normal_(generator=generator)
                adamw.step()
                if step == 0:
                    for name, place in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
                        place.copy_(adamw.state[parameter][name])
                        adamw.state[parameter][name] = place
                if is_disturbed:
                    offload_and_load(heap, extent)
            results.append(heap.tensor().clone())
    require(torch.equal(*results), "weights or moments differ")
    return Found(f"{steps} steps of {size} weights, equal with and without")


def optimizer_on_host(driver: Driver) -> Found:
    """AdamW with its moments in host memory gives the bits of an AdamW that is in host memory
    altogether."""
    size, adam = 40 * MiB, Hyperparameters(1e-3, 0.9, 0.95, 1e-8, 0.1)
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(2, size, generator=generator)
    results, seconds, num_threads = [], [], torch.get_num_threads()
    # Several would cut whole and pieces at other elements, into vectors and single ones.
    torch.set_num_threads(1)
    for device in ("cpu", f"cuda:{driver.device}"):
        weights, gradients = start.to(device, copy=True)
        moments = Moments(torch.zeros(size), torch.zeros(size), torch.zeros(()))
        started_s = time.perf_counter()
        for _ in range(3):
            take_step(weights, gradients, moments, adam)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started_s) / 3)
        results.append((weights.cpu(), moments.exp_avg, moments.exp_avg_sq))
    torch.set_num_threads(num_threads)
    for ours, theirs in zip(*results, strict=True):
        require(torch.equal(ours, theirs), "weights or moments differ")
    return Found("3 steps, equal bits", {"step_ms": seconds[1] * 1e3, "host_ms": seconds[0] * 1e3})


def kvikio_file(driver: Driver) -> Found:
    """A heap's memory goes to a file through kvikio, and comes back bit by bit after a release."""
    try:
        import kvikio
    except ImportError as error:
        raise Skipped(f"kvikio is not installed: {error}") from error
    num_bytes, path = 64 * MiB, f"gpucheck-{os.getpid()}.bin"
    with with_heap(driver, num_bytes) as (heap, _), suppress(FileNotFoundError):
        memory = heap.tensor()
        fill(memory, 13)
        torch.cuda.synchronize()
        try:
            with kvikio.CuFile(path, "w") as file:
                require(file.write(memory) == num_bytes, "not all was written")
            fill(memory, 14)
            torch.cuda.synchronize()
            with kvikio.CuFile(path, "r") as file:
                require(file.read(memory) == num_bytes, "not all was read")
            require(num_differing(memory, 13) == 0, "what came back differs")
        finally:
            os.unlink(path)
    return Found("written and read back")


def kvikio_beside_direct(_: Driver) -> Found:
    """State files by kvikio and by direct I/O, in turns. If kvikio is at least 1.1 times as fast,
    the node should use it: `statemgr.disk_method`."""
    try:
        from phaseloom.common.contract.ids import DeploymentKey
        from phaseloom.common.contract.state_agent import DiskMethod
        from phaseloom.statemgr.disk.files import StateDirectory, find_parts
        from phaseloom.statemgr.records.stateheader import Section, StateHeader
    except ImportError as error:
        raise Skipped(f"the state manager is not installed: {error}") from error
    num_bytes, median = 1024 * MiB, statistics.median
    methods = [DiskMethod.DIRECT, DiskMethod.KVIKIO]
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        directories = {m: StateDirectory(Path(scratch), m) for m in methods}
        for method, directory in directories.items():
            if directory.disk.path.method is not method:
                raise Skipped(directory.disk.path.why)
        path, memory = Path(scratch) / "f", memoryview(mmap.mmap(-1, num_bytes))
        memory[:MiB] = os.urandom(MiB)
        header = StateHeader("copy", DeploymentKey("a", "b", "c"), 1, [Section(num_bytes, [], "")])
        seconds: dict[str, list[float]] = {}
        for turn in range(TURNS):
            for method in methods[:: 1 if turn % 2 else -1]:
                states = directories[method]
                started_s = time.perf_counter()
                states.write(path, header, [memory])
                written_s = time.perf_counter()
                states.read(find_parts(path)[0], memory)
                read_s = time.perf_counter()
                seconds.setdefault(f"write {method}", []).append(written_s - started_s)
                seconds.setdefault(f"read {method}", []).append(read_s - written_s)
    speeds = {what: num_bytes / 1e9 / median(taken) for what, taken in seconds.items()}
    ratios = [
        median(ours / kvikio for ours, kvikio in zip(seconds[f"{way} direct"], taken, strict=True))
        for way, taken in (("write", seconds["write kvikio"]), ("read", seconds["read kvikio"]))
    ]
    advice = "use kvikio" if min(ratios) >= 1.1 else "keep direct I/O"
    detail = f"kvikio is {ratios[0]:.2f} (write) and {ratios[1]:.2f} (read) times as fast: {advice}"
    return Found(detail, {f"{what} GB/s": speed for what, speed in speeds.items()})


def green_contexts(driver: Driver) -> Found:
    """A part of the device's multiprocessors alone computes what all of them do, where the driver
    and torch have Green Contexts."""
    green: Any = getattr(torch.cuda, "green_contexts", None)
    if green is None or not green.SUPPORTED:
        raise Skipped("this torch has no Green Contexts")
    there = torch.cuda.get_device_properties(driver.device).multi_processor_count
    num_sms = max(8, there // 4 // 8 * 8)
    try:
        part = green.GreenContext.create(num_sms=num_sms, device_id=driver.device)
    except RuntimeError as error:
        raise Skipped(f"this machine has no Green Contexts: {error}") from error
    # Whole numbers so small that no order of adding them up rounds.
    factor = torch.randint(-4, 5, (4096, 4096), device=f"cuda:{driver.device}").float()

    def multiplied() -> tuple[torch.Tensor, float]:
        product = factor @ factor
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(TURNS):
            product = factor @ factor
        torch.cuda.synchronize()
        return product, (time.perf_counter() - started_s) / TURNS

    expected, all_s = multiplied()
    part.set_context()
    try:
        found, part_s = multiplied()
    finally:
        part.pop_context()
    require(torch.equal(found, expected), "a part computes something else")
    return Found(
        f"present: {num_sms} of {there} multiprocessors compute the same",
        {"share of multiprocessors": num_sms / there, "times as long": part_s / all_s},
    )


def offload_and_load(heap: CudaHeap, extent: memoryview) -> None:
    """Offload and load as two switches do, with somebody else on the device between them."""
    heap.copy_out(extent)
    heap.release()
    _scribble(heap.num_bytes)
    heap.copy_in(extent)


@contextmanager
def with_heap(driver: Driver, num_bytes: int) -> Iterator[tuple[CudaHeap, memoryview]]:
    with _extent(num_bytes) as extent:
        heap = CudaHeap(num_bytes, driver)
        heap.pin(extent)
        try:
            yield heap, extent
        finally:
            torch.cuda.synchronize()
            heap.close()
            gc.collect()
            torch.cuda.empty_cache()


@contextmanager
def _extent(num_bytes: int) -> Iterator[memoryview]:
    """Memory as the state manager makes it: a memfd, mapped and touched."""
    fd = os.memfd_create("gpu-check", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
    view = memoryview(mapping)
    torch.frombuffer(view, dtype=torch.uint8).zero_()
    yield view


@contextmanager
def _peer(
    role: str, device: int, num_bytes: int, seed: int
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(PEER_TIMEOUT_S)
    arguments = [role, str(theirs.fileno()), str(device), str(num_bytes), str(seed)]
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.gpu.peer", *arguments],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        ours.close()


def _heard(end: socket.socket) -> str:
    try:
        word = hear(end)
    except TimeoutError:
        raise _silent() from None
    require(bool(word), "the other process has ended, see what it wrote above")
    return word


def _received(end: socket.socket) -> int:
    """The descriptor that the other process sends."""
    try:
        _, fds, _, _ = socket.recv_fds(end, 1, 1)
    except TimeoutError:
        raise _silent() from None
    require(len(fds) == 1, "the other process has ended, see what it wrote above")
    return fds[0]


def _silent() -> Disproved:
    return Disproved(f"the other process said nothing for {PEER_TIMEOUT_S:.0f} s")


def _scribble(num_bytes: int) -> None:
    """Use the device memory that was given back, as another deployment would."""
    torch.empty(num_bytes, dtype=torch.uint8, device="cuda").fill_(0xA5)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _check_room(driver: Driver, device_bytes: int, host_bytes: int) -> None:
    torch.cuda.empty_cache()
    free = driver.free_bytes()
    if free < device_bytes:
        raise Skipped(f"it needs {device_bytes} bytes of device memory: {free} are free")
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if there < host_bytes:
        raise Skipped(f"it needs {host_bytes} bytes of host memory: this machine has {there}")
