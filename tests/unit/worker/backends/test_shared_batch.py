"""Several requests in one call: each gets what it would alone, and only what it still wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.operations import (
    Generate,
    GenerateResult,
    Prompt,
    Result,
    SamplingParams,
)
from phaseloom.common.contract.specs import Layout
from phaseloom.common.tensors.layouts import merge, split_shared
from phaseloom.worker.backends import sampler as sampler_module
from phaseloom.worker.backends.base import Backend
from tests.support.looker import Looker
from tests.unit.worker.backends.models import generate, running, spec

REQUESTS = [
    Generate([Prompt([3, 1, 4, 1, 5, 9], 1), Prompt([2], 2)], SamplingParams(9, 1.0, [0]), 3),
    Generate([Prompt([6, 5, 3], 3)], SamplingParams(30, 0.7)),
    Generate([Prompt([8], 4), Prompt([9, 7], 5)], SamplingParams(4, 0.0), 2),
    Generate([Prompt([1, 2, 3], 6)], SamplingParams(17, 1.0, [0, 1, 2, 3]), 5, True),
]


@pytest.fixture
def sampler() -> Iterator[Backend]:
    with running(spec("sampler")) as (backend, _):
        yield backend


def _tokens(result: GenerateResult) -> list[list[list[int]]]:
    return [[int32s(sample.tokens) for sample in samples] for samples in result.sequences]


def _num_tokens(result: GenerateResult) -> int:
    return sum(len(tokens) for samples in _tokens(result) for tokens in samples)


def _check_alike(actual: GenerateResult, expected: GenerateResult) -> None:
    """The same draws; the last bits of log-probabilities may differ with the batch."""
    assert _tokens(actual) == _tokens(expected)
    for own, other in zip(actual.sequences, expected.sequences, strict=True):
        for one, two in zip(own, other, strict=True):
            assert one.stop_reason == two.stop_reason
            assert float32s(one.logprobs) == pytest.approx(float32s(two.logprobs), abs=1e-4)
    assert actual.prompt_logprobs == expected.prompt_logprobs


def test_requests_of_one_call_get_what_each_gets_alone(sampler: Backend) -> None:
    """Other prompts, lengths, temperatures, stops and numbers of samples beside them."""
    alone = [generate(sampler, args)[0] for args in REQUESTS]
    for actual, expected in zip(generate(sampler, *REQUESTS), alone, strict=True):
        _check_alike(actual, expected)
    for actual, expected in zip(generate(sampler, *REQUESTS[::-1]), alone[::-1], strict=True):
        _check_alike(actual, expected)


def test_request_alone_is_bit_equal_whatever_ran_before(sampler: Backend) -> None:
    before = generate(sampler, REQUESTS[0])
    generate(sampler, *REQUESTS)
    assert generate(sampler, REQUESTS[0]) == before


def test_waves_cut_across_requests(sampler: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = generate(sampler, *REQUESTS)
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 4 * 36)
    for actual, expected in zip(generate(sampler, *REQUESTS), whole, strict=True):
        _check_alike(actual, expected)


def test_cancelled_request_gives_nothing_and_the_others_everything(sampler: Backend) -> None:
    expected = generate(sampler, *REQUESTS)
    watch = Looker(cancel_at={1: 5})
    first, cancelled, *others = sampler.generate(REQUESTS, watch)
    assert cancelled is None
    for actual, whole in zip((first, *others), (expected[0], *expected[2:]), strict=True):
        assert actual is not None
        _check_alike(actual, whole)
    assert [done for done, _ in watch.seen[1]] == [1, 2, 3, 4, 5]


def test_request_cancelled_before_its_first_token_is_never_decoded(sampler: Backend) -> None:
    watch = Looker(cancel_at={0: 0, 2: 0})
    results = sampler.generate(REQUESTS, watch)
    assert [result is None for result in results] == [True, False, True, False]
    assert watch.seen.keys() == {1, 3}
    assert sampler.generate(REQUESTS[:1], Looker(cancel_at={0: 0})) == [None]


def test_cancel_in_an_earlier_wave_ends_the_later_ones(
    sampler: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 1)
    args = Generate([Prompt([1], seed) for seed in range(9)], SamplingParams(4))
    watch = Looker(cancel_at={0: 6})
    assert sampler.generate([args], watch) == [None]
    assert watch.seen[0][-1] == (6, 36)


def test_finished_request_is_asked_no_more(sampler: Backend) -> None:
    """So that a cancel which comes too late cannot take a whole result away."""

    class Late(Looker):
        def is_cancelled(self, i: int) -> bool:
            done, total = self.seen.get(i, [(0, 1)])[-1]
            assert done < total
            return False

    short, long = REQUESTS[2], REQUESTS[1]
    results = sampler.generate([short, long], Late())
    assert all(result is not None for result in results)


def test_progress_counts_the_tokens_of_each_request(sampler: Backend) -> None:
    watch = Looker()
    results = sampler.generate(REQUESTS, watch)
    for i, (args, result) in enumerate(zip(REQUESTS, results, strict=True)):
        assert result is not None
        done = [num_done for num_done, _ in watch.seen[i]]
        assert done == sorted(done)
        assert done[-1] == _num_tokens(result)
        limit = len(args.prompts) * args.num_samples * args.sampling.max_tokens
        assert {total for _, total in watch.seen[i]} == {limit}
    assert watch.asked == set(range(len(REQUESTS)))


@pytest.mark.parametrize("dp", [2, 3, 7])
def test_ranks_generate_what_one_does(sampler: Backend, dp: int) -> None:
    """Each its prompts, some ranks none."""
    layout = Layout(dp=dp)
    expected = generate(sampler, *REQUESTS)
    shares = [
        sampler.generate(split_shared(REQUESTS, layout, rank), Looker()) for rank in range(dp)
    ]
    for i, whole in enumerate(expected):
        results: list[Result] = [r for r in (share[i] for share in shares) if r is not None]
        merged = merge("generate", results, layout)
        assert isinstance(merged, GenerateResult)
        _check_alike(merged, whole)
