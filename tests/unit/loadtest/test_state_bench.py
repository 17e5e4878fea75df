"""The bench of the state manager, small: what it says has been measured on both sides."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from loadtest.state_bench import measure_disk, measure_switches
from tests.support.processes import child_pids, until_gone
from tests.support.warm import WARM

MiB = 2**20
ROOT = Path(__file__).parents[3]
_BENCH = """
import asyncio, sys
from pathlib import Path
from loadtest.state_bench import daemon

async def run():
    async with daemon(Path(sys.argv[1]), 2**20):
        print("runs", flush=True)
        await asyncio.Event().wait()

asyncio.run(run())
"""


def test_disk_is_measured_beside_the_bare_disk(tmp_path: Path) -> None:
    """Against fio with huge pages, too, where this machine has both."""
    figures = {figure.name: figure for figure in measure_disk(tmp_path / "disk", 9 * MiB, 2)}
    assert list(figures)[:1] == ["nvme_write_9_mib"]
    assert figures.keys() - {"nvme_write_9_mib_huge_pages", "nvme_read_9_mib_huge_pages"} == {
        "nvme_write_9_mib",
        "nvme_read_9_mib",
    }
    for name, figure in figures.items():
        assert min(figure.value, figure.limit_value, figure.ratio) > 0
        assert "8 MiB blocks, 4 in flight" in figure.limit
        assert bool(figure.aim) == (not name.endswith("_huge_pages"))
    assert list(tmp_path.iterdir()) == []


async def test_switches_are_measured_beside_plain_copies(short_dir: Path) -> None:
    figures = await measure_switches(short_dir / "switches", 4 * MiB, 1)
    assert [figure.name for figure in figures] == ["offload_4_mib", "load_4_mib", "switch_4_mib"]
    for figure in figures:
        assert min(figure.value, figure.limit_value, figure.ratio) > 0


async def test_state_managers_end_with_a_bench_that_is_stopped(short_dir: Path) -> None:
    """By a signal that it does not catch: with no word from it."""
    environment = {name: value for name, value in os.environ.items() if name != WARM}
    bench = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _BENCH, str(short_dir)),
        env=environment,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert bench.stdout is not None
    assert await bench.stdout.readline() == b"runs\n"
    daemons = child_pids(bench.pid)
    assert daemons
    bench.terminate()
    await bench.wait()
    await until_gone(daemons, 30)
