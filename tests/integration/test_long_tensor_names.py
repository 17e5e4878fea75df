"""Tensors may have long names: slices of many are asked for in messages of bounded size."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from phaseloom.common.contract.ids import VersionKey
from phaseloom.common.contract.state_layout import PartSources, Slice
from tests.support.meshcerts import ticket
from tests.support.modelslices import commit, version_rank, write
from tests.support.statedaemon import POLICY, SAMPLER, daemon

KEY = VersionKey(POLICY, 2)
PART = msgspec.structs.replace(KEY, part="0of1")
ROWS = 64
NUM_TENSORS = 200
CONTENT = {
    f"layers.{number}.{'name' * 250}": np.full(ROWS, number, np.uint8)
    for number in range(NUM_TENSORS)
}
SLICES = [
    Slice("0of1", name, "uint8", [0], [ROWS], number * ROWS, ROWS)
    for number, name in enumerate(CONTENT)
]


@pytest.mark.parametrize("site", ["east", "west"])
async def test_slices_of_tensors_with_long_names_come(short_dir: Path, site: str) -> None:
    """From a source nearby, and from one on another site, by way of a peer."""
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(daemon(short_dir / "source", SITE="east"))
        writer = await version_rank(source, POLICY)
        digest = await write(writer, PART, CONTENT)
        await commit({PART.part: digest}, KEY, writer)
        endpoint = await source.endpoint()
        for number in range(2):
            node = await stack.enter_async_context(daemon(short_dir / f"node{number}", SITE=site))
            reader = await version_rank(node, SAMPLER)
            await reader.versions.open(KEY, [endpoint], ticket(KEY))
            held = [PartSources("0of1", [endpoint])]
            async with asyncio.timeout(60):
                memory, _ = await reader.versions.open_slices(KEY, SLICES, held, ticket(KEY))
            assert bytes(memory) == b"".join(each.tobytes() for each in CONTENT.values())
            del memory
