"""Work and tensors over ranks: nothing lost, nothing twice, and layouts spelled out by hand."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseloom.common.contract.errors import CallerError, InternalError
from phaseloom.common.contract.kinds import balanced
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    Loss,
    OptimStep,
    OptimStepResult,
    Prompt,
    Result,
    SamplingParams,
    SaveStateResult,
    Sequence,
)
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors import layouts
from phaseloom.common.tensors.layouts import merge, split, split_shared

SMALL = st.integers(1, 4)


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    dp, tp, pp, cp = (draw(SMALL) for _ in range(4))
    stage = dp * tp * cp
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    return Layout(dp, tp, pp, cp, ep)


# --- Ranks ---------------------------------------------------------------------------------------


@given(_layouts())
def test_every_place_in_a_layout_is_one_rank(layout: Layout) -> None:
    layouts.check_layout(layout)
    places = [layouts.coordinates(rank, layout) for rank in range(layout.num_ranks)]
    assert len({(c.dp, c.pp, c.cp, c.tp) for c in places}) == layout.num_ranks
    assert len({(c.pp, c.ep, c.edp) for c in places}) == layout.num_ranks
    for rank, c in enumerate(places):
        assert layouts.rank_of(layout, dp=c.dp, pp=c.pp, cp=c.cp, tp=c.tp) == rank
        assert max(c.dp + 1 - layout.dp, c.pp + 1 - layout.pp, c.cp + 1 - layout.cp) <= 0
        assert c.tp < layout.tp
        assert c.ep < layout.ep
    assert {places[rank].dp for rank in layouts.reporting_ranks(layout)} == set(range(layout.dp))


def test_ranks_of_tp_2_pp_2_dp_2_are_numbered_tp_first() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    places = [layouts.coordinates(rank, layout) for rank in range(8)]
    assert [c.tp for c in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [c.dp for c in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [c.pp for c in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert layouts.reporting_ranks(layout) == [4, 6]


def test_ranks_of_tp_2_cp_2_dp_2_with_4_groups_of_experts() -> None:
    layout = Layout(dp=2, tp=2, cp=2, ep=4)
    places = [layouts.coordinates(rank, layout) for rank in range(8)]
    assert [c.tp for c in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [c.cp for c in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [c.dp for c in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [c.ep for c in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [c.edp for c in places] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("layout", "field"),
    [(Layout(dp=0), "layout.dp"), (Layout(tp=-1), "layout.tp"), (Layout(dp=2, ep=3), "layout.ep")],
)
def test_impossible_layout_is_refused_by_its_axis(layout: Layout, field: str) -> None:
    with pytest.raises(CallerError) as raised:
        layouts.check_layout(layout)
    assert raised.value.info.field == field


# --- Tensors -------------------------------------------------------------------------------------


# --- Work ----------------------------------------------------------------------------------------


@given(costs=st.lists(st.integers(0, 50), max_size=40), parts=st.integers(1, 6))
def test_balanced_runs_tile_and_exceed_an_equal_part_by_one_item_at_most(
    costs: list[int], parts: int
) -> None:
    runs = balanced(costs, parts)
    assert len(runs) == parts
    assert [*chain.from_iterable(runs)] == [*range(len(costs))]
    assert all(before.stop == after.start for before, after in pairwise(runs))
    for run in runs:
        assert sum(costs[i] for i in run) <= sum(costs) / parts + max(costs, default=0)


def _data(lengths: list[int]) -> list[Datum]:
    return [Datum([i] * length, [i] * length, [1.0] * length) for i, length in enumerate(lengths)]


@given(layout=_layouts(), lengths=st.lists(st.integers(1, 20), max_size=12))
def test_merging_what_was_split_is_the_identity(layout: Layout, lengths: list[int]) -> None:
    """As if each rank answered with its samples themselves."""
    args = Forward(_data(lengths))
    shares = [split(args, layout, rank) for rank in range(layout.num_ranks)]
    answers: list[Result] = []
    for share in shares:
        assert isinstance(share, Forward)
        answers.append(ForwardResult([datum.weights or [] for datum in share.batch]))
    assert merge("forward", answers, layout) == ForwardResult([d.weights or [] for d in args.batch])
    for rank, share in enumerate(shares):
        dp = layouts.coordinates(rank, layout).dp
        assert share == shares[layouts.rank_of(layout, dp=dp)]


@given(
    layout=_layouts(),
    sizes=st.lists(st.lists(st.integers(1, 20), max_size=5), min_size=1, max_size=5),
)
def test_shared_requests_come_back_whole_and_in_order(
    layout: Layout, sizes: list[list[int]]
) -> None:
    requests = [
        Generate(
            [Prompt([1] * size, 100 * i + j) for j, size in enumerate(lengths)],
            SamplingParams(max_tokens=i + 1),
            num_samples=1 + i % 2,
            prompt_logprobs=i % 2 == 1,
            prompt_top_logprobs=i % 2,
        )
        for i, lengths in enumerate(sizes)
    ]
    shares = [split_shared(requests, layout, rank) for rank in range(layout.num_ranks)]
    for i, args in enumerate(requests):
        answers: list[Result] = [_echo(share[i]) for share in shares]
        assert merge("generate", answers, layout) == _echo(args)
        if len(requests) == 1:
            assert [split(args, layout, rank) for rank in range(layout.num_ranks)] == [
                share[0] for share in shares
            ]


def _echo(args: Generate) -> GenerateResult:
    return GenerateResult(
        [[Sequence([prompt.seed], [0.0], "stop")] * args.num_samples for prompt in args.prompts],
        [prompt.tokens for prompt in args.prompts if args.prompt_logprobs],  # type: ignore[misc]
        [prompt.tokens for prompt in args.prompts if args.prompt_top_logprobs],
        [prompt.tokens for prompt in args.prompts if args.prompt_top_logprobs],  # type: ignore[misc]
    )


def test_many_small_requests_keep_all_replicas_busy() -> None:
    requests = [Generate([Prompt([1, 2], seed)], SamplingParams(8)) for seed in range(16)]
    for rank in range(4):
        share = split_shared(requests, Layout(dp=4), rank)
        assert sum(len(args.prompts) for args in share) == 4


def test_kinds_without_data_go_to_all_ranks_alike() -> None:
    step = OptimStep(AdamParams(1.0))
    assert [split(step, Layout(dp=2), rank) for rank in (0, 1)] == [step, step]


def test_training_is_split_by_tokens_and_keeps_its_loss() -> None:
    args = ForwardBackward(_data([8, 1, 1, 1, 1, 1, 1, 1, 1]), Loss.PPO, 0.7, 1.4)
    first, second = (split(args, Layout(dp=2), rank) for rank in (0, 1))
    assert isinstance(first, ForwardBackward)
    assert isinstance(second, ForwardBackward)
    assert (first.batch, second.batch) == (args.batch[:1], args.batch[1:])
    assert (second.loss, second.clip_low, second.clip_high) == (Loss.PPO, 0.7, 1.4)


def test_metrics_are_merged_by_their_reduction() -> None:
    layout = Layout(dp=3, tp=2)
    metrics = [
        {"loss:sum": 1.5, "ratio:max": 2.0, "lag:min": 4.0, "norm:mean": 0.1},
        {"loss:sum": -0.5, "ratio:max": 3.0, "norm:mean": 0.1},
        {"loss:sum": 0.25, "lag:min": 1.0, "norm:mean": 0.1},
    ]
    results: list[Result] = []
    for each in metrics:
        # What ranks beside the replica's first say is not counted twice.
        results += [ForwardBackwardResult(each), ForwardBackwardResult({"loss:sum": 99.0})]
    assert merge("forward_backward", results, layout) == ForwardBackwardResult(
        {"loss:sum": 1.25, "ratio:max": 3.0, "lag:min": 1.0, "norm:mean": 0.1}
    )
    steps: list[Result] = [OptimStepResult({"grad_norm:mean": value}) for value in (1.0, 2.0)]
    assert merge("optim_step", steps, Layout(dp=2)) == OptimStepResult({"grad_norm:mean": 1.5})
    odd: list[Result] = [OptimStepResult({"norm": value}) for value in (1.0, 2.0)]
    with pytest.raises(InternalError, match="'norm'"):
        merge("optim_step", odd, Layout(dp=2))


def test_ranks_must_agree_on_what_is_one_for_all() -> None:
    saved: list[Result] = [SaveStateResult("a", "digest"), SaveStateResult("a", "digest")]
    assert merge("save_state", saved, Layout(dp=2)) == saved[0]
    with pytest.raises(InternalError, match="disagree"):
        merge("save_state", [saved[0], SaveStateResult("a", "other")], Layout(dp=2))
