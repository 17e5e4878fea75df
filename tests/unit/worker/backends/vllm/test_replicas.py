"""vLLM over several ranks, each a real process: tensor and pipeline parallelism."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import Code
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    ForwardResult,
    Generate,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import DeploymentSpec, Layout, ModelSpec
from phaseloom.common.tensors.resharding import Box
from phaseloom.worker.backends.base import Backend, RankGroup
from tests.support import vllm
from tests.support.tinymodel import VOCAB
from tests.support.versions import written
from tests.unit.worker.backends.rank_child import (
    Answer,
    Call,
    Decode,
    Digest,
    Offload,
    Score,
    Sync,
)
from tests.unit.worker.backends.ranks import Rank
from tests.unit.worker.backends.vllm.test_backend import prompts, run, sharp, tokens_of

TP, PP = Layout(tp=2), Layout(pp=2)
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp": (TP, {}),
    "tp, one kv head": (TP, {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "pp": (PP, {}),
    "pp, head of its own": (PP, {"tie_word_embeddings": False}),
}


@dataclass
class Group:
    """The ranks of one replica, with the weights of a sampler of ours."""

    ranks: list[Rank]
    holdings: list[dict[str, Box]]
    sampler: Backend

    def ask(self, call: Call) -> list[Answer]:
        """The answers of all ranks."""
        for rank in self.ranks:
            rank.send(call)
        answers = [rank.receive() for rank in self.ranks]
        assert [answer.error for answer in answers] == [None] * len(answers)
        return answers

    def generate(self, *requests: Generate, **happens: Any) -> list[Any]:
        """The results of the first rank, whose watch cancels, stops and has others join."""
        calls = [Decode([*requests], **happens), *[Decode([*requests])] * (len(self.ranks) - 1)]
        for rank, call in zip(self.ranks, calls, strict=True):
            rank.send(call)
        first, *others = (rank.receive() for rank in self.ranks)
        assert first.error is None
        for other in others:
            assert other.error is None
            assert other.generated == first.generated[: len(requests)]
        return first.generated


def started(spec: DeploymentSpec, directory: Path) -> tuple[list[Rank], list[Answer]]:
    number, store = spec.layout.num_ranks, str(directory / "store")
    ranks = [Rank(spec, RankGroup(rank, number, store), "ignore") for rank in range(number)]
    return ranks, [rank.receive() for rank in ranks]


@pytest.fixture(scope="module", params=CASES)
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    layout, changes = CASES[request.param]
    model = ModelSpec(vllm.tiny(**changes), init_seed=7)
    sampler, heap = sharp(replace(vllm.spec("sampler"), model=model))
    spec = replace(vllm.spec(), model=model, layout=layout)
    ranks, first = started(spec, tmp_path_factory.mktemp("replica"))
    try:
        assert [answer.error for answer in first] == [None, None]
        made = Group(ranks, first[0].holdings, sampler)
        made.ask(Sync(written(sampler, heap)))
        yield made
    finally:
        for rank in ranks:
            rank.close()


def test_ranks_hold_every_element_and_digest_the_whole(group: Group) -> None:
    for slot in group.sampler.version_slots:
        boxes = {held[slot.name] for held in group.holdings if slot.name in held}
        held = sum(prod(box.size) for box in boxes)
        assert held == prod(slot.shape) or "[k|v]_proj" in slot.name, slot.name
    digests = {answer.digest for answer in group.ask(Digest())}
    assert digests == {group.sampler.weights_sha256()}


def test_tokens_are_those_of_our_own_sampler_on_every_rank(group: Group) -> None:
    """32 sequences of 100 tokens, and greedy ones whose prompts are scored."""
    sampled = Generate(prompts(8), SamplingParams(100, 0.9, ignore_eos=True), num_samples=4)
    greedy = Generate(prompts(4, 3), SamplingParams(24, 0.0, ignore_eos=True), 1, True)
    for args in (sampled, greedy):
        (ours,) = group.generate(args)
        (expected,) = run(group.sampler, args)
        assert tokens_of(ours) == tokens_of(expected)
        pairs = [*zip(ours.prompt_logprobs, expected.prompt_logprobs, strict=True)]
        for mine, theirs in zip(ours.sequences, expected.sequences, strict=True):
            pairs += [(a.logprobs, b.logprobs) for a, b in zip(mine, theirs, strict=True)]
        for a, b in pairs:
            assert list(float32s(a)) == pytest.approx(list(float32s(b)), abs=2e-5)


def test_forward_scores_as_our_own_sampler(group: Group) -> None:
    texts = [[(7 * i + k) % VOCAB for i in range(129)] for k in range(3)]
    args = Forward([Datum(text[:-1], text[1:]) for text in texts])
    expected = group.sampler.forward(args)
    for answer in group.ask(Score(args)):
        assert isinstance(answer.result, ForwardResult)
        for mine, theirs in zip(answer.result.logprobs, expected.logprobs, strict=True):
            assert list(float32s(mine)) == pytest.approx(list(float32s(theirs)), abs=5e-5)


def test_same_bytes_back_after_a_switch_give_the_same_bits(group: Group) -> None:
    args = Generate(prompts(4), SamplingParams(30, ignore_eos=True), 2, True)
    before = group.generate(args)
    group.ask(Offload(is_on=True))
    again = group.generate(args)
    group.ask(Offload(is_on=False))
    assert again == before


def test_what_the_first_rank_hears_all_do_in_the_same_step(group: Group) -> None:
    """One request joins, one is cancelled, and one stops and goes on in another batch."""
    long = SamplingParams(60, ignore_eos=True)
    asked = [Generate(prompts(3, seed), long, num_samples=2) for seed in range(3)]
    late = Generate(prompts(2, 8), SamplingParams(5, ignore_eos=True), 2, True)
    alone = [group.generate(args)[0] for args in (*asked, late)]
    first, cancelled, stopped, joined = group.generate(
        *asked, cancel_at={1: 60}, stop_at={2: 100}, join_at={40: [late]}
    )
    assert tokens_of(first) == tokens_of(alone[0])
    assert cancelled is None
    assert tokens_of(joined) == tokens_of(alone[3])
    partial = tokens_of(stopped)
    assert {s.stop_reason for each in stopped.sequences for s in each} == {"partial"}
    rows = [(prompt, sample) for prompt in asked[2].prompts for sample in range(2)]
    resumed = [
        Prompt([*int32s(prompt.tokens), *tokens], prompt.seed, sample, len(tokens))
        for (prompt, sample), tokens in zip(rows, partial, strict=True)
    ]
    (rest,) = group.generate(Generate(resumed, long))
    both = [a + b for a, b in zip(partial, tokens_of(rest), strict=True)]
    assert both == tokens_of(alone[2])


def test_cancels_in_any_step_hang_nobody(group: Group) -> None:
    args = Generate(prompts(4), SamplingParams(12, ignore_eos=True))
    (whole,) = group.generate(args)
    for number in range(48):
        kept, cancelled = group.generate(args, args, cancel_at={1: number})
        assert cancelled is None or number > 40
        assert tokens_of(kept) == tokens_of(whole)


@pytest.mark.parametrize("layout", [TP, PP], ids=["tp", "pp"])
def test_killed_rank_breaks_the_group_at_once(layout: Layout, tmp_path: Path) -> None:
    spec = replace(vllm.spec(), layout=layout)
    ranks, _ = started(spec, tmp_path)
    args = Generate(prompts(16), SamplingParams(100, ignore_eos=True), num_samples=8)
    try:
        for rank in ranks:
            rank.send(Decode([args]))
        ranks[1].close()
        killed_s = time.monotonic()
        answer = ranks[0].receive()
        assert time.monotonic() - killed_s < 60.0
        assert answer.error is not None
        assert answer.error.code is Code.UNAVAILABLE
    finally:
        ranks[0].close()
