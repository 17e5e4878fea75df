"""A deployment's whole state as safetensors files, and back into the memory of any layout.

`model*.safetensors`, their index where there are several, and `config.json` are what `transformers`
loads. `training*.safetensors` hold gradients (`<parameter>.grad`), AdamW's moments and its step,
where the deployment is trainable. Tensors are whole, whatever layout wrote them, sorted by name.
Blocking: call it in a thread.

Blocks of files are put together from the ranks' memory and moved by several threads; each has its
checksums, of `marker.BLOCK_BYTES`, which are verified when it is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from phaseloom.common.errors import CallerError, Code, ResourceError
from phaseloom.common.statewire import Role, TensorSlot
from phaseloom.statemgr.checkpoints.files import write_synced, writing
from phaseloom.statemgr.core.marker import BLOCK_BYTES, MARKER_FILE, FileSums, Marker, decode_marker
from phaseloom.statemgr.core.safetensors import (
    LENGTH_BYTES,
    Entry,
    Index,
    decode_header,
    file_names,
    header_bytes,
    index_name,
    lay_out,
    split,
)
from phaseloom.statemgr.core.wholes import Whole, global_shape, is_sound, slot_runs, wholes
from phaseloom.statemgr.disk.blockfile import BlockFile
from phaseloom.statemgr.disk.disk import Cancelled, Disk

MODEL, TRAINING = "model", "training"
CONFIG_FILE = "config.json"
CHUNK_BYTES = 8 * BLOCK_BYTES
"""Moved at once."""
_DEPTH = 4
"""Chunks under way."""
_HASHED_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file that lie together in a rank's memory."""

    file_offset: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.file_offset + len(self.memory)


@dataclass(frozen=True, slots=True)
class Written:
    weights_sha256: str
    files: dict[str, FileSums]


# --- writing -------------------------------------------------------------------------------------


def write_state(
    disk: Disk,
    draft: Path,
    ranks: Sequence[tuple[list[TensorSlot], memoryview]],
    config: str,
    *,
    file_bytes: int,
    cancelled: threading.Event,
) -> Written:
    """Write a whole state into an empty directory; every file is fsynced.

    Args:   ranks: what each holds, and its memory. file_bytes: no file is larger, unless one tensor
            is.
    Raises: CallerError: the slices do not make whole tensors. ResourceError: RESOURCE_EXHAUSTED,
            the disk is full; UNAVAILABLE; ABORTED: cancelled.
    """
    tensors = wholes([slots for slots, _ in ranks])
    memories = [memory for _, memory in ranks]
    weights = [tensor for tensor in tensors if tensor.role is Role.WEIGHT]
    training = [tensor for tensor in tensors if tensor.role is not Role.WEIGHT]
    files: dict[str, FileSums] = {}
    with ThreadPoolExecutor(_DEPTH + 1, "checkpoint") as threads, _staging() as buffers, writing():
        digest = threads.submit(_weights_sha256, weights, memories, cancelled)
        try:
            for stem, group in ((MODEL, weights), (TRAINING, training)):
                if group:
                    writer = _Writer(disk, draft, memories, threads, buffers, cancelled)
                    files |= writer.write(stem, group, file_bytes)
            write_synced(draft / CONFIG_FILE, config.encode())
            files[CONFIG_FILE] = _sums(config.encode())
            return Written(digest.result(), files)
        except BaseException:
            cancelled.set()
            raise


