"""Creation of a new directory that appears only when it is complete."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary path. It becomes `directory` if the block succeeds.

    The block creates and fills the temporary path. If the block fails, nothing remains. All files
    get the permissions that the umask allows: safetensors makes private files, and copies have the
    permissions of their sources.

    Raises: CallerError: ALREADY_EXISTS: the directory exists; FAILED_PRECONDITION: it cannot be
                created.
    """
    if directory.exists():
        raise CallerError(
            f"{directory} already exists",
            code=Code.ALREADY_EXISTS,
            field="directory",
            remedy="name a directory that does not exist yet",
        )
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # Fails now instead of after minutes of work if the directory cannot be created.
        partial.mkdir(parents=True)
        mode = stat.S_IMODE(partial.stat().st_mode)
        partial.rmdir()
    except OSError as error:
        raise CallerError(
            f"{directory} cannot be created: {error.strerror}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="name a directory in a place where you may write",
        ) from None
    try:
        yield partial
        for path in (partial, *partial.rglob("*")):
            path.chmod(mode if path.is_dir() else mode & 0o666)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(directory)
