"""Atomic writes of small files: settings, credentials, keys.

A file is fsynced before it gets its name, so neither a killed process nor a power failure leaves a
partial file.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

PRIVATE = 0o600


def replace_file(file: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write a file atomically, replacing an existing one. Raises: OSError.

    Args:   mode: permissions; by default only the owner can read the file.
    """
    # The name includes the thread: a thread whose task was cancelled may still be writing.
    partial = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_native_id()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(content)
            output.flush()
            os.fsync(output.fileno())
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
