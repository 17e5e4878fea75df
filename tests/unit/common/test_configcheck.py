"""Model configs that are refused before anything is allocated for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phaseloom.common.contract.configcheck import check_config
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.tensors import modelfiles
from phaseloom.common.tensors.modelfiles import check_directory, read_model
from tests.support.pretrained import save_model

SOUND: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": [1, 2],
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8},
    "dtype": None,
}

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"auto_map": 5}, "auto_map"),
    ({"vocab_size": 2**62}, "vocab_size"),
    ({"vocab_size": 10.5}, "vocab_size"),
    ({"vocab_size": True}, "vocab_size"),
    ({"vocab_size": None}, "vocab_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
    ({"num_labels": 2**30}, "num_labels"),
    ({"num_of_a_kind_unknown_here": 0.5}, "num_of_a_kind_unknown_here"),
    ({"some_dim": -3}, "some_dim"),
    ({"architectures": [5]}, "architectures"),
    ({"eos_token_id": {"a": 1}}, "eos_token_id"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rope_parameters": {"rope_type": 5}}, "rope_parameters.rope_type"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters"),
    ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_parameters"),
    ({"rope_scaling": {"type": "su"}}, "rope_scaling"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling"),
    ({"unknown": {"deep": float("inf")}}, "unknown.deep"),
    ({"hidden_size": 2**18, "intermediate_size": 2**21}, "hidden_size"),
    ({"hidden_size": 2**17, "vocab_size": 2**22}, "vocab_size"),
]


def test_sound_configs_pass() -> None:
    check_config(SOUND, "config", is_drawn=True)
    check_config({}, "config", is_drawn=True)
    # A large registered model.
    large = {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248}
    check_config(SOUND | large, "config", is_drawn=False)


@pytest.mark.parametrize(("changes", "field"), WRONG, ids=lambda value: str(value)[:40])
def test_field_that_is_wrong_or_too_large_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CallerError) as refused:
        check_config(SOUND | changes, "config", is_drawn=True)
    assert refused.value.info.code is Code.INVALID_ARGUMENT
    assert refused.value.info.field == f"config.{field}"
    assert refused.value.info.remedy


def change(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused_field(directory: Path) -> str:
    with pytest.raises(CallerError) as refused:
        read_model("model", directory)
    assert refused.value.info.code is Code.INVALID_ARGUMENT
    with pytest.raises(CallerError) as refused_at_start:
        check_directory(directory, "mesh.models.model")
    assert refused_at_start.value.info.message == refused.value.info.message
    return refused.value.info.field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"auto_map": 5}, "config.json.auto_map"),
        ({"vocab_size": 2**62}, "config.json.vocab_size"),
        # More than the files have: a rank would allocate it all before it could tell.
        ({"hidden_size": 2**16}, "config.json.hidden_size"),
        ({"num_hidden_layers": 1000}, "config.json.hidden_size"),
        ({"vocab_size": 2**22}, "config.json.vocab_size"),
    ],
    ids=str,
)
def test_directory_is_not_registered(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    directory = save_model(tmp_path / "model")
    read_model("model", directory)
    change(directory, **changes)
    assert refused_field(directory) == field


def test_files_are_bounded_before_they_are_read(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    tokenizer = directory / "tokenizer.json"
    with tokenizer.open("ab") as file:
        file.truncate(2**32)
    assert refused_field(directory) == "tokenizer.json"
    tokenizer.unlink()
    sound = (directory / "config.json").read_bytes()
    (directory / "config.json").write_bytes(sound + b" " * modelfiles.MAX_CONFIG_BYTES)
    assert refused_field(directory) == "config.json"
    (directory / "config.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    assert refused_field(directory) == "directory"
