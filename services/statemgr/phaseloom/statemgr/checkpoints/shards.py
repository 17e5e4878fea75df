"""Writes a deployment's whole state as safetensors files; `loading.py` reads them back.

`transformers` loads `model*.safetensors`, their index if there are several, and `config.json`;
`peft` loads `adapter_model.safetensors` and `adapter_config.json`. `training*.safetensors` hold
gradients (`<parameter>.grad`), AdamW's moments and its step, if the deployment is trainable.
Tensors are whole, whatever layout wrote them, and sorted by name. Blocking: call it in a thread.

Several threads assemble chunks of files from the ranks' memory and write them. Each block of
`marker.BLOCK_BYTES` has a checksum, which is verified when the block is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash
from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.specs import ModelDirectory
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.adapterfiles import ADAPTER_CONFIG_FILE, ADAPTER_STEM
from phaseloom.common.tensors.blockfile import BlockFile, Cancelled
from phaseloom.common.tensors.modelfiles import CONFIG_FILE, MODEL_STEM, is_companion
from phaseloom.common.tensors.safetensors import (
    Index,
    TensorEntry,
    file_names,
    index_name,
    lay_out,
    split,
)
from phaseloom.statemgr.checkpoints.assembly import WholeTensor, assemble
from phaseloom.statemgr.checkpoints.files import write_synced, writing
from phaseloom.statemgr.checkpoints.marker import BLOCK_BYTES, FileSums
from phaseloom.statemgr.disk.disk import Disk
from phaseloom.statemgr.disk.files import sync_directory

MODEL, ADAPTER, TRAINING = MODEL_STEM, ADAPTER_STEM, "training"
"""The beginnings of the names of files with tensors."""
CHUNK_BYTES = 8 * BLOCK_BYTES
"""Bytes that are read or written at once."""
DEPTH = 4
"""Chunks that are read or written at a time."""
_HASHED_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Written:
    weights_sha256: str
    files: dict[str, FileSums]


def write_state(
    disk: Disk,
    draft: Path,
    ranks: Sequence[tuple[list[TensorSlot], memoryview]],
    config: str,
    *,
    file_bytes: int,
    cancelled: threading.Event,
    companions: ModelDirectory | None = None,
) -> Written:
    """Write a whole state into an empty directory; every file is fsynced.

    Args: ranks: the slots that each rank holds, and the rank's memory.
          file_bytes: the most bytes in one file, unless one tensor is larger.
          companions: files to copy next to the tensors.
    """
    tensors = assemble([slots for slots, _ in ranks])
    memories = [memory for _, memory in ranks]
    weights = [tensor for tensor in tensors if tensor.role is Role.WEIGHT]
    training = [tensor for tensor in tensors if tensor.role is not Role.WEIGHT]
    files: dict[str, FileSums] = {}
    buffers = buffers_for_chunks()
    with ThreadPoolExecutor(DEPTH + 1, "checkpoint") as threads, writing():
        digest = threads.submit(_weights_sha256, weights, memories, cancelled)
        try:
            groups, config_file = [(MODEL, weights, file_bytes)], CONFIG_FILE
            if "peft_type" in msgspec.json.decode(config):
                # `peft` reads a single file.
                groups, config_file = [(ADAPTER, weights, sys.maxsize)], ADAPTER_CONFIG_FILE
            for stem, group, most_bytes in [*groups, (TRAINING, training, file_bytes)]:
                if group:
                    writer = _Writer(disk, draft, memories, threads, buffers, cancelled)
                    files |= writer.write(stem, group, most_bytes)
            write_synced(draft / config_file, config.encode())
            files[config_file] = sums_of(config.encode())
            for name, content in _contents(companions):
                path = draft / name
                path.parent.mkdir(exist_ok=True)
                write_synced(path, content)
                sync_directory(path.parent)
                files[name] = sums_of(content)
            return Written(digest.result(), files)
        except BaseException:
            cancelled.set()
            raise


def _contents(companions: ModelDirectory | None) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the files to copy, verified.

    Raises: CallerError: NOT_FOUND: one is missing. ResourceError: DATA_LOSS: one has changed.
    """
    if companions is None:
        return
    for file in companions.files:
        path = Path(companions.path) / file.name
        if not is_companion(file.name):
            raise CallerError(f"{file.name!r} is not a model's small file", field="companions")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CallerError(
                f"{path} of the registered model cannot be copied: {error.strerror}",
                code=Code.NOT_FOUND,
                field="model.registered",
                remedy="put the model's directory back, and save again",
            ) from None
        if blake3(content).hexdigest() != file.blake3:
            raise ResourceError(
                f"{path} is not the file that was registered",
                code=Code.DATA_LOSS,
                field="model.registered",
                remedy="restore the file, and save again",
            )
        yield file.name, content


