"""vLLM in a rank: the tokens of our own sampler, the log-probabilities of transformers, and weights
that are nowhere but in the heap."""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import pairwise
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    Generate,
    GenerateResult,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import DeploymentSpec, Layout, ModelSpec
from phaseloom.common.contract.streaming import StreamedTokens
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import NONFINITE, Backend, RankGroup
from phaseloom.worker.backends.capabilities import CAPABILITIES
from phaseloom.worker.backends.model import HeapTensors, build_model
from phaseloom.worker.rank.calls import check_numbers
from phaseloom.worker.state.heap import Heap
from tests.support import vllm, warm
from tests.support.looker import Looker
from tests.support.tinymodel import VOCAB

SHARP = 4.0
"""Factor of all matrices: fresh weights draw nearly evenly, and any error would hide in that."""


def sharpen(backend: Backend, heap: Heap) -> None:
    memory = torch.frombuffer(heap.buffer, dtype=torch.uint8)
    for slot in backend.slots:
        if "norm" not in slot.name:
            flat = memory[slot.offset : slot.offset + slot.num_bytes].view(torch.float32)
            flat.mul_(SHARP)
    backend.weights_changed()


_kept: list[tuple[Backend, Heap]] = []
"""An engine that is collected takes vLLM's process groups with it; a rank has one engine only."""


def sharp(spec: DeploymentSpec) -> tuple[Backend, Heap]:
    factory = backend_factory(spec.backend)
    memory = factory.plan(spec)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    backend = factory(spec, heap)
    sharpen(backend, heap)
    _kept.append((backend, heap))
    return backend, heap


@pytest.fixture(scope="module")
def one() -> tuple[Backend, Heap]:
    return sharp(vllm.spec())


def prompts(num: int, seed: int = 1) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        Prompt([rng.randrange(VOCAB) for _ in range(4 + i % 7)], seed=rng.getrandbits(40))
        for i in range(num)
    ]


def run(backend: Backend, *requests: Generate, looker: Looker | None = None) -> list[Any]:
    looker = looker or Looker()
    for args in requests:
        backend.check_generate(args)
    backend.generate(requests, looker)
    return looker.ordered


def tokens_of(result: GenerateResult) -> list[list[int]]:
    return [list(int32s(s.tokens)) for group in result.sequences for s in group]


