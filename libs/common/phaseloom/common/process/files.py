"""Atomic writes of small files: settings, credentials, keys.

A file is fsynced before it gets its name, and its directory afterwards. So neither a killed process
nor a power failure leaves a partial file, and a file that was reported as written stays.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from phaseloom.common.contract.errors import CallerError, Code

log = logging.getLogger(__name__)

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
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_json(file: Path, kind: Any, remedy: str) -> Any:
    """Read a JSON file that a command of ours wrote.

    Raises: FileNotFoundError. CallerError: FAILED_PRECONDITION: the file is damaged or unreadable.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(
            f"{file} is damaged: {error}",
            code=Code.FAILED_PRECONDITION,
            field=file.name,
            remedy=remedy,
        ) from None


@contextmanager
def locked(file: Path, error: CallerError) -> Iterator[None]:
    """Lock a file against other processes within the block.

    The kernel releases the lock when this process ends for any reason. If the file cannot be locked
    (a file system without locks, or a read-only directory), the block runs without a lock after a
    warning in the log.

    Raises: CallerError: `error`: another process has locked the file.
    """
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(file.open("wb"))
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise error from None
        except OSError as problem:
            log.warning("cannot lock %s against other processes: %s", file, problem.strerror)
        yield
