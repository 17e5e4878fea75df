"""The difference between two weights versions, as their changed elements.

Pure. A step with a small learning rate leaves most weights in bfloat16 as they are, and changes the
others by little; the changed ones are scattered, so that nearly every block of some KiB has one. So
a delta has for each block of 256 elements of two bytes, whatever the dtype of the tensors is, how
many have changed, then their places in the blocks, then their old value XOR their new one. The
delta is deflated. Applied to the base version's bytes it gives the new bytes, exactly; a checksum
of those, which travels beside the delta, proves that both ends had the same base.

The module computes with numpy, which is imported with the first delta. Where numpy is not installed
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
_STRATEGY = zlib.Z_HUFFMAN_ONLY
"""What deflate saves is in the bytes that are frequent: few XORs differ. It finds no repeats, and
takes a third more time to look for them."""


class DeltaError(Exception):
    """A delta does not fit the base: it is garbage, or of another base."""


@functools.cache
def is_available() -> bool:
    """Whether deltas can be made and applied in this environment."""
    return find_spec("numpy") is not None


def encode(base: memoryview, content: memoryview, limit_bytes: int) -> bytes | None:
    """The delta that makes `content` of `base`, which has as many bytes.

    Args:    limit_bytes: the most bytes that the delta may have.
    Returns: None: the delta would have more.
    Cost:    where most elements have changed, one comparison of all bytes.
    """
    import numpy as np

    assert len(base) == len(content)
    old, new = _elements(base), _elements(content)
    is_changed = old != new
    # A place takes a byte that hardly deflates.
    if np.count_nonzero(is_changed) > limit_bytes:
        return None
    changed = np.flatnonzero(is_changed)
    counts = np.bincount(changed // _BLOCK, minlength=_num_blocks(len(base)))
    places = (changed % _BLOCK).astype(np.uint8)
    xors = old[changed] ^ new[changed]
    tail = bytes(content[len(content) // _ELEMENT_BYTES * _ELEMENT_BYTES :])
    body = b"".join([counts.astype("<u2").tobytes(), places.tobytes(), xors.tobytes(), tail])
    deflating = zlib.compressobj(1, strategy=_STRATEGY)
    delta = deflating.compress(body) + deflating.flush()
    return delta if len(delta) <= limit_bytes else None


def apply(base: memoryview, delta: memoryview) -> memoryview:
    """The bytes that the delta makes of `base`.

    Raises: DeltaError: it is no delta of so many bytes.
    """
    import numpy as np

    num_blocks, num_elements = _num_blocks(len(base)), len(base) // _ELEMENT_BYTES
    num_tail = len(base) % _ELEMENT_BYTES
    # A delta that changes everything; what inflates to more is none.
    most = 2 * num_blocks + (1 + _ELEMENT_BYTES) * num_elements + num_tail
    body = _inflated(delta, most)
    if len(body) < 2 * num_blocks:
        raise DeltaError(f"a delta of {len(body)} bytes for {num_blocks} blocks")
    counts = np.frombuffer(body, "<u2", num_blocks)
    total = int(counts.sum())
    if len(body) != 2 * num_blocks + (1 + _ELEMENT_BYTES) * total + num_tail:
        raise DeltaError(f"{total} changed elements in a delta of {len(body)} bytes")
    places = np.frombuffer(body, np.uint8, total, 2 * num_blocks)
    xors = np.frombuffer(body, "<u2", total, 2 * num_blocks + total)
    changed = np.repeat(np.arange(num_blocks) * _BLOCK, counts) + places
    if total and changed.max() >= num_elements:
        raise DeltaError(f"element {changed.max()} of {num_elements}")
    made = bytearray(base)
    elements = _elements(memoryview(made))
    elements[changed] ^= xors
    if num_tail:
        made[-num_tail:] = body[-num_tail:]
    return memoryview(made)


def joined(memories: Sequence[memoryview]) -> memoryview:
    """The memories end to end: a copy, unless there is one only."""
    return memories[0] if len(memories) == 1 else memoryview(b"".join(memories))


def _num_blocks(num_bytes: int) -> int:
    return -(-(num_bytes // _ELEMENT_BYTES) // _BLOCK)


def _elements(memory: memoryview) -> NDArray[np.uint16]:
    import numpy as np

    return np.frombuffer(memory, "<u2", len(memory) // _ELEMENT_BYTES)


def _inflated(delta: memoryview, most: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        body = inflating.decompress(delta, most + 1)
    except zlib.error as error:
        raise DeltaError(str(error)) from error
    if not inflating.eof or inflating.unused_data or len(body) > most:
        raise DeltaError(f"it inflates to something else than {most} bytes at most")
    return body