def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(
    one: tuple[Backend, Heap],
) -> None:
    backend, heap = one
    model = build_model(vllm.spec().model)
    views = {
        s.name: torch.frombuffer(
            heap.buffer, dtype=torch.float32, offset=s.offset, count=s.num_bytes // 4
        ).view(s.shape)
        for s in backend.slots
    }
    for name, parameter in model.named_parameters():
        parameter.data = views[name].clone()
    asked = prompts(8)
    params = SamplingParams(24, temperature=0.0, ignore_eos=True)
    (result,) = run(backend, Generate(asked, params, prompt_logprobs=True))
    for prompt, (sequence,), scored in zip(
        asked, result.sequences, result.prompt_logprobs, strict=True
    ):
        text = [*int32s(prompt.tokens), *int32s(sequence.tokens)]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text])).logits[0]
        lp = torch.log_softmax(logits, -1)
        start = len(int32s(prompt.tokens))
        assert lp[start - 1 : -1].argmax(-1).tolist() == list(int32s(sequence.tokens))
        expected = [0.0, *(float(lp[i, text[i + 1]]) for i in range(len(text) - 1))]
        assert list(float32s(scored)) == pytest.approx(expected[:start], abs=2e-5)
        assert list(float32s(sequence.logprobs)) == pytest.approx(expected[start:], abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_same_seeds_draw_the_tokens_of_our_own_sampler(
    one: tuple[Backend, Heap], temperature: float
) -> None:
    """32 sequences of 100 tokens."""
    args = Generate(prompts(8), SamplingParams(100, temperature, ignore_eos=True), num_samples=4)
    (ours,) = run(one[0], args)
    sampler, _ = sharp(vllm.spec("sampler"))
    assert sampler.weights_sha256() == one[0].weights_sha256()
    (expected,) = run(sampler, args)
    assert tokens_of(ours) == tokens_of(expected)
    for mine, theirs in zip(ours.sequences, expected.sequences, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert list(float32s(a.logprobs)) == pytest.approx(list(float32s(b.logprobs)), abs=2e-5)


def test_requests_of_many_kinds_in_one_call_end_as_in_our_own_sampler(
    one: tuple[Backend, Heap],
) -> None:
    texts = [chr(ord("a") + i % 26) for i in range(VOCAB)]
    model = replace(vllm.spec().model, token_texts=texts)
    requests = [
        Generate(prompts(2), SamplingParams(50, stop_token_ids=[3, 4, 5]), num_samples=2),
        Generate(prompts(2, 2), SamplingParams(50, stop_strings=["b", "xy"], ignore_eos=True)),
        Generate(prompts(1, 3), SamplingParams(7, temperature=0.0), prompt_logprobs=True),
        Generate([Prompt([1], seed=9)], SamplingParams(20, 1.3), 1, True, 3),
        Generate(prompts(2, 4), SamplingParams(2), 2, True, 5),
    ]
    results = []
    for name in ("vllm", "sampler"):
        backend, _ = sharp(replace(vllm.spec(name), model=model))
        results.append(run(backend, *requests))
    for mine, theirs in zip(*results, strict=True):
        assert tokens_of(mine) == tokens_of(theirs)
        assert [[s.stop_reason for s in group] for group in mine.sequences] == [
            [s.stop_reason for s in group] for group in theirs.sequences
        ]
        assert [len(lp) for lp in mine.prompt_logprobs] == [
            len(lp) for lp in theirs.prompt_logprobs
        ]
        assert [*map(int32s, mine.prompt_top_tokens)] == [*map(int32s, theirs.prompt_top_tokens)]
        for a, b in zip(mine.prompt_top_logprobs, theirs.prompt_top_logprobs, strict=True):
            assert list(float32s(a)) == pytest.approx(list(float32s(b)), abs=2e-5)
    reasons = {s.stop_reason for r in results[0] for group in r.sequences for s in group}
    assert reasons == {"stop", "length"}


SHAPED = [
    SamplingParams(40, 0.9, ignore_eos=True, top_k=5),
    SamplingParams(40, 1.1, ignore_eos=True, top_p=0.6, min_p=0.02),
    SamplingParams(40, 0.0, ignore_eos=True, repetition_penalty=1.5),
    SamplingParams(40, 0.8, ignore_eos=True, presence_penalty=1.0, frequency_penalty=0.4),
    SamplingParams(40, 1.0, ignore_eos=True, bad_words=[[3], [4, 5]], top_logprobs=3),
]


def test_every_sampling_parameter_shapes_tokens_as_in_our_own_sampler(
    one: tuple[Backend, Heap],
) -> None:
    requests = [Generate(prompts(3, seed), p, num_samples=2) for seed, p in enumerate(SHAPED)]
    ours = run(one[0], *requests)
    expected = run(sharp(vllm.spec("sampler"))[0], *requests)
    for mine, theirs in zip(ours, expected, strict=True):
        assert tokens_of(mine) == tokens_of(theirs)
    for mine, theirs in zip(ours[-1].sequences, expected[-1].sequences, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert list(int32s(a.top_tokens)) == list(int32s(b.top_tokens))
            top, want = float32s(a.top_logprobs), float32s(b.top_logprobs)
            assert list(top) == pytest.approx(list(want), abs=2e-5)


def test_stopped_request_goes_on_in_another_batch_with_the_same_tokens(
    one: tuple[Backend, Heap],
) -> None:
    backend, _ = one
    asked = prompts(32)
    params = SamplingParams(48, ignore_eos=True, top_p=0.95, frequency_penalty=0.1)
    whole = tokens_of(run(backend, Generate(asked, params))[0])
    looker = Looker(stop_at={0: 32 * 17})
    (part,) = run(backend, Generate(asked, params), looker=looker)
    assert {s.stop_reason for group in part.sequences for s in group} == {"partial"}
    partial = tokens_of(part)
    assert all(0 < len(tokens) < 48 for tokens in partial)
    resumed = [
        Prompt([*int32s(prompt.tokens), *tokens], prompt.seed, num_generated=len(tokens))
        for prompt, tokens in zip(asked, partial, strict=True)
    ]
    rest = run(backend, Generate(resumed[:9], params), Generate(resumed[9:], params))
    behind = [tokens for result in rest for tokens in tokens_of(result)]
    assert [a + b for a, b in zip(partial, behind, strict=True)] == whole


@pytest.mark.parametrize("tell_every", [1, 4, 1000])
def test_told_tokens_are_those_of_the_result_for_requests_that_stream(
    one: tuple[Backend, Heap], tell_every: int
) -> None:
    """Also of one that is stopped, which goes on right behind them."""
    sampling = SamplingParams(12, top_logprobs=2)
    requests = [
        Generate(prompts(2), sampling, 2, stream=True),
        Generate(prompts(1), sampling),
        Generate(prompts(1), SamplingParams(40, ignore_eos=True), stream=True),
    ]
    looker = Looker(stop_at={2: 15}, tell_every=tell_every)
    results = run(one[0], *requests, looker=looker)
    assert set(looker.told) == {0, 2}
    for i, told in looker.told.items():
        streamed = StreamedTokens()
        assert all(streamed.accept(each) == each for each in told), "in order, each of them once"
        for rest, sequence in streamed.remaining(results[i]):
            assert not rest.tokens
            pieces = [e for e in told if (e.prompt, e.sample) == (rest.prompt, rest.sample)]
            for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
                packed = b"".join(getattr(e, name) or b"" for e in pieces)
                assert packed == (getattr(sequence, name) or b"")


def test_cancelled_request_leaves_at_once_and_another_joins(one: tuple[Backend, Heap]) -> None:
    backend, _ = one
    long, short = SamplingParams(100, ignore_eos=True), SamplingParams(5, ignore_eos=True)
    late = Generate(prompts(1, 8), short, num_samples=2, prompt_logprobs=True)
    looker = Looker(cancel_at={1: 6}, join_at={3: [late]})
    results = run(
        backend,
        Generate(prompts(1, 5), SamplingParams(20)),
        Generate(prompts(1, 6), long),
        looker=looker,
    )
    assert results[1] is None
    assert looker.seen[1][-1][0] <= 7
    assert (looker.open[0][-1], looker.open[2][-1]) == (0, 0)
    assert tokens_of(results[2]) == tokens_of(run(backend, late)[0])
    assert len(results[2].prompt_logprobs) == 1


def test_request_alone_gives_the_same_bits_whenever_it_runs(one: tuple[Backend, Heap]) -> None:
    """Nothing that was computed before, such as its prompt's KV cache, is used."""
    args = Generate([Prompt([*range(20), *range(20)], seed=3)], SamplingParams(9), 2, True)
    first = run(one[0], args)
    run(one[0], Generate(prompts(5), SamplingParams(30)))
    assert run(one[0], args) == first


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 3}])
def test_row_of_nan_ends_and_leaves_the_others_as_they_were(
    value: float, params: dict[str, float]
) -> None:
    backend, heap = _untied()
    healthy = [
        Generate(prompts(2, seed=9), SamplingParams(9, 1.0, ignore_eos=True), 2),
        Generate(prompts(1, seed=10), SamplingParams(12, 0.0, ignore_eos=True)),
    ]
    alone = run(backend, *healthy)
    used = {token for request in healthy for p in request.prompts for token in int32s(p.tokens)}
    drawn = {token for result in alone for tokens in tokens_of(result) for token in tokens}
    bad = next(token for token in range(VOCAB) if token not in used | drawn)
    (slot,) = (slot for slot in backend.slots if slot.name == "model.embed_tokens.weight")
    row = HeapTensors(heap).view(slot)[bad]
    before = row.clone()
    try:
        row.fill_(value)
        backend.weights_changed()
        guilty = Generate([Prompt([bad], 4)], replace(SamplingParams(9), **params))
        result, *others = run(backend, guilty, *healthy)
    finally:
        row.copy_(before)
        backend.weights_changed()
    assert [tokens_of(other) for other in others] == [tokens_of(one) for one in alone]
    ((ended,),) = result.sequences
    assert (ended.stop_reason, int32s(ended.tokens)) == (NONFINITE, [])
    with pytest.raises(CallerError, match="NaN or infinite"):
        check_numbers(result)


