"""How `phaseloom model convert` and `phaseloom model merge` make a directory: whole, or not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phaseloom.common.contract.errors import CallerError, Code


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A place beside a directory, to write it in; it is renamed when the block ends.

    So the directory appears whole, and one that is there need not be made again. A block that
    fails leaves nothing.

    Raises: CallerError: ALREADY_EXISTS: the directory is there; FAILED_PRECONDITION: it cannot be
            made.
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
        partial.mkdir(parents=True)
        partial.rmdir()
    except OSError as error:
        raise CallerError(
            f"{directory} cannot be created: {error.strerror}",
            code=Code.FAILED_PRECONDITION,
            field="directory",
            remedy="name a directory where you may write",
        ) from None
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(directory)
