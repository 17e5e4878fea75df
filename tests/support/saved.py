"""A backend's state as a checkpoint's files and back, as the state manager does it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.statemgr.checkpoints.loading import SavedState
from phaseloom.statemgr.checkpoints.shards import write_state
from phaseloom.statemgr.disk.disk import Disk
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.backends.model import model_names
from phaseloom.worker.state.heap import Heap

FILE_BYTES = 10**9


def save(backend: Backend, heap: Heap, directory: Path, file_bytes: int = FILE_BYTES) -> str:
    """The SHA-256 of its weights."""
    return save_ranks([(backend.slots, heap.buffer)], backend.config, directory, file_bytes)


def load(backend: Backend, heap: Heap, directory: Path, model: ModelSpec | None = None) -> None:
    """Args: model: the deployment's, if the files may have other names than its state.
    Raises: PhaseloomError: nothing was changed."""
    (content,) = load_ranks([(backend.slots, heap.num_bytes)], directory, model)
    heap.buffer[:] = content
    backend.weights_changed()


def save_ranks(
    ranks: Sequence[tuple[list[TensorSlot], memoryview | bytes]],
    config: dict[str, Any],
    directory: Path,
    file_bytes: int = FILE_BYTES,
) -> str:
    """Args: ranks: what each holds, and its memory."""
    memories = [(slots, memoryview(bytearray(memory))) for slots, memory in ranks]
    text = json.dumps(config)
    never = threading.Event()
    written = write_state(
        Disk(directory), directory, memories, text, file_bytes=file_bytes, cancelled=never
    )
    return written.weights_sha256


def load_ranks(
    ranks: Sequence[tuple[list[TensorSlot], int]],
    directory: Path,
    model: ModelSpec | None = None,
) -> list[memoryview]:
    """Args: ranks: what each holds, and in how many bytes. Returns: the memory of each."""
    saved = SavedState(Disk(directory), directory, has_training=True)
    all_slots = [slot for slots, _ in ranks for slot in slots]
    names = saved.other_names(all_slots)
    saved.check_fits(all_slots, model_names(model).locate(names) if model and names else None)
    memories = [memoryview(bytearray(num_bytes)) for _, num_bytes in ranks]
    for (slots, _), memory in zip(ranks, memories, strict=True):
        memory[:] = b"\xff" * len(memory)
        saved.fill(slots, memory)
    return memories
