"""Everything at once, at random, on one real state manager: see `tests.support.statestorm`.

To look for more: `pytest -m slow`, or other seeds. A failure's story is in the test's output.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.statestorm import storm


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_byte_is_what_it_should_be_and_nothing_is_left(
    short_dir: Path, seed: int
) -> None:
    await _weather(short_dir, seed, num_actions=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
async def test_so_it_is_after_long_storms(short_dir: Path, seed: int) -> None:
    await _weather(short_dir, seed, num_actions=200)


async def _weather(directory: Path, seed: int, num_actions: int) -> None:
    async with storm(directory, seed) as running:
        try:
            await running.blow(num_actions)
            await running.calm()
        finally:
            print(*running.story, sep="\n")
