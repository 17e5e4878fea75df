"""The tables of slowdowns that come with the simulator; each says where its numbers are from."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"
PAPER_TABLE = _DATA / "slowdowns_paper.json"
"""A GPU's, after JigsawRL."""
TWO_CORES_TABLE = _DATA / "slowdowns_two_cores.json"
"""An emulated device's of two cores, as `phaseloom measure-slowdown` has measured it."""
