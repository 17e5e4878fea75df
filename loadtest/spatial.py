"""`phaseloom demo --spatial` in each of its settings: one device that two jobs share in space."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.records import Machine, describe, write
from phaseloom.demo.command import demo
from phaseloom.demo.spatial import SETTINGS, Spatial, SpatialSummary

POLICIES = ("greedy", "lookahead", "fair")


class SpatialReport(msgspec.Struct, frozen=True):
    machine: Machine
    """The machine of the setting that was measured last."""
    settings: dict[str, SpatialSummary]
    """The newest measurement of each setting."""

    @property
    def in_order(self) -> list[Spatial]:
        """The figures of each setting, in the order in which they are told."""
        return [self.settings[name].spatial for name in SETTINGS if name in self.settings]


async def run(
    settings: Sequence[str], policies: Sequence[str], rounds: int, directory: Path, file: Path
) -> SpatialReport:
    """Run the demo in settings, and merge its figures into the file.

    Args:   settings: their names; none: all of them.
    Raises: RuntimeError: something did not hold; the demo has printed what.
    """
    report = SpatialReport(describe("torch"), await asyncio.to_thread(_known, file))
    for name in settings or SETTINGS:
        run_dir = directory / name
        failed = await demo(
            spatial=True,
            setting=name,
            multiplexing=tuple(policies),
            rounds=rounds,
            run_dir=run_dir,
        )
        if failed:
            raise RuntimeError(f"the setting {name} failed, see {run_dir}")
        summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=SpatialSummary)
        found = {**report.settings, name: summary}
        report = write(SpatialReport(describe("torch"), found), file)
    return report


def _known(file: Path) -> dict[str, SpatialSummary]:
    if not file.exists():
        return {}
    return msgspec.json.decode(file.read_bytes(), type=SpatialReport).settings
