"""Files that survive a power cut, locks, and what a damaged file is answered with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phaseloom.cli.meshconfig import SETTINGS, settings_of
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.process.files import locked, replace_file
from phaseloom.common.transport.natsserver import EmbeddedEnsemble, EmbeddedServer

IN_USE = CallerError("another one uses it", code=Code.FAILED_PRECONDITION)


def test_directory_is_fsynced_after_its_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / "a").exists()))

    monkeypatch.setattr(os, "fsync", recorded)
    replace_file(tmp_path / "a", b"content")
    assert synced[-1] == (str(tmp_path), True)
    assert synced[0][1] is False


def test_file_is_locked_once_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    for _ in range(2):
        with (
            locked(file, IN_USE),
            pytest.raises(CallerError, match="uses it"),
            locked(file, IN_USE),
        ):
            pass


DAMAGED = [b"", b"{", b"[]", b'{"url": 3}', b"\xff\xfe", b"[" * 100_000, b"null"]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_settings_and_credentials_are_named_with_a_remedy(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / SETTINGS).write_bytes(content)
    file = tmp_path / "credentials.json"
    file.write_bytes(content)
    for read in (
        lambda: settings_of(tmp_path) if content != b'{"url": 3}' else EmbeddedServer(tmp_path, []),
        lambda: EmbeddedServer(tmp_path, []),
        lambda: EmbeddedEnsemble(tmp_path, []),
    ):
        with pytest.raises(CallerError, match="is damaged") as refused:
            read()
        assert str(tmp_path) in str(refused.value)
        assert "restore the file" in refused.value.info.remedy


def test_credentials_without_a_port_are_named(tmp_path: Path) -> None:
    for url in ("nats://127.0.0.1", "nats://127.0.0.1:many", ""):
        content = f'{{"url": "{url}", "user": "m", "password": "p", "tenants": {{}}}}'
        (tmp_path / "credentials.json").write_text(content)
        with pytest.raises(CallerError, match="does not end with a port"):
            EmbeddedServer(tmp_path, [])
