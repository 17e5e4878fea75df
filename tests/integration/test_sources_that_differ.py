"""Not all nodes that are named for a weights version have the same: what another life wrote there
may have other bits. Who asks for one of them gets that one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from phaseloom.common.contract.errors import Code, PhaseloomError
from phaseloom.common.contract.ids import VersionKey
from tests.support.meshcerts import ticket
from tests.support.modelslices import commit, version_rank, write
from tests.support.statedaemon import POLICY, SAMPLER, daemon

KEY = VersionKey(POLICY, 2)
PART = msgspec.structs.replace(KEY, part="0of1")
MEANT, OTHER = (np.full((64, 64), number, np.uint8) for number in (1, 2))


@pytest.mark.parametrize("site", ["", "west"])
async def test_a_part_comes_from_the_source_that_has_the_one_that_is_meant(
    short_dir: Path, site: str
) -> None:
    async with (
        daemon(short_dir / "a") as node,
        daemon(short_dir / "b") as another,
        daemon(short_dir / "c", SITE=site) as rollout,
    ):
        digests = []
        for each, content in ((node, MEANT), (another, OTHER)):
            writer = await version_rank(each, POLICY)
            digests.append(await write(writer, PART, {"w": content}))
            await commit({PART.part: digests[-1]}, KEY, writer)
        good, bad = await node.endpoint(), await another.endpoint()
        reader = await version_rank(rollout, SAMPLER)
        await reader.versions.open(KEY, [good], ticket(KEY))
        with pytest.raises(
            PhaseloomError, match=r"could not be fetched: .*it has digest"
        ) as caught:
            await reader.versions.open(PART, [bad], ticket(KEY), digests[0])
        assert caught.value.info.code is Code.FAILED_PRECONDITION
        opened = await reader.versions.open(PART, [bad, good], ticket(KEY), digests[0])
        assert bytes(opened.memory[: MEANT.nbytes]) == MEANT.tobytes()
