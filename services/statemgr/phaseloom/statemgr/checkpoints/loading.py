"""Loads a checkpoint that `shards.py` or another program wrote, into ranks of any layout.

Only the blocks that hold bytes of the needed tensors are read. Blocks that `shards.py` wrote are
verified. The states of all ranks are read into staging buffers and verified before the first rank
is changed. A rank without state is filled directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import queue
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from phaseloom.common.contract.errors import CallerError, Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import parse_source
from phaseloom.common.contract.state_layout import Places, Role, StoredTensor, TensorSlot
from phaseloom.common.contract.state_rank import (
    MAX_READ_BYTES,
    CheckpointRead,
    LoadStaged,
    OpenSaved,
    ReadCheckpoint,
    ReadSaved,
    SavedOpened,
    SavedRead,
)
from phaseloom.common.tensors.adapterfiles import (
    ADAPTER_CONFIG_FILE,
    AdapterConfig,
    adapted_layers,
)
from phaseloom.common.tensors.blockfile import BlockFile, threads
from phaseloom.common.tensors.blockhash import digest_of
from phaseloom.common.tensors.modelfiles import model_weights, weight_files
from phaseloom.common.tensors.safetensors import (
    LENGTH_BYTES,
    TensorEntry,
    decode_header,
    header_bytes,
    index_name,
    item_bytes,
)
from phaseloom.common.tensors.tensortable import ALIGNMENT_BYTES, TensorTable
from phaseloom.statemgr.checkpoints.assembly import global_shape, is_sound, slot_runs
from phaseloom.statemgr.checkpoints.files import Checkpoints, marker_of, unpin
from phaseloom.statemgr.checkpoints.marker import BLOCK_BYTES, MARKER_FILE, FileSums
from phaseloom.statemgr.checkpoints.shards import (
    ADAPTER,
    CHUNK_BYTES,
    DEPTH,
    MODEL,
    TRAINING,
    Piece,
    address,
    buffers_for_chunks,
    checksums,
    chunks_of,
    sums_of,
)
from phaseloom.statemgr.checkpoints.staging import Staging
from phaseloom.statemgr.disk.disk import Disk
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.ranks import Ranks
from phaseloom.statemgr.records.incarnations import Rank, State, Wpg
from phaseloom.statemgr.records.stateheader import names_within
from phaseloom.statemgr.tiering.sharing import FrozenCopies
from phaseloom.statemgr.tiering.switching import on_each_device

log = logging.getLogger(__name__)


@dataclass
class Loader:
    disk: Disk
    """The disk of the checkpoint root."""
    checkpoints: Checkpoints
    staging: Staging
    ranks: Ranks
    frozen: FrozenCopies
    memory: HostMemory

    async def read(self, rank: Rank, request: ReadCheckpoint) -> CheckpointRead:
        """Load a checkpoint: into a rank that has no state yet or, at the leader's request, into
        all ranks. Raises: see `ReadCheckpoint`."""
        wpg = rank.wpg
        key = parse_source(wpg.key, request.source)
        if not request.load:
            directory = await asyncio.to_thread(self.checkpoints.existing, key, request.name)
            return await self._read(rank, request, directory)
        pinned = await asyncio.to_thread(
            self.checkpoints.pin, wpg.key, key, request.name, request.load
        )
        try:
            answer = await self._read(rank, request, pinned.directory)
        except BaseException:
            await asyncio.to_thread(unpin, pinned)
            raise
        if answer.names:
            await asyncio.to_thread(unpin, pinned)
        else:
            await asyncio.to_thread(self.checkpoints.prune_pins, wpg.key)
        return answer

    async def _read(self, rank: Rank, request: ReadCheckpoint, directory: Path) -> CheckpointRead:
        wpg = rank.wpg
        saved = await asyncio.to_thread(self._opened, request, directory)
        sha256 = ""  # a digest of weights depends on their names
        if saved.marker is not None and not request.places:
            sha256 = saved.marker.result.weights_sha256
        is_filling = rank.state is State.FILLING
        slots = [slot for r in ([rank] if is_filling else wpg.ranks) for slot in r.tensors]
        if request.places is None and (names := saved.other_names(slots)):
            return CheckpointRead("", names=names)
        await asyncio.to_thread(saved.check_fits, slots, request.places)
        if is_filling:
            return CheckpointRead(sha256, await self._fill(rank, saved))
        if rank.index:
            raise CallerError(
                f"only the leader loads checkpoints, not {rank}", code=Code.PERMISSION_DENIED
            )
        async with self.staging.room_for(wpg) as extents:
            both = zip(wpg.ranks, extents, strict=True)
            memories = {
                member: self.staging.view(extent, member.extent_bytes) for member, extent in both
            }
            digests = await _filled(saved, memories)
            memories.clear()
            await self._load(wpg, extents, digests)
        log.info("checkpoint %r of %s is loaded", request.name, wpg.key)
        return CheckpointRead(sha256)

    def _opened(self, request: ReadCheckpoint, directory: Path) -> SavedState:
        saved = SavedState(self.disk, directory, has_training=request.optimizer)
        if saved.is_adapter and request.adapter_config:
            saved.check_adapter(request.adapter_config)
        return saved

    async def open_saved(self, rank: Rank, request: OpenSaved) -> SavedOpened:
        """Describe the weights of a checkpoint. Raises: see `OpenSaved`."""
        saved = await self._saved(rank, request.source, request.name)
        config = ""
        if saved.is_adapter:
            config = await asyncio.to_thread(saved.adapter_config)
        operation = saved.marker.operation_id if saved.marker is not None else ""
        tensors = TensorTable.of(saved.weights).packed
        return SavedOpened(saved.identity, operation, tensors, config)

    async def read_saved(self, rank: Rank, request: ReadSaved) -> SavedRead:
        """Read a part of a checkpoint's weights. Raises: see `ReadSaved`."""
        if not 0 < request.num_bytes <= MAX_READ_BYTES or request.start < 0:
            label = f"{request.num_bytes} bytes from {request.start}"
            raise CallerError(label, field="num_bytes", remedy=f"read at most {MAX_READ_BYTES}")
        saved = await self._saved(rank, request.source, request.name)
        slots = saved.weights
        if request.as_held:
            slots = [slot for slot in rank.tensors if slot.role is Role.WEIGHT]
            await asyncio.to_thread(saved.check_fits, slots, request.places, are_all=False)
        memory = memoryview(bytearray(request.num_bytes))
        await asyncio.to_thread(saved.read, slots, request.start, memory)
        return SavedRead(bytes(memory))

    async def _saved(self, rank: Rank, source: str, name: str) -> SavedState:
        key = parse_source(rank.wpg.key, source)

        def opened() -> SavedState:
            directory = self.checkpoints.existing(key, name)
            return SavedState(self.disk, directory, has_training=False)

        try:
            return await asyncio.to_thread(opened)
        except ResourceError:
            # It may have been replaced or deleted while its files were opened.
            return await asyncio.to_thread(opened)

    async def _fill(self, rank: Rank, saved: SavedState) -> str:
        if rank.wpg.seal_seq or rank.extent is None:
            raise CallerError(f"{rank} expects no initial state", code=Code.FAILED_PRECONDITION)
        memory = self.staging.view(rank.extent, rank.extent_bytes)
        (digest,) = await _filled(saved, {rank: memory})
        return digest

    async def _load(self, wpg: Wpg, extents: list[int], digests: list[str]) -> None:
        """Have all ranks load their staged states. If one fails, the incarnation is over, because
        nobody knows what the other ranks hold."""
        sources = dict(zip(wpg.ranks, zip(extents, digests, strict=True), strict=True))

        async def load(rank: Rank) -> None:
            extent, digest = sources[rank]
            await self.ranks.order(rank, LoadStaged(digest), [self.memory[extent].fd])

        async with self.ranks.holding(wpg):
            for rank in wpg.ranks:
                if rank.state is not State.RESIDENT:
                    raise CallerError(f"{rank} is {rank.state}", code=Code.FAILED_PRECONDITION)
                await self.frozen.make_room(rank)
            try:
                await on_each_device(wpg.ranks, load)
            except PhaseloomError:
                self.ranks.retire(wpg, "a checkpoint was loaded in part")
                raise