@dataclass(frozen=True, slots=True)
class _Writer:
    disk: Disk
    draft: Path
    memories: list[memoryview]
    threads: ThreadPoolExecutor
    buffers: queue.SimpleQueue[memoryview]
    cancelled: threading.Event

    def write(self, stem: str, tensors: list[Whole], file_bytes: int) -> dict[str, FileSums]:
        counts = split([tensor.num_bytes for tensor in tensors], file_bytes)
        names = file_names(stem, len(counts))
        rest = iter(tensors)
        files: dict[str, FileSums] = {}
        places: dict[str, str] = {}
        for name, count in zip(names, counts, strict=True):
            group = list(itertools.islice(rest, count))
            places |= dict.fromkeys((tensor.name for tensor in group), name)
            files[name] = self._write_file(self.draft / name, group)
        if len(names) > 1:
            total = sum(tensor.num_bytes for tensor in tensors)
            index = msgspec.json.encode(Index(places, {"total_size": total}))
            write_synced(self.draft / index_name(stem), index)
            files[index_name(stem)] = _sums(index)
        return files

    def _write_file(self, path: Path, tensors: list[Whole]) -> FileSums:
        described = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        header, entries = lay_out(described, {"format": "pt"})
        end = entries[-1].end
        pieces = self._pieces(header, tensors, entries)
        with contextlib.closing(self.disk.create(path, end)) as file:
            moves: list[Future[bytes]] = []
            try:
                for start, chunk in _chunks(pieces):
                    if self.cancelled.is_set():
                        raise Cancelled
                    # Waits for one that is free: bounds what is under way.
                    buffer = self.buffers.get()
                    moves.append(self.threads.submit(self._write_chunk, file, start, chunk, buffer))
                blocks = b"".join(move.result() for move in moves)
            finally:
                wait(moves)
            file.finish(end)
        return FileSums(end, BLOCK_BYTES, blocks.hex())

    def _pieces(self, header: bytes, tensors: list[Whole], entries: list[Entry]) -> Iterator[Piece]:
        yield Piece(0, memoryview(bytearray(header)))
        for tensor, entry in zip(tensors, entries, strict=True):
            for run in tensor.runs():
                memory = self.memories[run.rank][run.offset : run.offset + run.num_bytes]
                yield Piece(entry.offset + run.whole_offset, memory)

    def _write_chunk(
        self, file: BlockFile, start: int, pieces: list[Piece], buffer: memoryview
    ) -> bytes:
        try:
            base = _address(buffer)
            for piece in pieces:
                target = base + piece.file_offset - start
                ctypes.memmove(target, _address(piece.memory), len(piece.memory))
            chunk = buffer[: pieces[-1].end - start]
            file.write(chunk, start)
            return b"".join(_checksums(chunk))
        finally:
            self.buffers.put(buffer)


