"""Packing: whatever the batch, each position asked for sees its own sample's past and no more."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.worker.backends.batch import Batch
from phaseloom.worker.backends.packing import PASS_TOKENS, ROW_TOKENS, Pass, passes

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
GROUPS = st.lists(
    st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=5)), min_size=1, max_size=5
)


def _batch(samples: list[list[int]], first_used: list[int] | None = None) -> Batch:
    """Coefficients are 0 before each sample's `first_used`, then 1."""
    lengths = [len(tokens) for tokens in samples]
    tokens_N = np.array([token for tokens in samples for token in tokens], dtype=np.int64)
    used = zip(first_used or [0] * len(samples), lengths, strict=True)
    coefficients = [float(t >= first) for first, length in used for t in range(length)]
    coefficients_N = np.array(coefficients, dtype=np.float32)
    return Batch(
        np.concatenate(([0], np.cumsum(lengths))),
        tokens_N,
        tokens_N + 100,
        np.arange(tokens_N.size, dtype=np.float32),
        coefficients_N,
        coefficients_N != 0,
        np.ones(len(samples), dtype=np.int64),
    )


def _grouped_batch(groups: list[tuple[list[int], list[list[int]]]]) -> Batch:
    samples = [prompt + answer for prompt, answers in groups for answer in answers]
    return _batch(samples, [len(prompt) - 1 for prompt, answers in groups for _ in answers])


def _seen(packed: Pass, index: int) -> list[int]:
    """The tokens that this position sees, in the order of their positions."""
    row, column = divmod(index, packed.tokens_BT.shape[1])
    visible_BTT = packed.visible_BTT
    if visible_BTT is None:
        return list(packed.tokens_BT[row, : column + 1].tolist())
    columns = np.flatnonzero(visible_BTT[row, column])
    assert packed.positions_BT[row, columns].tolist() == list(range(columns.size))
    return list(packed.tokens_BT[row, columns].tolist())


@given(GROUPS, st.booleans())
def test_passes_show_every_asked_position_its_own_past(
    groups: list[tuple[list[int], list[list[int]]]], only_used: bool
) -> None:
    batch = _grouped_batch(groups)
    answered: list[int] = []
    for packed in passes(batch, only_used=only_used):
        for n, source in enumerate(packed.source_N.tolist()):
            start = batch.starts[np.searchsorted(batch.starts, source, side="right") - 1]
            own_past = batch.tokens_N[start : source + 1].tolist()
            assert _seen(packed, packed.index_N[n]) == own_past
            assert packed.targets_N[n] == batch.targets_N[source]
            assert packed.q_N[n] == batch.q_N[source]
            assert packed.coefficient_N[n] == batch.coefficient_N[source]
            answered.append(source)
    asked = np.flatnonzero(batch.coefficient_N) if only_used else range(batch.tokens_N.size)
    assert sorted(answered) == list(asked)


@given(GROUPS)
def test_passes_never_hold_more_tokens_than_the_samples(
    groups: list[tuple[list[int], list[list[int]]]],
) -> None:
    batch = _grouped_batch(groups)
    packed_tokens = sum(
        int((packed.branches_BT >= 0).sum()) for packed in passes(batch, only_used=False)
    )
    assert packed_tokens <= batch.tokens_N.size


def test_passes_hold_a_prompt_once_when_its_continuations_follow_one_another() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    batch = _batch([[*prompt, 10 + k, 7] for k in range(16)])
    (packed,) = passes(batch, only_used=False)
    assert packed.tokens_BT.shape == (1, len(prompt) + 16 * 2)


def test_passes_need_no_mask_when_nothing_is_shared() -> None:
    (packed,) = passes(_batch([[1, 2], [3, 4, 5]]), only_used=False)
    assert packed.visible_BTT is None


def test_passes_bound_rows_and_passes_when_there_is_much_to_pack() -> None:
    prompt = [1] * 50
    batch = _batch([[*prompt, k, *[2] * 29] for k in range(400)])
    packed = list(passes(batch, only_used=False))
    assert max(one.tokens_BT.shape[1] for one in packed) <= ROW_TOKENS
    assert max(one.tokens_BT.size for one in packed) <= PASS_TOKENS


def test_passes_leave_out_what_nothing_is_asked_of() -> None:
    assert list(passes(_batch([[1, 2]], first_used=[2]), only_used=True)) == []
