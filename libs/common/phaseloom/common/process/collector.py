"""The garbage collector of a process that keeps many objects for long and makes hardly any cycles.

Such a process gains nothing by looking for cycles often. With Python's own threshold, three in 200
placements by `coexec_repack` among 500 jobs waited for a full collection, and took twice as long.
"""

from __future__ import annotations

import gc

THRESHOLD = 10_000
"""New objects, net of those that are gone, between two collections of the youngest; Python's own
is 700."""


def collect_rarely() -> None:
    """Have collections leave out all objects that there are, and come less often.

    To be called once, when a process has imported what it needs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
