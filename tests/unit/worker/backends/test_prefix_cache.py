"""Keys and values that are kept between calls: what is run again, what is not, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phaseloom.client import continued
from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    Generate,
    GenerateResult,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.worker.backends.base import Backend, KeepsKv
from phaseloom.worker.backends.sampler import backend as sampler_module
from phaseloom.worker.backends.sampler.backend import SamplerBackend
from phaseloom.worker.backends.sampler.decoder import LlamaCache
from phaseloom.worker.backends.sampler.prefixcache import (
    BLOCK_TOKENS,
    KvShape,
    Prefix,
    PrefixCache,
)
from phaseloom.worker.rank.tails import remainder_of
from phaseloom.worker.state.heap import Heap
from tests.support.looker import Looker
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import generate, running, spec, watched

TOLERANCE = 1e-5
"""Of float32 log-probabilities."""
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Of keys and values of a token of the tiny model."""
SAMPLING = SamplingParams(40, ignore_eos=True)


def caching(scratch_bytes: int = 0, **changes: Any) -> DeploymentSpec:
    """Args: changes: of the model's config."""
    plain = spec("sampler", **{"max_position_embeddings": 256, **changes})
    return replace(plain, prefix_cache=True, scratch_bytes=scratch_bytes)


def without(deployment: DeploymentSpec) -> DeploymentSpec:
    return replace(deployment, prefix_cache=False)


def run(deployment: DeploymentSpec) -> AbstractContextManager[tuple[Backend, Heap]]:
    return running(deployment)


def prefilled(*results: GenerateResult) -> int:
    return int(sum(result.metrics["prefilled_tokens:sum"] for result in results))


def tokens_of(result: GenerateResult) -> list[list[int]]:
    return [int32s(sample.tokens) for group in result.sequences for sample in group]


def check_alike(
    actual: GenerateResult, expected: GenerateResult, tolerance: float = TOLERANCE
) -> None:
    assert tokens_of(actual) == tokens_of(expected)
    pairs = zip(chain(*actual.sequences), chain(*expected.sequences), strict=True)
    for one, two in pairs:
        assert one.stop_reason == two.stop_reason
        assert float32s(one.logprobs) == pytest.approx(float32s(two.logprobs), abs=tolerance)


def turns(backend: Backend, num_turns: int = 10) -> tuple[list[GenerateResult], int]:
    """A conversation: each turn's prompt is all that was said before and a few tokens more.

    Returns: the results, and the number of tokens that were not the model's own.
    """
    said: list[int] = []
    results = []
    num_asked = 0
    for turn in range(num_turns):
        asked = [(turn * 7 + i * i) % VOCAB for i in range(3 + turn % 4)]
        said += asked
        num_asked += len(asked)
        args = Generate([Prompt(said, turn)], SamplingParams(2 + turn, ignore_eos=True))
        (result,) = generate(backend, args)
        said = said + tokens_of(result)[0]
        results.append(result)
    return results, num_asked


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, TOLERANCE),
        ({"model_type": "llama", "attention_bias": True}, TOLERANCE),
        ({"model_type": "gpt2"}, TOLERANCE),
        ({"model_type": "gemma2", "sliding_window": 8}, TOLERANCE),
        ({"dtype": "bfloat16"}, 0.05),
    ],
    ids=["qwen3", "llama", "gpt2", "windows", "bfloat16"],
)
def test_conversation_prefills_each_token_once(changes: dict[str, Any], tolerance: float) -> None:
    deployment = caching(**changes)
    with run(deployment) as (backend, _):
        cached, num_asked = turns(backend)
    with run(without(deployment)) as (backend, _):
        plain, _ = turns(backend)
    for actual, expected in zip(cached, plain, strict=True):
        check_alike(actual, expected, tolerance)
        assert not expected.metrics
    # The last token of each answer was drawn and never run before.
    assert prefilled(*cached) == num_asked + len(cached) - 1
    assert [result.metrics["reused_tokens:sum"] > 0 for result in cached[1:]] == [True] * 9


