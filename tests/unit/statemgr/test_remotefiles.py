"""Blocks of state files, as they are served to other nodes."""

from __future__ import annotations

import os
from pathlib import Path

from phaseloom.common.contract.ids import DeploymentKey
from phaseloom.statemgr.node.extents import HostMemory
from phaseloom.statemgr.node.stores import HostSealStore
from phaseloom.statemgr.records.records import Records
from phaseloom.statemgr.records.stateheader import Section, StateHeader
from phaseloom.statemgr.seals.replicating import open_file
from phaseloom.statemgr.transfer.tensorslices import Box
from phaseloom.statemgr.transfer.wire import FileName
from tests.support.statefiles import state_directory

KEY = DeploymentKey("acme", "job", "policy")


async def test_blocks_of_one_request_come_each_as_it_is(tmp_path: Path) -> None:
    """A client may ask for the blocks of several small sections at once, and then for others."""
    directory = state_directory(tmp_path)
    contents = [os.urandom(num_bytes) for num_bytes in (5000, 64, 4096)]
    sections = [Section(len(content), [], "") for content in contents]
    memories = [memoryview(bytearray(content)) for content in contents]
    directory.write(directory.seal(KEY, 3), StateHeader("seal", KEY, 3, sections), memories)
    memory = HostMemory(2**20)
    host_seals = HostSealStore(Records([1]), memory)
    _, served = await open_file(host_seals, directory, FileName("seal", KEY, 3))
    for numbers in ((0, 1, 2), (2, 0)):
        boxes = [Box(str(number), [0], [len(contents[number])]) for number in numbers]
        found = [served.find("", box) for box in boxes]
        await served.until_arrived("", boxes)
        views = [each.read() for each in found]
        came = [b"".join(view) for view in views]
        assert came == [contents[number] for number in numbers]
    memory.close()
