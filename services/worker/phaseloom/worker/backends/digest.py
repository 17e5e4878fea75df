"""The digest of a model's weights, by which saves, demos and tests compare models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def weights_sha256(arrays: Iterable[tuple[str, np.ndarray[Any, Any]]], dtype: str = "") -> str:
    r"""Return the SHA-256, in hex, over (name, dtype, shape, little-endian bytes) of each tensor.

    Each tensor starts with a header, the UTF-8 text `<name>\n<dtype>\n<d0>,<d1>,…\n`. The header
    gives the size of the content, so no two different models produce the same input.

    Args: arrays: sorted by name, C-contiguous, little-endian.
          dtype: the dtype of all arrays, if numpy lacks it; otherwise each array's own is used.
    """
    digest = hashlib.sha256()
    for name, array in arrays:
        shape = ",".join(str(size) for size in array.shape)
        digest.update(f"{name}\n{dtype or array.dtype.name}\n{shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()