PROMPTS = [Prompt([3, 1, 4, 1, 5, 9], 1), Prompt([2], 2), Prompt([*range(25)], 3)]
NUM_PROMPT_TOKENS = sum(len(prompt.tokens) for prompt in PROMPTS)


def test_first_call_has_the_bits_of_one_without_a_cache() -> None:
    args = Generate(PROMPTS, SAMPLING, 3)
    with run(caching()) as (backend, _):
        (first,) = generate(backend, args)
        (again,) = generate(backend, args)
    with run(without(caching())) as (backend, _):
        (plain,) = generate(backend, args)
    assert first.sequences == plain.sequences
    assert prefilled(first) == NUM_PROMPT_TOKENS
    check_alike(again, plain)
    assert prefilled(again) == len(PROMPTS)


def test_requests_that_share_a_call_reuse_what_each_of_them_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of which different numbers of tokens are kept, several waves, and one that joins."""
    first = Generate(PROMPTS, SamplingParams(20, ignore_eos=True), 2)
    with run(without(caching())) as (plain, _), run(caching()) as (backend, _):
        (begun,) = generate(backend, first)
        longer = [
            Prompt(int32s(prompt.tokens) + tokens + [7] * i, i)
            for i, prompt in enumerate(PROMPTS)
            for tokens in [int32s(begun.sequences[i][1].tokens)]
        ]
        then = [
            Generate([longer[0], Prompt([11, 12], 8), longer[2]], SAMPLING, 2),
            Generate([longer[1]], SamplingParams(5, 0.0)),
        ]
        joins = Generate([longer[2], Prompt([3, 1, 4, 1, 2], 9)], SamplingParams(9), 2)
        expected = [generate(plain, args)[0] for args in (*then, joins)]
        for wave_tokens in (sampler_module.WAVE_TOKENS, 200):
            monkeypatch.setattr(sampler_module, "WAVE_TOKENS", wave_tokens)
            results = watched(backend, then, Looker(join_at={4: [joins]}))
            for actual, alone in zip(results, expected, strict=True):
                assert actual is not None
                check_alike(actual, alone)
                assert actual.metrics["reused_tokens:sum"] > 0


def test_next_turn_that_joins_while_others_decode_finds_its_last() -> None:
    short, long = (
        Generate([Prompt([1, 2, 3], 1)], SamplingParams(4, ignore_eos=True)),
        Generate([Prompt([4, 5], 2)], SamplingParams(60, ignore_eos=True), 8),
    )
    with run(caching()) as (backend, _):
        (answer,) = generate(backend, short)
        backend.weights_changed()
        turn = Generate([Prompt([1, 2, 3, *tokens_of(answer)[0], 9], 3)], SAMPLING)
        watch = Looker(join_at={100: [turn]})
        *_, joined = watched(backend, [long, short], watch)
    assert joined is not None
    assert prefilled(joined) == 2


def test_other_weights_begin_without_what_was_kept() -> None:
    args = Generate(PROMPTS, SAMPLING, 2)
    with run(caching()) as (backend, _), run(without(caching())) as (plain, _):
        generate(backend, args)
        for each in (backend, plain):
            shift(each)
            each.weights_changed()
        (after,) = generate(backend, args)
        (expected,) = generate(plain, args)
    assert after.sequences == expected.sequences
    assert prefilled(after) == NUM_PROMPT_TOKENS


def shift(backend: Backend) -> None:
    """Change the weights a little."""
    assert isinstance(backend, SamplerBackend)
    with torch.no_grad():
        for i, slot in enumerate(backend.slots):
            weights = backend._tensors.view(slot)
            weights += 0.02 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(i))


def stopped(backend: Backend, args: Generate, at: int) -> tuple[GenerateResult, Generate]:
    """A `generate` that an update stops after so many tokens, and what continues it."""
    (begun,) = watched(backend, [args], Looker(stop_at={0: at}))
    assert begun is not None
    rest = remainder_of(args, begun)
    assert rest is not None
    return begun, rest.args


@pytest.mark.parametrize("num_updates", [1, 3])
def test_update_that_keeps_them_goes_on_with_the_keys_and_values_there_are(
    num_updates: int,
) -> None:
    """With weights of the same bits: the tokens are those of a sample that was not interrupted."""
    args = Generate(PROMPTS, SAMPLING, 2)
    num_samples = 2 * len(PROMPTS)
    with run(without(caching())) as (plain, _), run(caching()) as (backend, _):
        (whole,) = generate(plain, args)
        assert isinstance(backend, KeepsKv)
        begun, rest = stopped(backend, args, 10 * num_samples)
        drawn = [len(tokens) for tokens in tokens_of(begun)]
        for _ in range(num_updates - 1):
            backend.weights_updated()
            between, rest = stopped(backend, rest, 5 * num_samples)
            assert prefilled(between) == num_samples
            drawn = [n + len(tokens) for n, tokens in zip(drawn, tokens_of(between), strict=True)]
        backend.weights_updated()
        (kept,) = generate(backend, rest)
        assert prefilled(kept) == num_samples
        for num, sample, answer in zip(
            drawn, chain(*whole.sequences), chain(*kept.sequences), strict=True
        ):
            assert int32s(answer.tokens) == int32s(sample.tokens)[num:]
            expected = float32s(sample.logprobs)[num:]
            assert float32s(answer.logprobs) == pytest.approx(expected, abs=TOLERANCE)


def test_what_an_update_keeps_serves_nobody_else() -> None:
    """Neither new prompts nor samples that began with the new weights."""
    args = Generate(PROMPTS, SAMPLING, 2)
    with run(caching()) as (backend, _), run(without(caching())) as (plain, _):
        assert isinstance(backend, KeepsKv)
        begun, rest = stopped(backend, args, 60)
        for each in (backend, plain):
            shift(each)
        backend.weights_updated()
        (fresh,) = generate(plain, args)
        (again,) = generate(backend, args)
        assert again.sequences == fresh.sequences
        assert prefilled(again) == NUM_PROMPT_TOKENS
        others = [
            replace(continued(prompt, sample), tokens=[*int32s(prompt.tokens), 8, 8, 8])
            for prompt, (sample, _) in zip(PROMPTS, begun.sequences, strict=True)
        ]
        others = [replace(each, num_generated=3) for each in others]
        (other,) = generate(backend, Generate(others, SAMPLING))
        check_alike(other, generate(plain, Generate(others, SAMPLING))[0])
        # Its own are the old ones still, so its log-probabilities are not those of a new prefill.
        (kept,) = generate(backend, rest)
        (recomputed,) = generate(plain, rest)
        assert prefilled(kept) == 2 * len(PROMPTS)
        assert kept.sequences[2][0].logprobs != recomputed.sequences[2][0].logprobs
        backend.weights_changed()
        (anew,) = generate(backend, rest)
        assert anew.sequences == recomputed.sequences
        num_tokens = sum(len(int32s(prompt.tokens)) for prompt in rest.prompts)
        assert prefilled(anew) == num_tokens


def test_cancelled_request_leaves_nothing() -> None:
    args = Generate(PROMPTS, SAMPLING, 2)
    with run(caching()) as (backend, _):
        assert watched(backend, [args], Looker(cancel_at={0: 30})) == [None]
        (result,) = generate(backend, args)
        assert prefilled(result) == NUM_PROMPT_TOKENS


def test_cache_stays_within_its_bytes_and_forgets_what_was_used_longest_ago() -> None:
    per_block = BLOCK_TOKENS * TOKEN_BYTES
    deployment = caching(5 * per_block + 100)
    assert SamplerBackend.plan(deployment).scratch_bytes == 5 * per_block + 100
    with run(deployment) as (backend, heap):
        start = bytes(heap.scratch[5 * per_block :])
        often = Generate([Prompt([1] * 20)], SamplingParams(1))
        generate(backend, often)
        for seed in range(6):
            generate(backend, Generate([Prompt([2, seed] * 9)], SamplingParams(1)))
            assert prefilled(*generate(backend, often)) == 1
        assert prefilled(*generate(backend, Generate([Prompt([2, 5] * 9)], SamplingParams(1)))) == 1
        assert prefilled(*generate(backend, Generate([Prompt([2, 0] * 9)], SamplingParams(1)))) > 1
        # One that is longer than all of the memory: its beginning is kept.
        long = Generate([Prompt([*range(VOCAB)] * 6)], SamplingParams(3, ignore_eos=True))
        (first,), (again,) = generate(backend, long), generate(backend, long)
        check_alike(again, first)
        assert again.metrics["reused_tokens:sum"] == 5 * BLOCK_TOKENS
        assert bytes(heap.scratch[5 * per_block :]) == start


def test_memory_that_holds_no_block_is_refused() -> None:
    with pytest.raises(CallerError) as raised, run(caching(100)):
        pass
    assert raised.value.info.field == "scratch_bytes"
    assert raised.value.info.remedy


def test_deployment_without_a_cache_takes_no_scratch_memory() -> None:
    deployment = without(caching())
    assert SamplerBackend.plan(deployment).scratch_bytes == 0
    assert SamplerBackend.plan(replace(deployment, prefix_cache=True)).scratch_bytes == (
        8 * 256 * TOKEN_BYTES
    )


# --- The store alone ------------------------------------------------------------------------------

SHAPE = KvShape(2, 1, 2, torch.float32)


def stored(tokens: Sequence[int], padding: int) -> LlamaCache:
    """A row whose keys and values name the tokens up to each column."""
    names = torch.tensor([float(hash(tuple(tokens[: i + 1])) % 2**20) for i in range(len(tokens))])
    columns = torch.cat([torch.full((padding,), -1.0), names])
    layers = [columns[None, None, :, None].expand(1, 1, -1, 2) + layer for layer in range(4)]
    return LlamaCache(
        layers[0::2], layers[1::2], torch.zeros(1, 1), torch.tensor([padding]), columns.numel()
    )


def words() -> st.SearchStrategy[list[int]]:
    """Texts that often begin alike."""
    piece = st.sampled_from([[1] * 7, [2], [1, 2, 3], [4] * BLOCK_TOKENS])
    return st.lists(piece, min_size=1, max_size=9).map(lambda pieces: [*chain(*pieces)])


@given(st.lists(st.tuples(words(), st.integers(0, 3)), max_size=25), st.integers(1, 12))
def test_what_is_found_is_what_was_kept_for_these_tokens(
    texts: list[tuple[list[int], int]], num_blocks: int
) -> None:
    memory = torch.zeros(num_blocks * BLOCK_TOKENS * SHAPE.num_bytes, dtype=torch.uint8)
    cache = PrefixCache(memory, SHAPE)
    for tokens, padding in texts:
        before = cache.find([*tokens, 0], 0)
        cache.store(tokens, before.origin, stored(tokens, padding), 0)
        found = cache.find([*tokens, 0], 0)
        room = num_blocks * BLOCK_TOKENS
        assert found.num_tokens == min(len(tokens), room)
        assert cache.num_tokens <= room
        assert len({*found.blocks}) == len(found.blocks) <= num_blocks
        kept = stored(tokens[: found.num_tokens], 0).layers()
        expected = torch.stack([torch.stack(pair) for pair in kept])
        assert torch.equal(cache.read([found]), expected)
        both = cache.read([found, Prefix(found.origin, 1, found.blocks[:1])])
        assert torch.equal(both[:, :, :1], expected)
        assert torch.equal(both[:, :, 1, :, -1], expected[:, :, 0, :, 0])
        assert not both[:, :, 1, :, :-1].any()
    cache.clear()
    assert cache.num_tokens == 0
    assert all(cache.find([*tokens, 0], 0).num_tokens == 0 for tokens, _ in texts)
