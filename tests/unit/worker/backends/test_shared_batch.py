"""Several requests in one call: each gets what it would alone, and only what it still wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from phaseloom.client import continued
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    Generate,
    GenerateResult,
    Prompt,
    Result,
    SamplingParams,
)
from phaseloom.common.contract.specs import Layout
from phaseloom.common.contract.streaming import StreamedTokens
from phaseloom.common.tensors.layouts import merge, split_shared
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.backends.sampler import backend as sampler_module
from phaseloom.worker.rank.tails import remainder_of
from tests.support.looker import Looker
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import generate, running, spec, watched

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
    first, cancelled, *others = watched(sampler, REQUESTS, watch)
    assert cancelled is None
    for actual, whole in zip((first, *others), (expected[0], *expected[2:]), strict=True):
        assert actual is not None
        _check_alike(actual, whole)
    assert [done for done, _ in watch.seen[1]] == [1, 2, 3, 4, 5]


def test_request_cancelled_before_its_first_token_is_never_decoded(sampler: Backend) -> None:
    watch = Looker(cancel_at={0: 0, 2: 0})
    results = watched(sampler, REQUESTS, watch)
    assert [result is None for result in results] == [True, False, True, False]
    assert watch.seen.keys() == {1, 3}
    assert watched(sampler, REQUESTS[:1], Looker(cancel_at={0: 0})) == [None]


def test_cancel_in_an_earlier_wave_ends_the_later_ones(
    sampler: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 1)
    args = Generate([Prompt([1], seed) for seed in range(9)], SamplingParams(4))
    watch = Looker(cancel_at={0: 6})
    assert watched(sampler, [args], watch) == [None]
    assert watch.seen[0][-1] == (6, 36)


def test_finished_request_is_asked_no_more(sampler: Backend) -> None:
    """So that a cancel which comes too late cannot take a whole result away."""

    class Late(Looker):
        def is_cancelled(self, i: int) -> bool:
            done, total = self.seen.get(i, [(0, 1)])[-1]
            assert done < total
            return False

    short, long = REQUESTS[2], REQUESTS[1]
    results = watched(sampler, [short, long], Late())
    assert all(result is not None for result in results)


def test_progress_counts_the_tokens_of_each_request(sampler: Backend) -> None:
    watch = Looker()
    results = watched(sampler, REQUESTS, watch)
    for i, (args, result) in enumerate(zip(REQUESTS, results, strict=True)):
        assert result is not None
        done = [num_done for num_done, _ in watch.seen[i]]
        assert done == sorted(done)
        assert done[-1] == _num_tokens(result)
        limit = len(args.prompts) * args.num_samples * args.sampling.max_tokens
        assert {total for _, total in watch.seen[i]} == {limit}
    assert watch.asked == set(range(len(REQUESTS)))


@pytest.mark.parametrize("tell_every", [1, 3, 1000])
def test_told_tokens_are_those_of_the_result_for_requests_that_stream(
    sampler: Backend, tell_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several waves, some of which join; told at the end, if never before."""
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 400)
    requests = [
        replace(args, stream=i != 1, sampling=replace(args.sampling, top_logprobs=i))
        for i, args in enumerate(REQUESTS)
    ]
    watch = Looker(join_at={4: requests[1:]}, tell_every=tell_every)
    results = watched(sampler, requests[:1], watch)
    assert set(watch.told) == {0, 2, 3}
    for i, told in watch.told.items():
        result, streamed = results[i], StreamedTokens()
        assert result is not None
        assert all(streamed.accept(each) == each for each in told), "in order, each of them once"
        for rest, sequence in streamed.remaining(result):
            assert not rest.tokens
            pieces = [e for e in told if (e.prompt, e.sample) == (rest.prompt, rest.sample)]
            assert len(pieces) > 1 or tell_every > 1 or len(int32s(sequence.tokens)) == 1
            for name in ("tokens", "top_tokens"):
                ints = [value for e in pieces for value in int32s(getattr(e, name))]
                assert ints == int32s(getattr(sequence, name))
            for name in ("logprobs", "top_logprobs"):
                floats = [value for e in pieces for value in float32s(getattr(e, name))]
                assert floats == float32s(getattr(sequence, name))


def test_tokens_of_a_request_that_is_stopped_are_told_before_its_result(sampler: Backend) -> None:
    """What goes on from it has its next tokens right behind them."""
    watch = Looker(stop_at={0: 7}, tell_every=1000)
    (result,) = watched(sampler, [replace(REQUESTS[1], stream=True)], watch)
    assert result is not None
    ((sequence,),) = result.sequences
    (told,) = watch.told[0]
    assert (told.tokens, sequence.stop_reason) == (sequence.tokens, "partial")


def test_requests_that_join_get_what_each_gets_alone(sampler: Backend) -> None:
    """Longer and shorter than what decodes already; each ends with its own last token."""
    expected = [generate(sampler, args)[0] for args in REQUESTS]
    watch = Looker(join_at={4: REQUESTS[1:3], 9: REQUESTS[3:]})
    for actual, whole in zip(watched(sampler, REQUESTS[:1], watch), expected, strict=True):
        assert actual is not None
        _check_alike(actual, whole)
    assert list(watch.results)[-1] == 1, "the longest ends last"


def test_requests_that_join_wait_for_room(
    sampler: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [generate(sampler, args)[0] for args in REQUESTS]
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 4 * 36)
    watch = Looker(join_at={1: REQUESTS[1:]})
    for actual, whole in zip(watched(sampler, REQUESTS[:1], watch), expected, strict=True):
        assert actual is not None
        _check_alike(actual, whole)


