"""Adapters of several policies in one batch of a sampler: each row as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from phaseloom.common.contract.specs import Adapter, DeploymentSpec
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import AdapterVersion, RankGroup
from phaseloom.worker.state.heap import Heap
from tests.support.looker import Looker
from tests.support.pretrained import pinned, save_model
from tests.unit.worker.backends.models import generate, watched

RANKS = (8, 1, 4, 16, 2)
LARGEST = Adapter(rank=16, alpha=16.0)
PROMPTS = [Prompt(int32s([1, 5, 9]), seed=3), Prompt(int32s([2, 4, 6, 8, 10]), seed=4)]
SAMPLING = SamplingParams(16, ignore_eos=True)
REQUEST = Generate(PROMPTS, SAMPLING, num_samples=2)


class Node:
    """Starts ranks on one base, and makes versions of adapters on it."""

    def __init__(self, directory: Path, base: Path) -> None:
        self._ranks = RankGroup(node_directory=str(directory))
        self.base = base

    def start(self, backend: str, adapter: Adapter, **changes: Any) -> tuple[Any, Heap]:
        dtype = changes.pop("dtype", "float32")
        model = replace(pinned(self.base, dtype=dtype), adapter=adapter)
        spec = DeploymentSpec("it", "pool", backend, model, trainable=backend == "fsdp", **changes)
        factory = backend_factory(backend)
        memory = factory.plan(spec, self._ranks)
        heap = Heap(memory.heap_bytes, memory.scratch_bytes)
        return factory(spec, heap, self._ranks), heap

    def version(self, name: str, adapter: Adapter, seed: int, dtype: str = "float32") -> Any:
        """A version, and a sampler that has its weights as its own."""
        alone, heap = self.start("sampler", adapter, dtype=dtype)
        weights = torch.frombuffer(heap.buffer, dtype=getattr(torch, dtype))
        weights.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(seed))
        alone.weights_changed()
        return AdapterVersion(name, adapter, alone.version_slots, heap.buffer), alone


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, save_model(tmp_path / "model"))


def tokens(result: GenerateResult) -> list[list[int]]:
    return [int32s(each.tokens) for group in result.sequences for each in group]


def logprobs(result: GenerateResult) -> np.ndarray[Any, Any]:
    return np.array([float32s(each.logprobs) for group in result.sequences for each in group])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_mixed_ranks_are_as_alone(node: Node, dtype: str) -> None:
    made = [
        node.version(f"v{i}", Adapter(rank=rank, alpha=8.0 * (1 + i)), i, dtype)
        for i, rank in enumerate(RANKS)
    ]
    shared, _ = node.start("sampler", LARGEST, max_adapters=len(RANKS), dtype=dtype)
    for version, _ in made:
        shared.check_adapter(version)
    versions = {i: version for i, (version, _) in enumerate(made)}
    requests = [REQUEST] * (len(RANKS) + 1)  # the last is of the deployment's own weights
    found = watched(shared, requests, Looker(adapters=versions))
    expected = [generate(alone, REQUEST)[0] for _, alone in made] + generate(shared, REQUEST)
    assert len({str(tokens(each)) for each in expected}) == len(requests)
    for ours, alone in zip(found, expected, strict=True):
        assert ours is not None
        assert tokens(ours) == tokens(alone)
        tolerance = 1e-5 if dtype == "float32" else 0.1
        assert np.abs(logprobs(ours) - logprobs(alone)).max() <= tolerance


def test_log_probs_are_the_trainers(node: Node) -> None:
    adapter = Adapter(rank=4, alpha=8.0)
    version, _ = node.version("v", adapter, 1)
    policy, heap = node.start("fsdp", adapter)
    heap.buffer[: len(version.memory)] = version.memory  # weights come first in both
    shared, _ = node.start("sampler", LARGEST, max_adapters=1)
    request = replace(REQUEST, prompt_logprobs=True)
    [own, drawn] = watched(shared, [request, request], Looker(adapters={1: version}))
    assert own is not None
    assert drawn is not None
    assert tokens(own) != tokens(drawn)
    for prompt, told, group in zip(PROMPTS, drawn.prompt_logprobs, drawn.sequences, strict=True):
        for sequence in group:
            whole = [*int32s(prompt.tokens), *int32s(sequence.tokens)]
            [lp] = policy.forward(Forward([Datum(whole[:-1], whole[1:])])).logprobs
            said = [*float32s(told)[1:], *float32s(sequence.logprobs)]
            assert np.abs(np.array(float32s(lp)) - np.array(said)).max() <= 1e-5


def test_more_versions_than_places_take_turns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [node.version(f"v{i}", Adapter(rank=4), i) for i in range(5)]
    shared, heap = node.start("sampler", LARGEST, max_adapters=2)
    copied: list[str] = []
    load = shared._adapters.load

    def counted(version: AdapterVersion, others: Any) -> Any:
        if version.name not in shared._adapters._kept:
            copied.append(version.name)
        return load(version, others)

    monkeypatch.setattr(shared._adapters, "load", counted)
    expected = [tokens(generate(alone, REQUEST)[0]) for _, alone in made]

    def run(*numbers: int) -> None:
        versions = {i: made[number][0] for i, number in enumerate(numbers)}
        found = watched(shared, [REQUEST] * len(numbers), Looker(adapters=versions))
        assert [tokens(each) for each in found if each] == [expected[i] for i in numbers]

    run(0, 1, 2, 3, 4, 4)
    assert copied == ["v0", "v1", "v2", "v3", "v4"]
    run(4)
    run(3)
    assert len(copied) == 5, "they were there"
    run(0)  # in the place of 4, which was used before 3
    run(3)
    run(4)
    assert copied[5:] == ["v0", "v4"]
    heap.scratch[:] = b"\xff" * len(heap.scratch)  # as it is after a switch
    shared.weights_changed()
    run(4, 3)
    assert copied[7:] == ["v4", "v3"]


def test_requests_of_other_adapters_join_a_batch(node: Node) -> None:
    made = [node.version(f"v{i}", Adapter(rank=4), i) for i in range(3)]
    shared, _ = node.start("sampler", LARGEST, max_adapters=2, prefix_cache=True)
    versions = {i: version for i, (version, _) in enumerate(made)}
    expected = [tokens(generate(alone, REQUEST)[0]) for _, alone in made]
    for _ in range(2):  # the second time from the prefix cache
        look = Looker(join_at={3: [REQUEST], 6: [REQUEST]}, adapters=versions)
        found = watched(shared, [REQUEST], look)
        assert [tokens(each) for each in found if each] == expected
    reused = [each.metrics["reused_tokens:sum"] for each in found if each]
    assert all(num > 0 for num in reused)


@pytest.mark.parametrize(
    ("adapter", "max_adapters", "message"),
    [
        (Adapter(rank=32), 2, "rank 32"),
        (Adapter(rank=4, targets=("lm_head",)), 2, "lm_head"),
        (Adapter(rank=4), 0, "no room for adapters"),
    ],
)
def test_what_does_not_fit_is_refused(
    node: Node, adapter: Adapter, max_adapters: int, message: str
) -> None:
    version, _ = node.version("v", adapter, 1)
    shared, _ = node.start("sampler", LARGEST, max_adapters=max_adapters)
    with pytest.raises(CallerError, match=message) as caught:
        shared.check_adapter(version)
    assert caught.value.info.field == "args.weights"
    assert caught.value.info.remedy


def test_adapter_of_another_base_is_refused(node: Node, tmp_path: Path) -> None:
    other = Node(tmp_path, save_model(tmp_path / "other", hidden_size=64))
    version, _ = other.version("v", Adapter(rank=4), 1)
    shared, _ = node.start("sampler", LARGEST, max_adapters=1)
    with pytest.raises(CallerError, match="another base"):
        shared.check_adapter(version)


@pytest.mark.parametrize("change", [{"backend": "fsdp"}, {"max_adapters": -1}])
def test_deployment_that_cannot_share_is_refused(node: Node, change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"backend": "sampler", "max_adapters": 2, **change}
    start: Callable[..., Any] = node.start
    with pytest.raises(CallerError) as caught:
        start(settings.pop("backend"), LARGEST, **settings)
    assert caught.value.info.field == "max_adapters"
