"""Files through kvikio, where `probing` finds that it works. It is imported nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from phaseloom.statemgr.disk.blockfile import BufferedFile


class KvikioFile(BufferedFile):
    """kvikio splits a block over its own threads; the file itself is made and ended as any."""

    def __init__(self, path: Path, *, writable: bool, num_bytes: int = 0) -> None:
        """Raises: OSError; whatever kvikio raises."""
        from kvikio import CuFile

        super().__init__(path, writable=writable, num_bytes=num_bytes)
        try:
            self._file = CuFile(os.fspath(path), "r+" if writable else "r")
        except BaseException:
            super().close()
            raise

    def write(self, block: memoryview, offset: int) -> None:
        done = self._file.write(block, size=len(block), file_offset=offset)
        super().write(block[done:], offset + done)

    def read(self, block: memoryview, offset: int) -> int:
        # It refuses to read across the end of a file.
        there = max(0, min(len(block), os.fstat(self._fd).st_size - offset))
        done: int = self._file.read(block[:there], size=there, file_offset=offset) if there else 0
        return done + super().read(block[done:], offset + done)

    def close(self) -> None:
        self._file.close()
        super().close()
