"""What survives a cut of the power, on a file system that loses what was not fsynced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import losingdisk, powercuts
from phaseloom.common.contract import streams
from phaseloom.common.contract.events import TimerFired
from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import close_client
from phaseloom.common.transport.natsserver import EmbeddedServer

pytestmark = pytest.mark.skipif(losingdisk.missing() != "", reason=f"lacks {losingdisk.missing()}")

NUM_MESSAGES = 50


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[losingdisk.PowerCut]:
    with losingdisk.power_cut(tmp_path) as cutting:
        yield cutting


async def stored_before_a_cut(disk: losingdisk.PowerCut, *, fsync: bool, seed: int | None) -> int:
    """How many of the messages that a server has acknowledged it still has after a power cut.

    They are as many operations, log entries and keys, published side by side, as services do.
    """
    server = EmbeddedServer(disk.directory / "nats", ["acme"], fsync=fsync)
    await server.start()
    bus = await Bus.open(server.credentials.bus, "test")
    await bus.provision_tenant("acme", 2**20)
    subjects = [f"pl.v1.op.acme.sums.policy.{n}" for n in range(1, NUM_MESSAGES + 1)]
    leases = await bus.js.key_value("leases")
    async with asyncio.TaskGroup() as group:
        for number, subject in enumerate(subjects):
            group.create_task(bus.publish(subject, {"number": number}))
            group.create_task(bus.log.append(TimerFired(f"timer-{number}")))
            group.create_task(leases.put(f"key-{number}", b"value"))
    await server.kill()
    await close_client(bus.client)

    lost = disk.cut(seed=seed)
    assert fsync or any(name.endswith(".blk") for name in lost), lost
    await server.start()
    try:
        async with asyncio.timeout(60):
            bus = await Bus.open(server.credentials.bus, "test")
            await bus.provision_tenant("acme", 2**20)
            leases = await bus.js.key_value("leases")
            kept = sum([await bus.stored.get("OPS_acme", s) is not None for s in subjects])
            kept += (await bus.js.stream_info(streams.SCHED)).state.messages
            kept += (await leases.status()).values
        await bus.close()
    finally:
        await server.stop()
    return kept


@pytest.mark.parametrize("seed", [None, 1])
async def test_acknowledged_messages_survive_a_power_cut(
    disk: losingdisk.PowerCut, seed: int | None
) -> None:
    assert await stored_before_a_cut(disk, fsync=True, seed=seed) == 3 * NUM_MESSAGES


async def test_without_fsync_a_power_cut_loses_what_was_acknowledged(
    disk: losingdisk.PowerCut,
) -> None:
    """The other test can fail."""
    assert await stored_before_a_cut(disk, fsync=False, seed=None) < 3 * NUM_MESSAGES


def test_files_of_a_run_are_whole_after_a_power_cut(disk: losingdisk.PowerCut) -> None:
    """Without its credentials a mesh could not be gone on with, though all else is there."""
    file = disk.directory / "credentials.json"
    replace_file(file, b"first")
    replace_file(file, b"second")
    assert disk.cut() == {}
    assert file.read_bytes() == b"second"


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_jobs_train_to_the_same_weights_over_many_power_cuts(tmp_path: Path) -> None:
    report = await powercuts.run(powercuts.Settings(cuts=5), tmp_path, print)
    assert not report.has_failed, report
    assert len(report.cuts) == 5
    assert sum(cut.lost_bytes for cut in report.cuts), "nothing was unsynced: no power was cut"