def _chunks(pieces: Iterable[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """The pieces cut at multiples of a chunk, chunk by chunk."""
    chunk: list[Piece] = []
    start = 0
    for piece in pieces:
        offset, memory = piece.file_offset, piece.memory
        while memory:
            if offset == start + CHUNK_BYTES:
                yield start, chunk
                chunk, start = [], offset
            room = start + CHUNK_BYTES - offset
            chunk.append(Piece(offset, memory[:room]))
            offset, memory = offset + len(chunk[-1].memory), memory[room:]
    if chunk:
        yield start, chunk


def _weights_sha256(
    weights: list[Whole], memories: list[memoryview], cancelled: threading.Event
) -> str:
    """As a worker takes it: SHA-256 over (name, dtype, shape, bytes) of each, sorted by name."""
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


def _sums(content: bytes) -> FileSums:
    return FileSums(len(content), BLOCK_BYTES, b"".join(_checksums(memoryview(content))).hex())


def _checksums(chunk: memoryview) -> Iterator[bytes]:
    for start in range(0, len(chunk), BLOCK_BYTES):
        yield bytes(xxhash.xxh3_64_digest(chunk[start : start + BLOCK_BYTES]))


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int
    sums: FileSums | None
    """None: an older release wrote it, or another program."""
    entries: list[Entry] = field(default_factory=list)


class SavedState:
    """A checkpoint that was opened: its index and headers are read and verified."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        """Raises: ResourceError: DATA_LOSS, naming the file. CallerError: it holds no model."""
        self._disk = disk
        self._directory = directory
        self.marker = self._marker()
        self._files: dict[str, _File] = {}
        self._weights = self._tensors(MODEL)
        self._training = self._tensors(TRAINING)
        if not self._weights:
            raise CallerError(
                f"checkpoint {directory.name!r} holds no model",
                code=Code.NOT_FOUND,
                field="args.name",
                remedy="name one that save_state has written",
            )

    def check_fits(self, slots: Iterable[TensorSlot]) -> None:
        """Whether it is of the model whose state this is; args: of all ranks.

        Raises: CallerError: FAILED_PRECONDITION.
        """
        held = list(slots)
        if unsound := next((slot.name for slot in held if not is_sound(slot)), None):
            raise CallerError(
                f"{unsound}: its shape, place and size contradict one another",
                code=Code.FAILED_PRECONDITION,
                field=f"tensors[{unsound}]",
            )
        weights, training = _described(held)
        _check_same(MODEL, self._weights, weights)
        if training and self._training:
            _check_same(TRAINING, self._training, training)

    def fill(
        self, slots: Iterable[TensorSlot], memory: memoryview, cancelled: threading.Event
    ) -> None:
        """Put a rank's slices where they belong; all else of its memory becomes zeroes.

        So does training state where the checkpoint has none.
        Raises: ResourceError: DATA_LOSS, naming file and tensor; ABORTED: cancelled.
        """
        wanted: dict[str, list[Piece]] = {}
        for slot in slots:
            group = self._weights if slot.role is Role.WEIGHT else self._training
            if slot.name not in group:
                continue
            file, entry = group[slot.name]
            wanted.setdefault(file, []).extend(
                Piece(
                    entry.offset + run.whole_offset, memory[run.offset : run.offset + run.num_bytes]
                )
                for run in slot_runs(0, slot)
            )
        ctypes.memset(_address(memory), 0, len(memory))
        with ThreadPoolExecutor(_DEPTH, "checkpoint") as threads, _staging() as buffers:
            for name, pieces in wanted.items():
                self._fill_from(self._files[name], pieces, threads, buffers, cancelled)

    def _fill_from(
        self,
        file: _File,
        pieces: list[Piece],
        threads: ThreadPoolExecutor,
        buffers: queue.SimpleQueue[memoryview],
        cancelled: threading.Event,
    ) -> None:
        by_chunk = _by_chunk(sorted(pieces, key=lambda piece: piece.file_offset))
        with self._opened(file) as opened:

            def read(start: int, chunk: list[Piece]) -> None:
                if cancelled.is_set():
                    raise Cancelled
                buffer = buffers.get()
                try:
                    base = _address(buffer)
                    self._read_chunk(file, opened, start, _span(start, chunk), buffer)
                    for piece in chunk:
                        source = base + piece.file_offset - start
                        ctypes.memmove(_address(piece.memory), source, len(piece.memory))
                finally:
                    buffers.put(buffer)

            reads = [threads.submit(read, start, chunk) for start, chunk in by_chunk.items()]
            try:
                for each in reads:
                    each.result()
            finally:
                for each in reads:
                    each.cancel()
                wait(reads)

    def _read_chunk(
        self,
        file: _File,
        opened: BlockFile,
        start: int,
        blocks: tuple[int, int],
        buffer: memoryview,
    ) -> None:
        """Fill the buffer, which begins at `start` of the file, with these blocks, verified."""
        begin, end = blocks[0], min(blocks[1], file.num_bytes)
        chunk = buffer[begin - start : end - start]
        try:
            count = opened.read(chunk, begin)
        except OSError as error:
            raise self._loss(file, error.strerror or repr(error), begin, end) from error
        if count < len(chunk):
            raise self._loss(file, "it ends early", begin + count, end)
        if file.sums is None:
            return
        for number, checksum in enumerate(_checksums(chunk), start=begin // BLOCK_BYTES):
            if checksum != file.sums.of_block(number):
                at = number * BLOCK_BYTES
                raise self._loss(file, "its checksum does not match", at, at + BLOCK_BYTES)

    @contextmanager
    def _opened(self, file: _File) -> Iterator[BlockFile]:
        try:
            opened = self._disk.open(file.path)
        except OSError as error:
            raise self._loss(file, error.strerror or repr(error), 0, file.num_bytes) from error
        with contextlib.closing(opened):
            yield opened

    def _marker(self) -> Marker | None:
        path = self._directory / MARKER_FILE
        try:
            return decode_marker(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _data_loss(path, str(error)) from error

    def _tensors(self, stem: str) -> dict[str, tuple[str, Entry]]:
        """By name: its file, and its place there; none: there are no such files."""
        single = f"{stem}.safetensors"
        index = self._directory / index_name(stem)
        known = self.marker.files if self.marker else {}
        if single in known or (not known and (self._directory / single).is_file()):
            return {entry.name: (single, entry) for entry in self._entries(single)}
        if index.name not in known and not index.is_file():
            return {}
        try:
            places = msgspec.json.decode(self._small(index), type=Index).weight_map
        except msgspec.DecodeError as error:
            raise _data_loss(index, str(error)) from error
        found: dict[str, tuple[str, Entry]] = {}
        for name in sorted(set(places.values())):
            if Path(name).name != name:
                raise _data_loss(index, f"it names a file elsewhere: {name!r}")
            found |= {entry.name: (name, entry) for entry in self._entries(name)}
        if found.keys() != places.keys():
            raise _data_loss(index, "it names other tensors than its files have")
        return found

    def _small(self, path: Path) -> bytes:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _data_loss(path, error.strerror or repr(error)) from error
        sums = self.marker.files.get(path.name) if self.marker else None
        if sums is not None and sums != _sums(content):
            raise _data_loss(path, "its checksum does not match")
        return content

    def _entries(self, name: str) -> list[Entry]:
        path = self._directory / name
        sums = self.marker.files.get(name) if self.marker else None
        try:
            file = _File(path, path.stat().st_size, sums)
        except OSError as error:
            raise _data_loss(path, error.strerror or repr(error)) from error
        if sums is not None and sums.num_bytes != file.num_bytes:
            raise _data_loss(path, f"it has {file.num_bytes} bytes, not {sums.num_bytes}")
        try:
            with path.open("rb") as opened:
                length = header_bytes(opened.read(LENGTH_BYTES))
                file.entries.extend(decode_header(opened.read(length), file.num_bytes))
        except (OSError, ValueError) as error:
            raise _data_loss(path, str(error)) from error
        self._verify(file, LENGTH_BYTES + length)
        self._files[name] = file
        return file.entries

    def _verify(self, file: _File, end: int) -> None:
        """The blocks up to there; now that it is known which tensors they hold."""
        last = min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, file.num_bytes)
        with self._opened(file) as opened:
            for start in range(0, last, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, last)
                buffer = memoryview(bytearray(stop - start))
                self._read_chunk(file, opened, start, (start, stop), buffer)

    def _loss(self, file: _File, why: str, start: int, end: int) -> ResourceError:
        hit = [entry.name for entry in file.entries if entry.offset < end and start < entry.end]
        if start < min((entry.offset for entry in file.entries), default=file.num_bytes):
            hit.insert(0, "its header")
        named = ", ".join(hit[:3])
        more = f" and {len(hit) - 3} more" if len(hit) > 3 else ""
        return _data_loss(file.path, f"{named}{more}, bytes {start} to {end}: {why}", offset=start)


Expected = dict[str, tuple[str, tuple[int, ...]]]
"""dtype and whole shape of each tensor"""


def _described(slots: Iterable[TensorSlot]) -> tuple[Expected, Expected]:
    weights: Expected = {}
    training: Expected = {}
    for slot in slots:
        group = weights if slot.role is Role.WEIGHT else training
        group[slot.name] = (slot.dtype, global_shape(slot))
    return weights, training


def _check_same(
    stem: str,
    stored: Mapping[str, tuple[str, Entry]],
    expected: Expected,
) -> None:
    found = {name: (entry.dtype, entry.shape) for name, (_, entry) in stored.items()}
    if found == expected:
        return
    names = sorted(found.keys() | expected.keys())
    differing = [name for name in names if found.get(name) != expected.get(name)]
    raise CallerError(
        f"the checkpoint's {stem} is another: {len(differing)} tensors, first {differing[0]}",
        code=Code.FAILED_PRECONDITION,
        field="args.name",
        remedy="load a checkpoint of the same architecture",
    )


def _by_chunk(pieces: list[Piece]) -> dict[int, list[Piece]]:
    """Cut at multiples of a chunk; sorted."""
    chunks: dict[int, list[Piece]] = {}
    for piece in pieces:
        offset, memory = piece.file_offset, piece.memory
        while memory:
            start = offset // CHUNK_BYTES * CHUNK_BYTES
            room = start + CHUNK_BYTES - offset
            chunks.setdefault(start, []).append(Piece(offset, memory[:room]))
            offset, memory = offset + min(room, len(memory)), memory[room:]
    return chunks


def _span(start: int, pieces: list[Piece]) -> tuple[int, int]:
    """The blocks that the pieces of a chunk are in."""
    first = pieces[0].file_offset // BLOCK_BYTES * BLOCK_BYTES
    last = max(piece.end for piece in pieces)
    return first, min(-(-last // BLOCK_BYTES) * BLOCK_BYTES, start + CHUNK_BYTES)


@contextmanager
def _staging() -> Iterator[queue.SimpleQueue[memoryview]]:
    """Aligned memory for chunks, freed with the last reference to it."""
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(_DEPTH):
        buffers.put(memoryview(mmap.mmap(-1, CHUNK_BYTES)))
    yield buffers


def _address(view: memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0


def _data_loss(path: Path, why: str, **details: int) -> ResourceError:
    return ResourceError(
        f"{path.name} of checkpoint {path.parent.name!r}: {why}",
        code=Code.DATA_LOSS,
        field="args.name",
        details={"file": str(path), **{name: str(value) for name, value in details.items()}},
        remedy="load another checkpoint",
    )
