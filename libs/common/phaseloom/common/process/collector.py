"""Garbage collection for processes that keep many long-lived objects and create few cycles.

Frequent searches for cycles gain such a process nothing. With Python's default threshold, three of
200 placements by `coexec_repack` among 500 jobs hit a full collection and took twice as long.
"""

from __future__ import annotations

import gc

THRESHOLD = 10_000
"""Net number of new objects between two collections of the youngest generation. Python's default is
700."""


def collect_rarely() -> None:
    """Exclude all existing objects from collections, and collect less often.

    Call it once, after the process has imported its modules.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
