"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.directories import short_directory
from tests.support.gateway import Served, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """A mesh with a gateway that all tests of a module have. For tests of `loop_scope="module"`."""
    with short_directory() as directory:
        async with serving(directory) as running:
            yield running
