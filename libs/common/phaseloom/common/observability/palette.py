"""The colours of jobs in pictures and on the console's page, from `palette.json`.

They follow Okabe and Ito, so that colour-blind readers can tell them apart. The page is built with
the same file.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

import msgspec


class _Palette(msgspec.Struct, frozen=True):
    light: list[str]
    shades: dict[str, float]


_PALETTE = msgspec.json.decode((files(__package__) / "palette.json").read_bytes(), type=_Palette)
COLOURS = _PALETTE.light
"""Colours on a white ground, as `#rrggbb`."""
SHADES = _PALETTE.shades
"""Operation kind → how much a job's colour is lightened, from 0 (not at all) to 1 (white)."""


def job_colours(jobs: Iterable[str]) -> dict[str, str]:
    """Assign colours to jobs in the order of their names, as the console's page does."""
    return {job: COLOURS[i % len(COLOURS)] for i, job in enumerate(sorted(jobs))}