async def _filled(saved: SavedState, memories: dict[Rank, memoryview]) -> list[str]:
    """Fill the memories of ranks from a checkpoint. Returns: the digest of each.

    Raises: ResourceError: the first failure, after all threads have ended.
    """
    fills = [asyncio.to_thread(_fill, saved, rank, m) for rank, m in memories.items()]
    digests = []
    for ended in await asyncio.gather(*fills, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        digests.append(ended)
    return digests


def _fill(saved: SavedState, rank: Rank, memory: memoryview) -> str:
    saved.fill(rank.tensors, memory)
    return digest_of(memory)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    num_bytes: int
    sums: FileSums | None
    """Checksums of the file's blocks; None: another program wrote the file."""
    entries: list[TensorEntry] = field(default_factory=list)


class SavedState:
    """An open checkpoint, whose index and headers are read and verified. Blocking: call it in a
    thread."""

    def __init__(self, disk: Disk, directory: Path, *, has_training: bool) -> None:
        """Open a checkpoint.

        Args:   has_training: whether to look for training state.
        Raises: ResourceError: DATA_LOSS, naming the file. CallerError: it holds no model.
        """
        self._disk = disk
        self._directory = directory
        try:
            self.marker = marker_of(directory)
        except (OSError, ValueError) as error:
            raise _data_loss(directory / MARKER_FILE, str(error)) from error
        self._files: dict[str, _File] = {}
        self._weights = self._tensors(MODEL)
        self.is_adapter = not self._weights
        self._weights = self._weights or self._tensors(ADAPTER)
        self._training = self._tensors(TRAINING) if has_training else {}
        if not self._weights:
            raise CallerError(
                f"checkpoint {directory.name!r} holds no model",
                code=Code.NOT_FOUND,
                field="args.name",
                remedy="name one that save_state has written",
            )

    @cached_property
    def identity(self) -> str:
        """Identifies exactly this checkpoint's files."""
        if self.marker is not None:
            return self.marker.operation_id
        # Files of another program can only be told from their replacements by size and time.
        stats = sorted((path.name, path.stat()) for path in self._directory.iterdir())
        described = [
            (name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            for name, stat in stats
        ]
        return f"files-{blake3(repr(described).encode()).hexdigest()[:16]}"

    @property
    def weights(self) -> list[TensorSlot]:
        """The whole tensors of its weights, laid out one after the other in the order of their
        names."""
        slots, end = [], 0
        for name, (_, entry) in sorted(self._weights.items()):
            slots.append(
                TensorSlot(name, Role.WEIGHT, entry.dtype, [*entry.shape], end, entry.num_bytes)
            )
            end += -(-entry.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return slots

    def adapter_config(self) -> str:
        """The content of an adapter's `adapter_config.json`. Raises: ResourceError: DATA_LOSS."""
        return self._small(self._directory / ADAPTER_CONFIG_FILE).decode(errors="replace")

    def check_adapter(self, config: str) -> None:
        """Check that the checkpoint's matrices mean the same under its config and another one.

        Args:   config: the `adapter_config.json` of the deployment that loads the checkpoint.
        Raises: CallerError: FAILED_PRECONDITION. ResourceError: DATA_LOSS.
        """
        try:
            layers = adapted_layers(self._weights)
            saved = AdapterConfig(self.adapter_config()).uniform_scaling(layers)
            expected = AdapterConfig(config).uniform_scaling(layers)
            if saved.rank != expected.rank or not math.isclose(saved.alpha, expected.alpha):
                raise ValueError(f"it has {saved}, this deployment {expected}")
        except ValueError as error:
            raise CallerError(
                f"this deployment cannot load the adapter of checkpoint {self._directory.name!r}: "
                f"{error}",
                code=Code.FAILED_PRECONDITION,
                field="args.name",
                remedy="start a deployment with this adapter's rank, alpha and layers, or merge "
                "the adapter into its base",
            ) from None

    def read(self, slots: Iterable[TensorSlot], start: int, memory: memoryview) -> None:
        """Read a part of a layout of its weights into memory, verified.

        Args:   slots: the layout.
                start: offset of the part in the layout.
        Raises: ResourceError: DATA_LOSS.
        """
        end = start + len(memory)
        pieces_by_file: dict[str, list[Piece]] = {}
        for slot in slots:
            if slot.offset >= end or slot.offset + slot.num_bytes <= start:
                continue
            file, entry = self._weights[slot.name]
            for run in slot_runs(0, slot):
                low, high = max(run.offset, start), min(run.offset + run.num_bytes, end)
                if low < high:
                    at = entry.offset + run.whole_offset + low - run.offset
                    piece = Piece(at, memory[low - start : high - start])
                    pieces_by_file.setdefault(file, []).append(piece)
        buffers = buffers_for_chunks()
        for name, pieces in pieces_by_file.items():
            self._fill_from(self._files[name], pieces, buffers)

    def other_names(self, slots: Iterable[TensorSlot]) -> list[str]:
        """Return the names of its weights, if they are not those of these tensors."""
        expected = {slot.name for slot in slots if slot.role is Role.WEIGHT}
        return [] if self.is_adapter or expected == self._weights.keys() else [*self._weights]

    def check_fits(
        self,
        slots: Iterable[TensorSlot],
        places: Places | None = None,
        *,
        are_all: bool = True,
    ) -> None:
        """Check that the checkpoint is of the model that has these tensors.

        Args:   places: where the files have each tensor; None or empty: under its own name.
                are_all: whether they are all of its tensors.
        Raises: CallerError: FAILED_PRECONDITION: it is of another model, or a slot is unsound.
                ResourceError: DATA_LOSS.
        """
        all_slots = list(slots)
        if unsound := next((slot.name for slot in all_slots if not is_sound(slot)), None):
            raise CallerError(
                f"{unsound}: its shape, position and size contradict each other",
                code=Code.FAILED_PRECONDITION,
                field=f"tensors[{unsound}]",
            )
        weights: Expected = {}
        training: Expected = {}
        for slot in all_slots:
            group = weights if slot.role is Role.WEIGHT else training
            group[slot.name] = (slot.dtype, global_shape(slot))
        if places:
            placed = {name: shape for name, (_, shape) in weights.items() if name in places}
            self._weights = {n: self._placed(n, shape, places[n]) for n, shape in placed.items()}
        stored = self._weights
        if not are_all:
            stored = {name: stored[name] for name in weights if name in stored}
        _check_same(MODEL, stored, weights)
        if training and self._training:
            _check_same(TRAINING, self._training, training)

    def _placed(
        self, name: str, shape: tuple[int, ...], places: list[StoredTensor]
    ) -> tuple[str, TensorEntry]:
        """Return the file of a tensor and its entry there. Raises: as `check_fits`."""
        copies = []
        for place in places:
            file, whole = self._weights.get(place.name, ("", None))
            if whole is None or whole.shape != tuple(place.shape):
                raise _misfit(
                    f"expected {place.name} with shape {place.shape}, got "
                    f"{whole and [*whole.shape]}"
                )
            offset = whole.offset + place.first * item_bytes(whole.dtype)
            copies.append((file, TensorEntry(name, whole.dtype, shape, offset)))
            if place.first < 0 or copies[-1][1].end > whole.end:
                raise _misfit(f"{place.name} does not hold {name}")
        for copy in copies[1:]:
            if not self._is_same(copies[0], copy):
                raise _misfit(f"the config ties {name}, but the files have two different values")
        return copies[0]

    def _is_same(self, one: tuple[str, TensorEntry], other: tuple[str, TensorEntry]) -> bool:
        """Whether two tensors of the files have the same bytes."""
        buffers, num_bytes = buffers_for_chunks(), one[1].num_bytes
        for start in range(0, num_bytes, CHUNK_BYTES):
            contents = []
            for file, entry in (one, other):
                content = memoryview(bytearray(min(CHUNK_BYTES, num_bytes - start)))
                pieces = [Piece(entry.offset + start, content)]
                self._fill_from(self._files[file], pieces, buffers)
                contents.append(content)
            if contents[0] != contents[1]:
                return False
        return one[1].dtype == other[1].dtype

    def fill(self, slots: Iterable[TensorSlot], memory: memoryview) -> None:
        """Write a rank's slices to their places in its memory, and zeroes everywhere else.

        Training state becomes zeroes if the checkpoint has none.
        """
        pieces_by_file: dict[str, list[Piece]] = {}
        for slot in slots:
            group = self._weights if slot.role is Role.WEIGHT else self._training
            if slot.name not in group:
                continue
            file, entry = group[slot.name]
            pieces_by_file.setdefault(file, []).extend(
                Piece(
                    entry.offset + run.whole_offset, memory[run.offset : run.offset + run.num_bytes]
                )
                for run in slot_runs(0, slot)
            )
        ctypes.memset(address(memory), 0, len(memory))
        buffers = buffers_for_chunks()
        for name, pieces in pieces_by_file.items():
            self._fill_from(self._files[name], pieces, buffers)

    def _fill_from(
        self, file: _File, pieces: list[Piece], buffers: queue.SimpleQueue[memoryview]
    ) -> None:
        chunks = chunks_of(sorted(pieces, key=lambda piece: piece.file_offset))
        with self._opened(file) as opened, threads(DEPTH) as reading:

            def read(start: int, chunk: list[Piece]) -> None:
                buffer = buffers.get()
                try:
                    base = address(buffer)
                    self._read_chunk(file, opened, start, _span(start, chunk), buffer)
                    for piece in chunk:
                        source = base + piece.file_offset - start
                        ctypes.memmove(address(piece.memory), source, len(piece.memory))
                finally:
                    buffers.put(buffer)

            for future in [reading.submit(read, start, chunk) for start, chunk in chunks]:
                future.result()

    def _read_chunk(
        self,
        file: _File,
        opened: BlockFile,
        start: int,
        blocks: tuple[int, int],
        buffer: memoryview,
    ) -> None:
        """Fill a buffer, which begins at offset `start` of the file, with verified blocks.

        Args: blocks: (offset of the first block, offset after the last), in the file.
        """
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
        for number, checksum in enumerate(checksums(chunk), start=begin // BLOCK_BYTES):
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

    def _tensors(self, stem: str) -> dict[str, tuple[str, TensorEntry]]:
        """The file of each tensor and its entry there, by the tensor's name; empty: there are no
        files with this stem.

        Raises: CallerError: see `model_weights`. ResourceError: DATA_LOSS.
        """

        def read(name: str) -> bytes:
            return self._small(self._directory / name)

        index = self._directory / index_name(stem)
        try:
            if stem == MODEL:
                files = model_weights(self._has, read)
            else:
                files = weight_files(stem, self._has, read)
            if files is None:
                return {}
            entries = [(name, entry) for name in files.names for entry in self._entries(name)]
            files.check_tensors(entry.name for _, entry in entries)
        except ValueError as error:
            raise _data_loss(index, str(error)) from error
        return {entry.name: (name, entry) for name, entry in entries}

    def _has(self, name: str) -> bool:
        if self.marker is None:
            return (self._directory / name).is_file()
        return name in self.marker.files

    def _sums(self, name: str) -> FileSums | None:
        """The checksums of a file; None: another program wrote the checkpoint.

        Raises: ResourceError: DATA_LOSS: the marker does not name the file.
        """
        if self.marker is None:
            return None
        if name not in self.marker.files:
            raise _data_loss(self._directory / name, f"{MARKER_FILE} does not list it")
        return self.marker.files[name]

    def _small(self, path: Path) -> bytes:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _data_loss(path, error.strerror or repr(error)) from error
        sums = self._sums(path.name)
        if sums is not None and sums != sums_of(content):
            raise _data_loss(path, "its checksum does not match")
        return content

    def _entries(self, name: str) -> list[TensorEntry]:
        path = self._directory / name
        sums = self._sums(name)
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
        # The header's blocks are verified only now, when an error can name the tensors.
        last = min(-(-(LENGTH_BYTES + length) // BLOCK_BYTES) * BLOCK_BYTES, file.num_bytes)
        with self._opened(file) as verified:
            for start in range(0, last, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, last)
                buffer = memoryview(bytearray(stop - start))
                self._read_chunk(file, verified, start, (start, stop), buffer)
        self._files[name] = file
        return file.entries

    def _loss(self, file: _File, reason: str, start: int, end: int) -> ResourceError:
        first = min((entry.offset for entry in file.entries), default=file.num_bytes)
        header = TensorEntry("its header", "uint8", (first,), 0)
        named = names_within([header, *file.entries], start, end)
        return _data_loss(file.path, f"{named}, bytes {start} to {end}: {reason}", offset=start)


Expected = dict[str, tuple[str, tuple[int, ...]]]
"""The dtype and whole shape of each tensor, by name."""


def _check_same(
    stem: str,
    stored: Mapping[str, tuple[str, TensorEntry]],
    expected: Expected,
) -> None:
    actual = {name: (entry.dtype, entry.shape) for name, (_, entry) in stored.items()}
    if actual == expected:
        return
    names = sorted(actual.keys() | expected.keys())
    differing = [name for name in names if actual.get(name) != expected.get(name)]
    first = differing[0]
    raise _misfit(
        f"the checkpoint's {stem} does not fit: {len(differing)} tensors differ, first {first}: "
        f"expected {_label(expected.get(first))}, got {_label(actual.get(first))}"
    )


def _label(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]}{[*tensor[1]]}"


def _misfit(problem: str) -> CallerError:
    return CallerError(
        problem,
        code=Code.FAILED_PRECONDITION,
        field="args.name",
        remedy="load a checkpoint of the same architecture",
    )


def _span(start: int, pieces: list[Piece]) -> tuple[int, int]:
    """The blocks with the pieces of a chunk: (offset of the first, offset after the last)."""
    first = pieces[0].file_offset // BLOCK_BYTES * BLOCK_BYTES
    last = max(piece.end for piece in pieces)
    return first, min(-(-last // BLOCK_BYTES) * BLOCK_BYTES, start + CHUNK_BYTES)


def _data_loss(path: Path, reason: str, **details: int) -> ResourceError:
    return ResourceError(
        f"{path.name} of checkpoint {path.parent.name!r}: {reason}",
        code=Code.DATA_LOSS,
        field="args.name",
        details={"file": path, **details},
        remedy="load another checkpoint",
    )
