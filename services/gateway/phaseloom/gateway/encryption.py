"""Files encrypted for age recipients (https://age-encryption.org) while they are downloaded."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from phaseloom.client import CallerError, Code, PhaseloomError, ResourceError

SUFFIX = ".age"
MAX_RECIPIENTS = 10
_FIELD = "age_encryption_recipients"
_MAX_KEY_CHARS = 4096
_QUEUED_PARTS = 4

T = TypeVar("T")


def recipients_of(keys: list[str]) -> list[Any]:
    """Read the public keys of recipients.

    Raises: CallerError: a key is invalid, there are too many, or pyrage is not installed.
    """
    try:
        import pyrage
    except ImportError as error:
        raise CallerError(
            "this gateway cannot encrypt files: pyrage is not installed",
            code=Code.FAILED_PRECONDITION,
            field=_FIELD,
            remedy="omit it, or ask the operator to install phaseloom[age]",
        ) from error
    if not 1 <= len(keys) <= MAX_RECIPIENTS:
        raise CallerError(
            f"{_FIELD} must have 1 to {MAX_RECIPIENTS} keys, got {len(keys)}",
            field=_FIELD,
            remedy=f"give 1 to {MAX_RECIPIENTS} keys, or omit it to save without encryption",
        )
    recipients = []
    for index, key in enumerate(keys):
        kind = pyrage.ssh if key.startswith("ssh-") else pyrage.x25519
        try:
            if len(key) > _MAX_KEY_CHARS:
                raise ValueError(f"it has more than {_MAX_KEY_CHARS} characters")
            recipients.append(kind.Recipient.from_str(key))
        except (pyrage.RecipientError, ValueError) as error:
            raise CallerError(
                f"expected an age or SSH public key: {error}",
                field=f"{_FIELD}[{index}]",
                remedy="give a key that starts with age1, ssh-ed25519 or ssh-rsa",
            ) from error
    return recipients


async def encrypted(content: AsyncIterator[bytes], keys: list[str]) -> AsyncIterator[bytes]:
    """Encrypt a file, holding a few parts of it in memory.

    Raises: PhaseloomError: the file cannot be read to its end, or as `recipients_of`.
    """
    recipients = recipients_of(keys)
    stream = _Stream(content)
    # A thread of its own, because it waits for the caller. Open archives bound the number of them.
    thread = ThreadPoolExecutor(1)
    working = asyncio.get_running_loop().run_in_executor(thread, stream.encrypt_for, recipients)
    working.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        while part := await stream.parts.get():
            yield part
        await working
    except PhaseloomError:
        raise
    except Exception as error:
        raise stream.error or ResourceError(f"the file cannot be encrypted: {error}") from error
    finally:
        stream.close()
        thread.shutdown(wait=False)


class _Stream:
    """The source and the target of an encryption, which runs in a thread."""

    def __init__(self, content: AsyncIterator[bytes]) -> None:
        self.parts: asyncio.Queue[bytes] = asyncio.Queue(_QUEUED_PARTS)
        """Encrypted parts; an empty one is the end."""
        self.error: PhaseloomError | None = None
        """The reason why the content could not be read."""
        self._content = content
        self._loop = asyncio.get_running_loop()
        self._unread = io.BytesIO()
        self._pending: Future[Any] | None = None
        self._is_closed = False

    def encrypt_for(self, recipients: list[Any]) -> None:
        import pyrage

        try:
            pyrage.encrypt_io(self, self, recipients)
        finally:
            if not self._is_closed:
                self._wait(self.parts.put(b""))

    def read(self, num_bytes: int) -> bytes:
        part = self._unread.read(num_bytes)
        if not part:
            self._unread = io.BytesIO(self._wait(self._next()))
            part = self._unread.read(num_bytes)
        return part

    def write(self, part: bytes) -> int:
        if part:
            self._wait(self.parts.put(bytes(part)))
        return len(part)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """End the thread, if it still runs."""
        self._is_closed = True
        if self._pending is not None:
            self._pending.cancel()

    async def _next(self) -> bytes:
        try:
            return await anext(self._content, b"")
        except PhaseloomError as error:
            self.error = error
            raise

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        self._pending = waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        if self._is_closed:
            waiting.cancel()
        return waiting.result()
