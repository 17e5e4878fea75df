"""Adapters under vLLM: the tokens of our own sampler with the same adapter, over any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    GenerateResult,
    Loss,
    OptimStep,
    SamplingParams,
)
from phaseloom.common.contract.specs import Adapter, DeploymentSpec, Layout
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend, RankGroup
from phaseloom.worker.state.heap import Heap
from tests.support import vllm
from tests.support.pretrained import pinned, save_model
from tests.support.versions import take, written
from tests.unit.worker.backends.models import batch
from tests.unit.worker.backends.rank_child import Decode, Digest, Offload, Score, Sync
from tests.unit.worker.backends.ranks import Rank
from tests.unit.worker.backends.vllm.test_backend import prompts, run, tokens_of

ADAPTER = Adapter(rank=4, alpha=8.0, seed=5)
ASKED = Generate(prompts(6), SamplingParams(40, ignore_eos=True), num_samples=2)
HEAD = replace(ADAPTER, rank=3, targets=("lm_head", "o_proj", "up_proj"))
CASES: dict[str, tuple[Layout, Adapter, dict[str, Any]]] = {
    "one rank": (Layout(), ADAPTER, {}),
    "a tied head": (Layout(), HEAD, {"tie_word_embeddings": True}),
    "tp": (Layout(tp=2), ADAPTER, {}),
    "tp, one kv head, a head of its own": (
        Layout(tp=2),
        HEAD,
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "pp": (Layout(pp=2), ADAPTER, {}),
}


def started(spec: DeploymentSpec, node: Path) -> tuple[Backend, Heap]:
    factory, place = backend_factory(spec.backend), RankGroup(node_directory=str(node))
    memory = factory.plan(spec, place)
    heap = Heap(memory.heap_bytes, memory.scratch_bytes)
    return factory(spec, heap, place), heap


def train(policy: Backend) -> None:
    for _ in range(6):
        data = batch(1, loss=Loss.CROSS_ENTROPY)
        policy.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY))
        policy.optim_step(OptimStep(AdamParams(learning_rate=0.02)))


def logprobs_of(result: GenerateResult) -> list[float]:
    return [value for group in result.sequences for s in group for value in float32s(s.logprobs)]


@pytest.mark.parametrize(("layout", "adapter", "changes"), CASES.values(), ids=CASES)
def test_it_draws_and_scores_as_our_own_sampler_with_a_trained_adapter(
    tmp_path: Path, layout: Layout, adapter: Adapter, changes: dict[str, Any]
) -> None:
    """Before and after a sync, which moves the adapter alone."""
    directory = save_model(tmp_path / "model", initializer_range=0.2, **vllm.tiny(**changes))
    model = replace(pinned(directory), adapter=adapter)
    policy, memory = started(
        DeploymentSpec("policy", "train", "fsdp", model, trainable=True), tmp_path
    )
    sampler, its_heap = started(DeploymentSpec("sampler", "rollout", "sampler", model), tmp_path)
    spec = replace(vllm.spec(), model=model, layout=layout)
    place = RankGroup(
        world_size=layout.num_ranks,
        store_path=str(tmp_path / "store"),
        node_directory=str(tmp_path),
    )
    ranks = [
        Rank(
            spec,
            RankGroup(
                rank, place.world_size, place.store_path, node_directory=place.node_directory
            ),
            "ignore",
        )
        for rank in range(place.world_size)
    ]

    def ask(*calls: Any) -> Any:
        """Of all ranks, the same; answers the first one's answer."""
        for rank in ranks:
            rank.send(calls[0])
        answers = [rank.receive() for rank in ranks]
        assert [answer.error for answer in answers] == [None] * len(ranks)
        return answers[0]

    def check_draws() -> list[list[int]]:
        (expected,), (drawn,) = run(sampler, ASKED), ask(Decode([ASKED])).generated
        assert tokens_of(drawn) == tokens_of(expected)
        assert logprobs_of(drawn) == pytest.approx(logprobs_of(expected), abs=5e-5)
        assert ask(Digest()).digest == sampler.weights_sha256()
        return tokens_of(drawn)

    try:
        first = [rank.receive() for rank in ranks]
        assert [answer.error for answer in first] == [None] * len(ranks)
        assert first[0].config["peft_type"] == "LORA"
        for slots in (answer.slots for answer in first):
            assert all(slot.role is Role.WEIGHT and ".lora_" in slot.name for slot in slots)
        of_base = check_draws()
        train(policy)
        version = written(policy, memory)
        take(sampler, its_heap, 0, version)
        ask(Sync(version))
        with_adapter = check_draws()
        assert with_adapter != of_base
        ask(Offload(is_on=True))
        assert check_draws() == with_adapter
        whole = [*int32s(ASKED.prompts[0].tokens), *with_adapter[0]]
        forward = Forward([Datum(whole[:-1], whole[1:])])
        (lp,), (expected,) = ask(Score(forward)).result.logprobs, policy.forward(forward).logprobs
        assert list(float32s(lp)) == pytest.approx(list(float32s(expected)), abs=5e-5)
    finally:
        for rank in ranks:
            rank.close()