def test_cancelled_request_that_joined_ends_alone(sampler: Backend) -> None:
    expected = [generate(sampler, args)[0] for args in REQUESTS[:3]]
    watch = Looker(join_at={1: REQUESTS[1:3]}, cancel_at={1: 6})
    first, cancelled, third = watched(sampler, REQUESTS[:1], watch)
    assert cancelled is None
    assert first is not None
    assert third is not None
    _check_alike(first, expected[0])
    _check_alike(third, expected[2])


@pytest.mark.parametrize("stop_at", [0, 1, 5, 40])
def test_stopped_request_goes_on_token_for_token(sampler: Backend, stop_at: int) -> None:
    args = Generate([Prompt([1, 2, 3], 6)], SamplingParams(17, 1.0, [0]), 5)
    (whole,) = generate(sampler, args)
    (partial,) = watched(sampler, [args], Looker(stop_at={0: stop_at}))
    assert partial is not None
    (samples,) = partial.sequences
    assert any(sample.stop_reason == "partial" for sample in samples)
    rest = [
        continued(args.prompts[0], sample, k)
        for k, sample in enumerate(samples)
        if sample.stop_reason == "partial"
    ]
    going_on = iter(generate(sampler, Generate(rest, args.sampling))[0].sequences)
    for sample, expected in zip(samples, whole.sequences[0], strict=True):
        tokens, reason = int32s(sample.tokens), sample.stop_reason
        if reason == "partial":
            (more,) = next(going_on)
            tokens, reason = tokens + int32s(more.tokens), more.stop_reason
        assert tokens == int32s(expected.tokens)
        assert reason == expected.stop_reason


def test_what_is_left_of_a_request_completes_it(sampler: Backend) -> None:
    args = Generate(
        [Prompt([1, 2], 6), Prompt([3], 7)], SamplingParams(17, 1.0, [0], top_logprobs=2), 4, True
    )
    (whole,) = generate(sampler, args)
    (had,) = watched(sampler, [args], Looker(stop_at={0: 25}))
    assert had is not None
    rest = remainder_of(args, had)
    assert rest is not None
    assert 0 < len(rest.positions) < 8
    (more,) = generate(sampler, rest.args)
    completed = rest.complete_with(more)
    _check_alike(completed, whole)
    for own, other in zip(completed.sequences, whole.sequences, strict=True):
        tops = [[sample.top_tokens for sample in group] for group in (own, other)]
        assert tops[0] == tops[1]
    assert remainder_of(args, whole) is None


def test_open_samples_are_told_as_they_end(sampler: Backend) -> None:
    looker = Looker()
    watched(sampler, REQUESTS, looker)
    for i, args in enumerate(REQUESTS):
        told = looker.open[i]
        assert told[-1] == 0
        assert told == sorted(told, reverse=True)
        assert len(set(told)) == len(told)
        assert told[0] < len(args.prompts) * args.num_samples


def test_stop_of_a_request_whose_prompts_wait_gives_empty_samples(
    sampler: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "WAVE_TOKENS", 1)
    args = Generate([Prompt([1], seed) for seed in range(3)], SamplingParams(4))
    (result,) = watched(sampler, [args], Looker(stop_at={0: 5}))
    assert result is not None
    assert [len(tokens) for (tokens,) in _tokens(result)] == [4, 1, 0]
    reasons = [sample.stop_reason for (sample,) in result.sequences]
    assert reasons == ["length", "partial", "partial"]


def test_stop_string_may_begin_in_the_earlier_answer() -> None:
    texts = [chr(ord("a") + i % 26) for i in range(VOCAB)]
    speaking = spec("sampler")
    speaking = replace(speaking, model=replace(speaking.model, token_texts=texts))
    with running(speaking) as (sampler, _):
        prompt = Prompt([1, 2], 7)
        (whole,) = generate(sampler, Generate([prompt], SamplingParams(8)))
        tokens = int32s(whole.sequences[0][0].tokens)
        stop = "".join(texts[token] for token in tokens[2:5])
        sampling = SamplingParams(8, stop_strings=[stop])
        (partial,) = watched(sampler, [Generate([prompt], sampling)], Looker(stop_at={0: 4}))
        assert partial is not None
        rest = continued(prompt, partial.sequences[0][0])
        (ended,) = generate(sampler, Generate([rest], sampling))
        assert int32s(ended.sequences[0][0].tokens) == tokens[4:5]
        assert ended.sequences[0][0].stop_reason == "stop"


@pytest.mark.parametrize(("num_generated", "max_tokens"), [(2, 4), (3, 4), (1, 1)])
def test_more_generated_than_there_is_is_refused(
    sampler: Backend, num_generated: int, max_tokens: int
) -> None:
    prompt = Prompt([1, 2], num_generated=num_generated)
    with pytest.raises(CallerError) as refused:
        sampler.check_generate(Generate([prompt], SamplingParams(max_tokens)))
    assert refused.value.info.field == "args.prompts[0].num_generated"


@pytest.mark.parametrize("dp", [2, 3, 7])
def test_ranks_generate_what_one_does(sampler: Backend, dp: int) -> None:
    """Each its prompts, some ranks none."""
    layout = Layout(dp=dp)
    expected = generate(sampler, *REQUESTS)
    shares = [
        watched(sampler, split_shared(REQUESTS, layout, rank), Looker()) for rank in range(dp)
    ]
    for i, whole in enumerate(expected):
        results: list[Result] = [r for r in (share[i] for share in shares) if r is not None]
        merged = merge("generate", results, layout)
        assert isinstance(merged, GenerateResult)
        _check_alike(merged, whole)