@cache
def _untied() -> tuple[Backend, Heap]:
    model = ModelSpec(vllm.tiny(tie_word_embeddings=False), init_seed=7)
    return sharp(replace(vllm.spec(), model=model))


def test_forward_scores_as_our_own_sampler_and_refuses_other_targets(
    one: tuple[Backend, Heap],
) -> None:
    backend, _ = one
    length = 128
    texts = [[(7 * i + k) % VOCAB for i in range(length + 1)] for k in range(3)]
    args = Forward([Datum(text[:-1], text[1:]) for text in texts])
    backend.check_forward(args)
    got = backend.forward(args)
    sampler, _ = sharp(vllm.spec("sampler"))
    expected = sampler.forward(args)
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert list(float32s(mine)) == pytest.approx(list(float32s(theirs)), abs=5e-5)
    with pytest.raises(CallerError) as raised:
        backend.check_forward(Forward([Datum([1, 2, 3], [2, 9, 4])]))
    assert raised.value.info.field == "args.batch[0].targets"
    with pytest.raises(CallerError, match="positions of the model") as raised:
        backend.check_forward(Forward([Datum([1] * (length + 1), [1] * (length + 1))]))
    assert raised.value.info.field == "args.batch[0].tokens"


def test_new_bytes_in_the_heap_are_the_model_and_the_old_ones_come_back_bit_equal(
    one: tuple[Backend, Heap],
) -> None:
    backend, heap = one
    args = Generate(prompts(4), SamplingParams(30, ignore_eos=True), num_samples=2)
    before, digest, bytes_before = run(backend, args), backend.weights_sha256(), bytes(heap.buffer)
    slot = next(s for s in backend.slots if s.name.endswith("layers.1.mlp.up_proj.weight"))
    heap.buffer[slot.offset : slot.offset + slot.num_bytes] = bytes(slot.num_bytes)
    backend.weights_changed()
    assert tokens_of(run(backend, args)[0]) != tokens_of(before[0])
    assert backend.weights_sha256() != digest
    heap.release()
    heap.buffer[:] = bytes_before
    backend.weights_changed()
    assert run(backend, args) == before
    assert backend.weights_sha256() == digest


