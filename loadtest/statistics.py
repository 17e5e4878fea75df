"""Quantiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the sorted values does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
