"""The least time in which two chains can be run on one worker: no policy can beat it.

Dynamic programming over how far each chain is, in cells of equal work. Unlike a policy it may stop
what has begun at any cell, so it bounds every schedule. Cost: O(cells²) a pair.
"""

from __future__ import annotations

from functools import cache

from phaseloom.scheduler.core.planning.chains import WAIT, Chain, Pair, Rates


def least_makespan_s(pair: Pair, cells: int = 300) -> float:
    """The least time in which both chains of a pair can be run."""
    cell_s = max(pair.total_s) / cells
    firsts, seconds = _cells(pair.first, cell_s), _cells(pair.second, cell_s)

    @cache
    def rates_of(first: str, second: str) -> list[Rates]:
        if WAIT in (first, second):
            return [(1.0, 1.0)]
        return pair.table.rates(first, second)

    below = [cell_s * left for left in range(len(seconds), -1, -1)]
    for done, first in zip(range(len(firsts) - 1, -1, -1), reversed(firsts), strict=True):
        row = [cell_s * (len(firsts) - done)]
        for at in range(len(seconds) - 1, -1, -1):
            corner, down, right = below[at + 1], below[at], row[-1]
            best = cell_s + min(down, right)
            for fast, slow in rates_of(first, seconds[at]):
                if fast >= slow:
                    part = slow / fast
                    end_s = cell_s / fast + (1 - part) * down + part * corner
                else:
                    part = fast / slow
                    end_s = cell_s / slow + (1 - part) * right + part * corner
                best = min(best, end_s)
            row.append(best)
        below = row[::-1]
    serial_s = cell_s * (len(firsts) + len(seconds))
    return below[0] / serial_s * sum(pair.total_s)


def _cells(chain: Chain, cell_s: float) -> list[str]:
    """The kind of each cell. Every stage has at least one."""
    return [stage.kind for stage in chain for _ in range(max(1, round(stage.seconds / cell_s)))]