def test_every_checkpoint_tensor_is_whole_in_one_slot_and_no_slots_overlap(
    one: tuple[Backend, Heap],
) -> None:
    backend, heap = one
    shapes = {s.name: s.shape for s in backend.version_slots}
    assert {s.name: s.shape for s in backend.slots} == shapes
    spans = sorted((s.offset, s.offset + s.num_bytes) for s in backend.slots)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= heap.num_bytes


@pytest.mark.parametrize("model_type", CAPABILITIES["vllm"].model_types)
def test_other_architectures_follow_without_rules_of_ours(model_type: str) -> None:
    ties = model_type != "llama"
    config = vllm.tiny(model_type, pad_token_id=0, tie_word_embeddings=ties)
    model = ModelSpec(config, init_seed=3)
    args = Generate(prompts(3), SamplingParams(30, ignore_eos=True))
    drawn = []
    for name in ("vllm", "sampler"):
        backend, _ = sharp(replace(vllm.spec(name), model=model))
        drawn.append((backend.weights_sha256(), tokens_of(run(backend, args)[0])))
    assert drawn[0] == drawn[1]


def test_rank_has_no_child_processes_and_leaves_nothing_in_shared_memory(
    one: tuple[Backend, Heap],
) -> None:
    before = set(os.listdir("/dev/shm"))
    run(one[0], Generate(prompts(2), SamplingParams(4)))
    children = psutil.Process().children(recursive=True)
    assert [each for each in children if warm.__name__ not in each.cmdline()] == []
    mine = [name for name in set(os.listdir("/dev/shm")) - before if str(os.getpid()) in name]
    assert mine == []


def test_cache_lies_in_scratch_memory_that_goes_with_the_heap(one: tuple[Backend, Heap]) -> None:
    backend, heap = one
    args = Generate(prompts(4), SamplingParams(60, ignore_eos=True))
    before, weights = run(backend, args), bytes(heap.buffer)
    assert heap.scratch_bytes == vllm.SCRATCH_BYTES
    assert any(bytes(heap.scratch)), "keys and values"
    heap.release()
    assert heap.resident_bytes() == 0
    heap.buffer[:] = weights
    backend.weights_changed()
    assert run(backend, args) == before
    assert heap.resident_bytes() > heap.num_bytes


@pytest.mark.parametrize("scratch_bytes", [2**16, 1000])
def test_cache_too_small_for_one_sequence_is_refused_with_what_vllm_says(
    scratch_bytes: int,
) -> None:
    with pytest.raises(CallerError) as raised:
        sharp(vllm.spec(scratch_bytes=scratch_bytes))
    assert raised.value.info.field == "scratch_bytes"
    assert "scratch memory" in raised.value.info.message


def test_dynamic_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = replace(vllm.spec().model, config=vllm.tiny("llama", rope_parameters=rope))
    with pytest.raises(CallerError, match="rope_type dynamic") as raised:
        backend_factory("vllm").plan(replace(vllm.spec(), model=model))
    assert raised.value.info.field == "model.config.rope_parameters"


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(tp=3), "layout.tp"),
        (Layout(pp=3), "layout.pp"),
        (Layout(cp=2), "layout.cp"),
    ],
)
def test_layout_that_cannot_be_spread_evenly_is_refused(
    one: tuple[Backend, Heap], layout: Layout, field: str
) -> None:
    """Where torch has its process group already, as in a rank."""
    spec = replace(vllm.spec(), layout=layout)
    with pytest.raises(CallerError) as raised:
        backend_factory("vllm").plan(spec, RankGroup(0, layout.num_ranks))
    assert raised.value.info.field == field
