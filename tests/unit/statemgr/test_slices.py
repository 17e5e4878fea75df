"""Requests for slices: however many, they keep nobody else waiting."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.contract.state_layout import Slice
from phaseloom.common.contract.state_rank import OpenSlices
from tests.support.nodeparts import node_on, parts_on
from tests.support.statefiles import state_directory

KEY = DeploymentKey("acme", "job", "policy")


async def test_slices_are_looked_through_beside_the_event_loop(tmp_path: Path) -> None:
    directory = await asyncio.to_thread(state_directory, tmp_path)
    node = node_on(directory, device_bytes=0, host_bytes=2**20)
    weights = parts_on(node).weights
    node.records.residency.register(RegisterWpg(["token"], KEY, 1, [0], 0))
    wpg = node.records.residency.current(KEY, 1)
    busy, only_thread = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(only_thread)
    only_thread.submit(busy.wait)
    bad = OpenSlices(VersionKey(KEY, 1), 64, [Slice("", "w", "uint8", [-1], [1], 0, 1)], [])
    opening = asyncio.create_task(weights.open_slices(wpg, bad))
    done, _ = await asyncio.wait([opening], timeout=0.05)
    busy.set()
    assert not done, "it was looked through on the event loop"
    with pytest.raises(CallerError, match="is not a box"):
        await opening
    node.close()
