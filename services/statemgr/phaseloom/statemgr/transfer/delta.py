"""The difference between two weights versions, as their changed elements.

Pure. A step with a small learning rate leaves most weights in bfloat16 as they are, and changes the
others by little; the changed ones are scattered, so that nearly every block of some KiB has one. So
a delta has, deflated, how many of each block of 256 elements have changed, and the old value XOR
the new one of these; then, as they are, their places in the blocks. An element is two bytes,
whatever the dtype of the tensors is. Applied to the base version's bytes a delta gives the new
bytes, exactly; a checksum of those, which travels beside it, proves that both ends had the same
base.

The module computes with numpy, which takes a tenth of a second to import: it is imported with the
first content of which a sample says that a delta may be worth it. Where numpy is not installed
(`is_available`), nothing is sent as a delta.
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
"""Elements in one block: a place in it is one byte."""
_ELEMENT_BYTES = 2
_SAMPLES = 256
"""The elements that are compared first, to see whether most have changed."""
_MIN_EVERY = 32
"""The least number of elements of which one is compared: fewer are all compared at once."""
_STRATEGY = zlib.Z_HUFFMAN_ONLY
"""The strategy of Deflate that only uses how frequent each byte is. There are few repeats in the
XORs, and to look for them takes a third more time."""


class DeltaError(Exception):
    """A delta does not fit the base: it is garbage, or of another base."""


@functools.cache
def is_available() -> bool:
    """Whether deltas can be made and applied in this environment."""
    return find_spec("numpy") is not None


def encode(base: memoryview, content: memoryview, limit_bytes: int) -> bytes | None:
    """The delta that makes `content` of `base`, which has as many bytes.

    Args:    limit_bytes: the most bytes that the delta may have.
    Returns: None: the delta would have more, by all signs.
    Cost:    where most elements have changed, one comparison of a sample of the bytes.
    """
    assert len(base) == len(content)
    if _num_changed(base, content) > limit_bytes:
        return None
    import numpy as np

    old, new = _elements(base), _elements(content)
    is_changed = old != new
    # Each changed element takes a byte at least: its place.
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
    """The estimated number of changed elements, from a sample; 0: there are too few elements."""
    every = len(base) // _ELEMENT_BYTES // _SAMPLES
    if every < _MIN_EVERY:
        return 0
    # An odd step meets all columns of a matrix, whose rows mostly have an even number of elements.
    step = _ELEMENT_BYTES * (every | 1)
    old, new = (zip(memory[::step], memory[1::step], strict=False) for memory in (base, content))
    return every * sum(then != now for then, now in zip(old, new, strict=True))


def apply(base: memoryview, delta: memoryview) -> memoryview:
    """The bytes that the delta makes of `base`.

    Raises: DeltaError: it is no delta of so many bytes.
    """
    import numpy as np

    num_blocks, num_elements = _num_blocks(len(base)), len(base) // _ELEMENT_BYTES
    num_tail = len(base) % _ELEMENT_BYTES
    # What inflates to more changes more than everything.
    limit_bytes = 2 * num_blocks + _ELEMENT_BYTES * num_elements + num_tail
    body, tail = _inflated(delta, limit_bytes)
    if len(body) < 2 * num_blocks:
        raise DeltaError(f"a delta of {len(body)} bytes for {num_blocks} blocks")
    counts = np.frombuffer(body, "<u2", num_blocks)
    total = int(counts.sum())
    if len(body) != 2 * num_blocks + _ELEMENT_BYTES * total + num_tail or len(tail) != total:
        raise DeltaError(f"{total} changed elements, and {len(tail)} places")
    offsets = np.frombuffer(tail, np.uint8)
    xors = np.frombuffer(body, "<u2", total, 2 * num_blocks)
    changed = np.repeat(np.arange(num_blocks) * _BLOCK, counts) + offsets
    if total and changed.max() >= num_elements:
        raise DeltaError(f"element {changed.max()} of {num_elements}")
    content = bytearray(base)
    elements = _elements(memoryview(content))
    elements[changed] ^= xors
    if num_tail:
        content[-num_tail:] = body[-num_tail:]
    return memoryview(content)


def joined(memories: Sequence[memoryview]) -> memoryview:
    """The memories end to end: a copy, unless there is one only."""
    return memories[0] if len(memories) == 1 else memoryview(b"".join(memories))


def _num_blocks(num_bytes: int) -> int:
    return -(-(num_bytes // _ELEMENT_BYTES) // _BLOCK)


def _elements(memory: memoryview) -> NDArray[np.uint16]:
    import numpy as np

    return np.frombuffer(memory, "<u2", len(memory) // _ELEMENT_BYTES)


def _inflated(delta: memoryview, limit_bytes: int) -> tuple[bytes, bytes]:
    """The deflated beginning of a delta, inflated, and the bytes that follow it."""
    inflating = zlib.decompressobj()
    try:
        body = inflating.decompress(delta, limit_bytes + 1)
    except zlib.error as error:
        raise DeltaError(str(error)) from error
    if not inflating.eof or len(body) > limit_bytes:
        raise DeltaError(f"it inflates to something else than {limit_bytes} bytes at most")
    return body, inflating.unused_data
