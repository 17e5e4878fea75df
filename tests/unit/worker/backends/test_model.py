"""Models from specs: the same weights from the same seed, in every backend, and no side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.model import build_model, parameter_shapes
from phaseloom.worker.state.heap import ALIGNMENT_BYTES, Heap
from tests.support.tinymodel import config
from tests.unit.worker.backends.models import running, spec

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


def test_build_model_is_a_function_of_the_seed_and_leaves_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(ModelSpec(config(), init_seed=3)).state_dict()
    torch.rand(5)
    again = build_model(ModelSpec(config(), init_seed=3)).state_dict()
    other = build_model(ModelSpec(config(), init_seed=4)).state_dict()
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_parameter_shapes_count_tied_parameters_once() -> None:
    tied = parameter_shapes(ModelSpec(config()))
    untied = parameter_shapes(ModelSpec(config(tie_word_embeddings=False)))
    assert set(untied) - set(tied) == {"lm_head.weight"}
    model = build_model(ModelSpec(config()))
    assert tied == {name: list(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "bloom"}, "model.config.model_type"),
        ({"model_type": None}, "model.config.model_type"),
        ({"dtype": "float16"}, "model.config.dtype"),
        ({"layer_types": ["chunked_attention"] * 2}, "model.config.layer_types"),
        ({"rope_parameters": LONGROPE}, "model.config.rope_parameters"),
        ({"num_hidden_layers": "two"}, "model.config.num_hidden_layers"),
        ({"hidden_act": "no such"}, "model.config"),
    ],
)
def test_heap_bytes_refuses_what_cannot_be_built(changes: dict[str, Any], field: str) -> None:
    for name in ("fsdp", "sampler"):
        with pytest.raises(CallerError) as raised:
            backend_factory(name).plan(spec(name, **changes))
        assert raised.value.info.field == field


def test_sampler_refuses_to_be_trainable() -> None:
    with pytest.raises(CallerError) as raised:
        backend_factory("sampler").plan(spec("sampler", trainable=True))
    assert raised.value.info.field == "deployments.trainable"


def test_both_backends_hold_the_same_weights_at_the_same_bytes() -> None:
    with running(spec("fsdp")) as (policy, trained), running(spec("sampler")) as (sampler, heap):
        weights = [slot for slot in policy.slots if slot.role is Role.WEIGHT]
        assert sampler.slots == weights
        stop = weights[-1].offset + weights[-1].num_bytes
        assert trained.buffer[:stop] == heap.buffer[:stop]
        assert any(trained.buffer[:stop])
        assert not any(trained.buffer[heap.num_bytes :])
        assert policy.weights_sha256() == sampler.weights_sha256()


def test_heap_begins_at_an_aligned_address() -> None:
    address = torch.frombuffer(Heap(100).buffer, dtype=torch.uint8).data_ptr()
    assert address % ALIGNMENT_BYTES == 0
