"""Directories of the processes that a test starts, kept after it where `KEEP` is set."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose name is short enough for Unix sockets, unlike that of `tmp_path`."""
    directory = Path(tempfile.mkdtemp(prefix="pl-"))
    try:
        yield directory
    finally:
        if os.environ.get("KEEP"):
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory)
