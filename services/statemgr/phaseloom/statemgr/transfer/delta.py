"""The difference between two weights versions, as their changed elements. Pure.

A step with a small learning rate leaves most bfloat16 weights unchanged and changes the others
slightly. The changed elements are scattered: nearly every block of a few KiB has one. So a delta
consists of two parts. The first is deflated: the number of changed elements in each block of 256
elements, then old XOR new for each changed element. The second is raw: the position of each changed
element in its block. An element is two bytes for every dtype.

Applying a delta to the base version's bytes gives exactly the new bytes. A checksum of the new
bytes travels with it and proves that both ends had the same base.

Importing numpy takes a tenth of a second, so it is imported only once a sample shows that a delta
may pay off. Without numpy (`is_available`) everything is sent whole.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BLOCK = 256
"""Elements in one block, so that a position in the block is one byte."""
_ELEMENT_BYTES = 2
_SAMPLES = 256
"""Elements to compare first, as an estimate of how many have changed."""
_MIN_EVERY = 32
"""Take a sample only if it skips at least this many elements; otherwise compare all."""
_STRATEGY = zlib.Z_HUFFMAN_ONLY
"""Deflate by byte frequency only. The XORs hardly repeat, and searching for repeats takes a third
more time."""


class DeltaError(Exception):
    """A delta does not fit the base: it is corrupt, or of another base."""


@functools.cache
def is_available() -> bool:
    """Whether this environment can make and apply deltas."""
    return find_spec("numpy") is not None


def encode(base: memoryview, content: memoryview, limit_bytes: int) -> bytes | None:
    """Return the delta from `base` to `content`, which have the same length.

    Args:    limit_bytes: the largest useful delta.
    Returns: None: the delta would probably be larger.
    Cost:    if most elements have changed, one comparison of a sample.
    """
    assert len(base) == len(content)
    if _num_changed(base, content) > limit_bytes:
        return None
    import numpy as np

    old, new = _elements(base), _elements(content)
    is_changed = old != new
    # The position of each changed element takes one byte.
    if np.count_nonzero(is_changed) > limit_bytes:
        return None
    changed = np.flatnonzero(is_changed)
    counts = np.bincount(changed // _BLOCK, minlength=_num_blocks(len(base)))
    offsets = (changed % _BLOCK).astype(np.uint8)
    xors = old[changed] ^ new[changed]
    tail = bytes(content[len(content) // _ELEMENT_BYTES * _ELEMENT_BYTES :])
    deflating = zlib.compressobj(1, strategy=_STRATEGY)
    body = deflating.compress(b"".join([counts.astype("<u2").tobytes(), xors.tobytes(), tail]))
    delta = b"".join([body, deflating.flush(), offsets.tobytes()])
    return delta if len(delta) <= limit_bytes else None


def _num_changed(base: memoryview, content: memoryview) -> int:
    """Estimate the number of changed elements from a sample; 0: too few elements to sample."""
    every = len(base) // _ELEMENT_BYTES // _SAMPLES
    if every < _MIN_EVERY:
        return 0
    # Rows of matrices mostly have an even length, so an odd step visits all columns.
    step = _ELEMENT_BYTES * (every | 1)
    old, new = (zip(memory[::step], memory[1::step], strict=False) for memory in (base, content))
    return every * sum(then != now for then, now in zip(old, new, strict=True))


def apply(base: memoryview, delta: memoryview) -> memoryview:
    """Apply a delta to `base`.

    Raises: DeltaError: it is not a delta for this many bytes.
    """
    import numpy as np

    num_blocks, num_elements = _num_blocks(len(base)), len(base) // _ELEMENT_BYTES
    num_tail = len(base) % _ELEMENT_BYTES
    # The size of a delta in which every element has changed.
    limit_bytes = 2 * num_blocks + _ELEMENT_BYTES * num_elements + num_tail
    body, tail = _inflated(delta, limit_bytes)
    if len(body) < 2 * num_blocks:
        raise DeltaError(f"a delta of {num_blocks} blocks needs more than {len(body)} bytes")
    counts = np.frombuffer(body, "<u2", num_blocks)
    total = int(counts.sum())
    if len(body) != 2 * num_blocks + _ELEMENT_BYTES * total + num_tail or len(tail) != total:
        raise DeltaError(f"{total} changed elements, but {len(tail)} positions")
    offsets = np.frombuffer(tail, np.uint8)
    xors = np.frombuffer(body, "<u2", total, 2 * num_blocks)
    changed = np.repeat(np.arange(num_blocks) * _BLOCK, counts) + offsets
    if total and changed.max() >= num_elements:
        raise DeltaError(f"changed element {changed.max()} is beyond the last of {num_elements}")
    content = bytearray(base)
    elements = _elements(memoryview(content))
    elements[changed] ^= xors
    if num_tail:
        content[-num_tail:] = body[-num_tail:]
    return memoryview(content)


def joined(memories: Sequence[memoryview]) -> memoryview:
    """The memories end to end; a single memory is not copied."""
    return memories[0] if len(memories) == 1 else memoryview(b"".join(memories))


def _num_blocks(num_bytes: int) -> int:
    return -(-(num_bytes // _ELEMENT_BYTES) // _BLOCK)


def _elements(memory: memoryview) -> NDArray[np.uint16]:
    import numpy as np

    return np.frombuffer(memory, "<u2", len(memory) // _ELEMENT_BYTES)


def _inflated(delta: memoryview, limit_bytes: int) -> tuple[bytes, bytes]:
    """Inflate the first part of a delta. Returns: it, and the raw part."""
    inflating = zlib.decompressobj()
    try:
        body = inflating.decompress(delta, limit_bytes + 1)
    except zlib.error as error:
        raise DeltaError(str(error)) from error
    if not inflating.eof or len(body) > limit_bytes:
        raise DeltaError(f"it does not inflate to at most {limit_bytes} bytes")
    return body, inflating.unused_data
