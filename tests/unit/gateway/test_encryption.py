"""Files that are encrypted while they are downloaded, by the real pyrage."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from phaseloom.client import CallerError, Code, ResourceError
from phaseloom.gateway.encryption import MAX_RECIPIENTS, encrypted, recipients_of

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFgKTjLhRLVsdc0hol8ZidoU7yTYPzaRQaKshMV7HHvH"


async def parts(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


def test_encryption_is_refused_by_name_without_pyrage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    with pytest.raises(CallerError, match="pyrage is not installed") as refused:
        recipients_of(["age1x"])
    assert refused.value.info.field == "age_encryption_recipients"
    assert refused.value.info.code is Code.FAILED_PRECONDITION


@pytest.fixture
def identity() -> Any:
    return pytest.importorskip("pyrage").x25519.Identity.generate()


@pytest.mark.parametrize("key", ["", "age1x", "ssh-ed25519 AAAA", "AGE-SECRET-KEY-1", "a" * 5000])
def test_invalid_key_is_refused_by_its_position(identity: Any, key: str) -> None:
    with pytest.raises(CallerError, match="expected an age or SSH public key") as refused:
        recipients_of([str(identity.to_public()), key])
    assert refused.value.info.field == "age_encryption_recipients[1]"


def test_number_of_recipients_is_bounded(identity: Any) -> None:
    for count in (0, MAX_RECIPIENTS + 1):
        with pytest.raises(CallerError, match=f"got {count}"):
            recipients_of([str(identity.to_public())] * count)
    assert len(recipients_of([SSH] + [str(identity.to_public())] * (MAX_RECIPIENTS - 1))) == 10


@pytest.mark.parametrize("sizes", [[], [1], [2**20, 1, 2**20, 70_000]])
async def test_recipient_reads_the_content(identity: Any, sizes: list[int]) -> None:
    import pyrage

    contents = [bytes([index]) * size for index, size in enumerate(sizes)]
    keys = [str(identity.to_public())]
    sealed = b"".join([part async for part in encrypted(parts(*contents), keys)])
    assert pyrage.decrypt(sealed, [identity]) == b"".join(contents)


async def test_reason_of_an_incomplete_file_is_kept(identity: Any) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield bytes(2**20)
        raise ResourceError("the disk fails")

    with pytest.raises(ResourceError, match="the disk fails"):
        async for _ in encrypted(failing(), [str(identity.to_public())]):
            pass


async def test_thread_ends_when_the_download_is_given_up(identity: Any) -> None:
    before = {*threading.enumerate()}
    stream: Any = encrypted(parts(*[bytes(2**20)] * 64), [str(identity.to_public())])
    assert await anext(stream)
    (thread,) = {*threading.enumerate()} - before
    await stream.aclose()
    thread.join(10)
    assert not thread.is_alive()
