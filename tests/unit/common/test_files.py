"""Files that are replaced whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phaseloom.common.process.files import replace_file


def test_threads_that_replace_one_file_leave_one_whole_content(tmp_path: Path) -> None:
    """A task that is cancelled leaves its thread writing, and another writes meanwhile."""
    file = tmp_path / "file"
    contents = [bytes([number]) * 10_000 for number in range(64)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda content: replace_file(file, content), contents))
    assert file.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [file]


def test_file_that_cannot_be_replaced_leaves_no_draft_behind(tmp_path: Path) -> None:
    directory = tmp_path / "file"
    directory.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(directory, b"content")
    assert list(tmp_path.iterdir()) == [directory]
