"""Directories of models, as they are read for a registration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors.torch import load_file, save_file

from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.tensors.modelfiles import (
    check_companions,
    check_directory,
    is_companion,
    read_model,
)
from tests.support.pretrained import TOKENIZER_FILES, loaded, save_model


def test_registration_names_every_file_that_belongs_to_the_model(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    (directory / "modeling_evil.py").write_text("raise SystemExit")
    (directory / "notes").mkdir()
    model = read_model("tiny", directory)
    assert model.directory.path == str(directory)
    names = {file.name for file in model.directory.files}
    assert names >= TOKENIZER_FILES | {"config.json", "model.safetensors.index.json"}
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert "modeling_evil.py" not in names
    for file in model.directory.files:
        content = (directory / file.name).read_bytes()
        assert (file.num_bytes, file.blake3) == (len(content), blake3(content).hexdigest())
    assert model.dtypes == ["bfloat16"]
    assert model.num_parameters == sum(p.numel() for p in loaded(directory).parameters())
    assert model.config["model_type"] == "qwen3"
    assert {name for name in names if is_companion(name)} == TOKENIZER_FILES


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def bad_config(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def bad_end_tokens(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')


def no_shard(directory: Path) -> None:
    min(directory.glob("*.safetensors")).unlink()


def torn_shard(directory: Path) -> None:
    first = min(directory.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])


def index_of(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def no_weights(directory: Path) -> None:
    index_of(directory).unlink()


def wrong_index(directory: Path) -> None:
    content = json.loads(index_of(directory).read_text())
    del content["weight_map"]["model.norm.weight"]
    index_of(directory).write_text(json.dumps(content))


def index_that_leaves(directory: Path) -> None:
    index_of(directory).write_text('{"weight_map": {"a": "../a.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (no_config, Code.NOT_FOUND, r"config\.json is missing"),
        (bad_config, Code.INVALID_ARGUMENT, r"config\.json: "),
        (bad_end_tokens, Code.INVALID_ARGUMENT, r"generation_config\.json: "),
        (no_shard, Code.NOT_FOUND, r"\.safetensors is missing"),
        (torn_shard, Code.INVALID_ARGUMENT, r"\.safetensors: the tensors end"),
        (no_weights, Code.NOT_FOUND, r"index\.json is missing"),
        (wrong_index, Code.INVALID_ARGUMENT, "tensors in the index differ"),
        (index_that_leaves, Code.INVALID_ARGUMENT, "a file outside the directory"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_directory_that_is_no_models_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], code: Code, message: str
) -> None:
    directory = save_model(tmp_path / "model")
    damage(directory)
    with pytest.raises(CallerError, match=message) as refused:
        read_model("tiny", directory)
    assert (refused.value.info.code, refused.value.info.field) == (code, "directory")
    assert refused.value.info.remedy
    with pytest.raises(CallerError, match=message):
        check_directory(directory, "mesh.models.tiny")


def test_missing_directory_and_bad_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="does not exist") as missing:
        read_model("tiny", tmp_path / "none")
    assert missing.value.info.code is Code.NOT_FOUND
    with pytest.raises(CallerError, match="not a valid model name"):
        read_model("a..b", tmp_path)


def test_weights_are_those_that_transformers_loads(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    shards = {path.name for path in directory.glob("*.safetensors")}
    for stray in ("model.fp16.safetensors", "consolidated.safetensors", "tokenizer.safetensors"):
        shutil.copy(min(directory.glob("model-*")), directory / stray)
    registered = {file.name for file in read_model("tiny", directory).directory.files}
    assert {name for name in registered if name.endswith(".safetensors")} == shards
    # A single file takes precedence over the shards, which are stale.
    loaded(save_model(tmp_path / "other", seed=5)).save_pretrained(directory)
    index_of(directory).write_text("{}")
    registered = {file.name for file in read_model("tiny", directory).directory.files}
    weights = {name for name in registered if ".safetensors" in name}
    assert weights == {"model.safetensors"}


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_directory_from_which_transformers_loads_something_else_is_refused(
    tmp_path: Path, name: str
) -> None:
    directory = save_model(tmp_path / "model")
    path = directory / name
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    with pytest.raises(CallerError, match=r"adapter_config|transformers_weights") as caught:
        check_directory(directory, "base")
    assert (caught.value.info.code, caught.value.info.field) == (Code.FAILED_PRECONDITION, "base")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model")
    first, second, *_ = sorted(directory.glob("model-*.safetensors"))
    save_file(load_file(first) | load_file(second), second, {"format": "pt"})
    with pytest.raises(CallerError, match="tensors in the index differ"):
        check_directory(directory, "base")


@pytest.mark.parametrize("change", ["overwrite", "add", "remove"])
def test_small_files_that_differ_from_the_registered_ones_are_a_loss(
    change: str, tmp_path: Path
) -> None:
    model = read_model("tiny", save_model(tmp_path))
    (tmp_path / "README.md").write_text("for people")
    check_companions(model)
    file = tmp_path / ("chat_template.jinja" if change == "add" else "tokenizer_config.json")
    if change == "remove":
        file.unlink()
    else:
        file.write_text("{}")
    with pytest.raises(ResourceError, match=file.name) as lost:
        check_companions(model)
    assert lost.value.info.code is Code.DATA_LOSS