@dataclass(frozen=True, slots=True)
class _Writer:
    disk: Disk
    draft: Path
    memories: list[memoryview]
    threads: ThreadPoolExecutor
    buffers: queue.SimpleQueue[memoryview]
    cancelled: threading.Event

    def write(self, stem: str, tensors: list[WholeTensor], file_bytes: int) -> dict[str, FileSums]:
        counts = split([tensor.num_bytes for tensor in tensors], file_bytes)
        names = file_names(stem, len(counts))
        remaining = iter(tensors)
        files: dict[str, FileSums] = {}
        file_of: dict[str, str] = {}
        for name, count in zip(names, counts, strict=True):
            group = list(itertools.islice(remaining, count))
            file_of |= dict.fromkeys((tensor.name for tensor in group), name)
            files[name] = self._write_file(self.draft / name, group)
        if len(names) > 1:
            total = sum(tensor.num_bytes for tensor in tensors)
            index = msgspec.json.encode(Index(file_of, {"total_size": total}))
            write_synced(self.draft / index_name(stem), index)
            files[index_name(stem)] = sums_of(index)
        return files

    def _write_file(self, path: Path, tensors: list[WholeTensor]) -> FileSums:
        described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        header, entries = lay_out(described, {"format": "pt"})
        end = entries[-1].end
        pieces = self._pieces(header, tensors, entries)
        path.touch()  # with the permissions that the umask allows; `create` would make it private
        with contextlib.closing(self.disk.create(path, end)) as file:
            moves: list[Future[bytes]] = []
            try:
                for start, chunk in chunks_of(pieces):
                    if self.cancelled.is_set():
                        raise Cancelled
                    # Waits for a free buffer, which limits the number of chunks under way.
                    buffer = self.buffers.get()
                    moves.append(self.threads.submit(self._write_chunk, file, start, chunk, buffer))
                blocks = b"".join(move.result() for move in moves)
            finally:
                wait(moves)
            file.finish(end)
        return FileSums(end, BLOCK_BYTES, blocks.hex())

    def _pieces(
        self, header: bytes, tensors: list[WholeTensor], entries: list[TensorEntry]
    ) -> Iterator[Piece]:
        yield Piece(0, memoryview(bytearray(header)))
        for tensor, entry in zip(tensors, entries, strict=True):
            for run in tensor.runs():
                memory = self.memories[run.rank][run.offset : run.offset + run.num_bytes]
                yield Piece(entry.offset + run.whole_offset, memory)

    def _write_chunk(
        self, file: BlockFile, start: int, pieces: list[Piece], buffer: memoryview
    ) -> bytes:
        try:
            base = address(buffer)
            for piece in pieces:
                target = base + piece.file_offset - start
                ctypes.memmove(target, address(piece.memory), len(piece.memory))
            chunk = buffer[: pieces[-1].end - start]
            file.write(chunk, start)
            return b"".join(checksums(chunk))
        finally:
            self.buffers.put(buffer)


def _weights_sha256(
    weights: list[WholeTensor], memories: list[memoryview], cancelled: threading.Event
) -> str:
    """The SHA-256 over (name, dtype, shape, bytes) of each tensor, sorted by name, as workers
    compute it."""
    digest = hashlib.sha256()
    for tensor in weights:
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{tensor.name}\n{tensor.dtype}\n{shape}\n".encode())
        for run in tensor.runs():
            end = run.offset + run.num_bytes
            for start in range(run.offset, end, _HASHED_BYTES):
                if cancelled.is_set():
                    raise Cancelled
                digest.update(memories[run.rank][start : min(start + _HASHED_BYTES, end)])
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that are contiguous in a rank's memory."""

    file_offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.file_offset + len(self.memory)


def sums_of(content: bytes) -> FileSums:
    return FileSums(len(content), BLOCK_BYTES, b"".join(checksums(memoryview(content))).hex())


def checksums(chunk: memoryview) -> Iterator[bytes]:
    for start in range(0, len(chunk), BLOCK_BYTES):
        yield bytes(xxhash.xxh3_64_digest(chunk[start : start + BLOCK_BYTES]))


def buffers_for_chunks() -> queue.SimpleQueue[memoryview]:
    """Page-aligned buffers for `DEPTH` chunks."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(DEPTH):
        buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES)))
    return buffers


def address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0


def chunks_of(pieces: Iterable[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """The chunks of a file: the start of each, and its pieces.

    Args: pieces: in the order of the file; they are split at multiples of a chunk.
    """
    start, chunk = 0, list[Piece]()
    for piece in pieces:
        offset, memory = piece.file_offset, piece.memory
        while memory:
            begin = offset // CHUNK_BYTES * CHUNK_BYTES
            if chunk and begin != start:
                yield start, chunk
                chunk = []
            start = begin
            chunk.append(Piece(offset, memory[: begin + CHUNK_BYTES - offset]))
            offset, memory = chunk[-1].end, memory[len(chunk[-1].memory) :]
    if chunk:
        yield start, chunk
