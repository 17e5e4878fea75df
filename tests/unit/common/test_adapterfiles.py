"""What an adapter's config means for its layers, and which configs services refuse."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from peft import LoraConfig

from phaseloom.common.tensors import adapterfiles
from phaseloom.common.tensors.adapterfiles import AdapterConfig, Scaling, adapted_layers

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")

EMPTY: tuple[object, ...] = (None, False, "", [], {})
VALUES: tuple[object, ...] = (True, 1, 0, "x", [0], {"a": None})


def config(**fields: object) -> AdapterConfig:
    return AdapterConfig(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}))


def test_every_field_of_peft_is_applied_ignored_or_refused_if_it_has_a_value() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields > adapterfiles._IGNORED - {"runtime_config"}
    assert fields > {*adapterfiles._Fields.__struct_fields__}
    remaining = fields - adapterfiles._IGNORED - {*adapterfiles._Fields.__struct_fields__}
    for name in remaining:
        for empty in EMPTY:
            config(**{name: empty})
        for value in VALUES:
            with pytest.raises(ValueError, match=name):
                config(**{name: value})


def test_uniform_scaling_is_the_one_of_all_layers() -> None:
    assert config().uniform_scaling(LAYERS) == Scaling(4, 8.0)
    rslora = config(use_rslora=True).uniform_scaling(LAYERS)
    assert math.isclose(rslora.scale, 8 / math.sqrt(4))
    # A pattern for all layers, as EVA writes it, and one for layers that were not adapted.
    patterns = {"q_proj": 2, "down_proj": 2, "k_proj": 16}
    assert config(rank_pattern=patterns).uniform_scaling(LAYERS) == Scaling(2, 8.0)
    for fields in ({"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}):
        with pytest.raises(ValueError, match="the same rank and alpha in all layers"):
            config(**fields).uniform_scaling(LAYERS)
    with pytest.raises(ValueError, match="no layers"):
        config().uniform_scaling([])


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"(a|a)*b": 4}},
        {"alpha_pattern": {".*.*.*.*x": 4}},
        {"target_modules": "(a+)+b"},
        {"exclude_modules": "a{1,9}"},
        {"layers_to_transform": [0], "layers_pattern": ["a?"]},
    ],
)
def test_services_refuse_patterns_that_can_take_long(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="groups or repetitions"):
        config(**fields)


def test_config_larger_than_its_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        config(task_type="x" * 2**20)


@pytest.mark.parametrize("extra", ["x.lora_A.weight", "x.weight", "x.lora_magnitude_vector"])
def test_tensor_outside_a_pair_is_refused(extra: str) -> None:
    pair = [f"base_model.model.y.lora_{part}.weight" for part in "AB"]
    assert adapted_layers(pair) == {"y"}
    with pytest.raises(ValueError, match="expected pairs of matrices"):
        adapted_layers([*pair, extra])
