"""Packing: whatever the batch, each position asked for sees its own sample's past and no more."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.worker.backends.batch import Sample
from phaseloom.worker.backends.packing import PASS_TOKENS, ROW_TOKENS, Pass, passes

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
GROUPS = st.lists(
    st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=5)), min_size=1, max_size=5
)


def _sample(tokens: list[int], first_used: int = 0) -> Sample:
    tokens_T = np.array(tokens, dtype=np.int64)
    coefficient_T = np.ones(tokens_T.size, dtype=np.float32)
    coefficient_T[:first_used] = 0
    values_T = np.arange(tokens_T.size, dtype=np.float32)
    return Sample(tokens_T, tokens_T + 100, values_T, coefficient_T)


def _samples(groups: list[tuple[list[int], list[list[int]]]]) -> list[Sample]:
    return [
        _sample(prompt + answer, len(prompt) - 1) for prompt, answers in groups for answer in answers
    ]


def _seen(packed: Pass, index: int) -> list[int]:
    """The tokens that this position sees, in the order of their positions."""
    row, column = divmod(index, packed.tokens_BT.shape[1])
    visible_BTT = packed.visible_BTT
    if visible_BTT is None:
        return packed.tokens_BT[row, : column + 1].tolist()
    columns = np.flatnonzero(visible_BTT[row, column])
    assert packed.positions_BT[row, columns].tolist() == list(range(columns.size))
    return packed.tokens_BT[row, columns].tolist()


@given(GROUPS, st.booleans())
def test_passes_show_every_asked_position_its_own_past(
    groups: list[tuple[list[int], list[list[int]]]], only_used: bool
) -> None:
    samples = _samples(groups)
    answered: dict[int, int] = {}
    for packed in passes(samples, only_used=only_used):
        n = 0
        for i, count in packed.members:
            sample = samples[i]
            asked_T = np.flatnonzero(sample.coefficient_T) if only_used else range(len(sample.q_T))
            assert count == len(asked_T)
            for t in asked_T:
                assert _seen(packed, packed.index_N[n]) == sample.tokens_T[: t + 1].tolist()
                assert packed.targets_N[n] == sample.targets_T[t]
                assert packed.q_N[n] == sample.q_T[t]
                assert packed.coefficient_N[n] == sample.coefficient_T[t]
                n += 1
            answered[i] = answered.get(i, 0) + 1
        assert n == packed.index_N.size
    assert answered == {i: 1 for i in range(len(samples))}


@given(GROUPS)
def test_passes_never_hold_more_tokens_than_the_samples(
    groups: list[tuple[list[int], list[list[int]]]],
) -> None:
    samples = _samples(groups)
    packed_tokens = sum(
        int((packed.branches_BT >= 0).sum()) for packed in passes(samples, only_used=False)
    )
    assert packed_tokens <= sum(sample.tokens_T.size for sample in samples)


def test_passes_hold_a_prompt_once_when_its_continuations_follow_one_another() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    samples = [_sample([*prompt, 10 + k, 7]) for k in range(16)]
    (packed,) = passes(samples, only_used=False)
    assert packed.tokens_BT.shape == (1, len(prompt) + 16 * 2)


def test_passes_need_no_mask_when_nothing_is_shared() -> None:
    (packed,) = passes([_sample([1, 2]), _sample([3, 4, 5])], only_used=False)
    assert packed.visible_BTT is None


def test_passes_bound_rows_and_passes_when_there_is_much_to_pack() -> None:
    prompt = [1] * 50
    samples = [_sample([*prompt, k, *[2] * 29]) for k in range(400)]
    packed = list(passes(samples, only_used=False))
    assert max(one.tokens_BT.shape[1] for one in packed) <= ROW_TOKENS
    assert max(one.tokens_BT.size for one in packed) <= PASS_TOKENS


def test_passes_leave_out_what_nothing_is_asked_of() -> None:
    assert list(passes([_sample([1, 2], first_used=2)], only_used=True)) == []
