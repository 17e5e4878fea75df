"""Small files that are always whole: settings, credentials, keys.

Each is on disk before it has its name, so that neither a killed process nor a power cut leaves a
part of it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

PRIVATE = 0o600


def replace_file(file: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write a file in place of the one that has its name, if any. Raises: OSError.

    Args: mode: who may read it; its owner alone by default.
    """
    # Each thread has a name of its own: one whose task was cancelled may write still.
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
