"""The digest of a model's weights: the one definition that saves, demos and tests compare by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def weights_sha256(arrays: Iterable[tuple[str, np.ndarray[Any, Any]]], dtype: str = "") -> str:
    """SHA-256 in hex over (name, dtype, shape, little-endian bytes) of each tensor.

    The header of a tensor is the UTF-8 text `<name>\\n<dtype>\\n<d0>,<d1>,…\\n`; its size follows
    from it, so that no two different models give the same input.

    Args: arrays: sorted by name, C-contiguous, little-endian.
          dtype: of all of them, where numpy has no such dtype; else as each array says.
    """
    digest = hashlib.sha256()
    for name, array in arrays:
        shape = ",".join(str(size) for size in array.shape)
        digest.update(f"{name}\n{dtype or array.dtype.name}\n{shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()
