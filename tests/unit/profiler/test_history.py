"""A job's newest operations, against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phaseloom.profiler.core.history import WINDOW, History, Ran

NAMES = [("policy", "forward_backward"), ("policy", "optim_step"), ("sampler", "generate")]


@given(st.integers(0, 3 * WINDOW), st.integers(1, WINDOW))
def test_newest_are_those_appended_last(length: int, count: int) -> None:
    history = History()
    plain = []
    for i in range(length):
        name = NAMES[i * i % len(NAMES)]
        history.append(name, i - 0.5, float(i), i + 0.25)
        plain.append(Ran(*name, i - 0.5, float(i), i + 0.25))
    assert history.newest(count) == plain[-count:]
    assert len(history) == length if length <= WINDOW else WINDOW <= len(history) < 2 * WINDOW
