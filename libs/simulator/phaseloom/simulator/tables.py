"""The tables of slowdowns that come with the simulator. Each file names its source."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"
PAPER_TABLE = _DATA / "slowdowns_paper.json"
"""Slowdowns on a GPU, after JigsawRL."""
TWO_CORES_TABLE = _DATA / "slowdowns_two_cores.json"
"""Slowdowns on an emulated device of two cores, measured by `phaseloom measure-slowdown`."""
