"""Merging an adapter into its base: what `peft` makes of them, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from phaseloom.cli.merging import merge
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.tensors.modelfiles import read_model
from tests.support.pretrained import TOKENIZER_FILES, loaded, save_model

QUIET = Console(file=io.StringIO())
TARGETS = ["q_proj", "down_proj"]


def save_adapter(
    base: Path, directory: Path, targets: list[str] | str = TARGETS, **fields: Any
) -> Path:
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, **fields})
    model: Any = get_peft_model(loaded(base), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    model.save_pretrained(str(directory), save_embedding_layers=False)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_peft_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = save_model(tmp_path / "base", dtype)
    adapter = save_adapter(base, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "merged", console=QUIET)
    read_model("merged", tmp_path / "merged")  # can be registered
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= TOKENIZER_FILES
    plain: Any = PeftModel.from_pretrained(loaded(base), str(adapter))
    expected = plain.merge_and_unload().state_dict()
    before, made = (loaded(tmp_path / name, dtype).state_dict() for name in ("base", "merged"))
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor.to(dtype)), name  # rounded once
        assert torch.equal(made[name], before[name]) != (name.split(".")[-2] in TARGETS)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(12).view(2, 6)).logits
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {r"layers\.1\.self_attn\.(q|k)_proj": 2, "q_proj": 8}},
        {"alpha_pattern": {"^model.layers.1.mlp.down_proj": 32, "down_proj": 1}},
        {"target_modules": r".*\.(q|down)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["self_attn.q_proj"]},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layers_to_transform": 0},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.5},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"fan_in_fan_out": True},
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_each_supported_field_is_applied_as_peft_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = save_model(tmp_path / "base", torch.float32)
    adapter = save_adapter(base, tmp_path / "adapter", **fields)
    merge(base, adapter, tmp_path / "merged", console=QUIET)
    plain: Any = PeftModel.from_pretrained(loaded(base), str(adapter))
    expected, actual = logits(plain), logits(loaded(tmp_path / "merged"))
    assert (expected - logits(loaded(base))).abs().max() > 1e-2
    assert torch.allclose(actual, expected, rtol=0.0, atol=1e-4)


def test_layers_stored_transposed_are_merged_transposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = tmp_path / "base"
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    factory: Any = GPT2LMHeadModel
    factory(config).save_pretrained(base)
    # c_proj of attention is square, so its shape does not say how it is stored.
    adapter = save_adapter(base, tmp_path / "adapter", ["c_attn", "c_proj"], fan_in_fan_out=True)
    merge(base, adapter, tmp_path / "merged", console=QUIET)
    plain: Any = PeftModel.from_pretrained(loaded(base), str(adapter))
    actual = logits(loaded(tmp_path / "merged"))
    assert torch.allclose(actual, logits(plain), rtol=0.0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of `peft`, about GPT-2's layers and tied heads
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("model_type", "prefix", "targets"),
    [
        ("gpt2", "", ["c_attn", "c_fc", "lm_head"]),
        ("gpt2", "transformer.", ["c_proj", "lm_head"]),
        ("gpt_neox", "", ["query_key_value", "lm_head"]),
        ("llama", "model.", ["q_proj", "lm_head"]),
    ],
)
def test_files_may_name_weights_otherwise_than_memory(
    model_type: str, prefix: str, targets: list[str], tied: bool, tmp_path: Path
) -> None:
    """Args: prefix: left out in the base's files."""
    changes: dict[str, Any] = {"model_type": model_type, "tie_word_embeddings": tied}
    changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    base = save_model(tmp_path / "base", torch.float32, **changes)
    whole: Any = loaded(base)
    whole.save_pretrained(base)
    for file in base.glob("*.index.json"):
        file.unlink()
    for file in base.glob("model-*"):
        file.unlink()
    path = base / "model.safetensors"
    save_file(
        {n.removeprefix(prefix): t for n, t in load_file(path).items()}, path, {"format": "pt"}
    )
    adapter = save_adapter(base, tmp_path / "adapter", targets)
    merge(base, adapter, tmp_path / "merged", console=QUIET)
    plain: Any = PeftModel.from_pretrained(loaded(base), str(adapter))
    actual = logits(loaded(tmp_path / "merged"))
    assert torch.allclose(actual, logits(plain), rtol=0.0, atol=1e-4)
    assert (actual - logits(loaded(base))).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "OLoRA"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "something new"),
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.down_proj"]),
        ("megatron_config", {"tp": 2}),
        ("alora_invocation_tokens", [1]),
        ("arrow_config", {"top_k": 2}),
        ("use_qalora", True),
        ("kasa_config", {"beta": 0.1}),
        ("ensure_weight_tying", True),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("a_field_of_tomorrow", 0),
        ("r", 0),
        ("r", "4"),
        ("lora_alpha", None),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"(": 4}),
        ("layers_to_transform", [7]),
        ("exclude_modules", ["q_proj"]),
        ("target_modules", ["down_proj"]),
    ],
)
def test_each_other_field_of_the_adapter_is_refused_by_name(
    tmp_path: Path, field: str, value: object
) -> None:
    base = save_model(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    excludes = field in ("layers_to_transform", "exclude_modules", "target_modules")
    label = "exclude" if excludes else "pattern" if value == {"(": 4} else field
    with pytest.raises(CallerError, match=f"{label}|q_proj") as caught:
        merge(base, adapter, tmp_path / "merged", console=QUIET)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    assert caught.value.info.field == "adapter"
    assert not (tmp_path / "merged").exists()


STRAYS = (
    *("model.fp16.safetensors", "consolidated.safetensors", "pytorch_model.bin"),
    *("model-00001-of-00007.safetensors", "a.safetensors", "training.safetensors"),
    *("model.fp16.safetensors.index.json", "operation.json"),
)


@pytest.mark.parametrize("has_shards", [True, False])
def test_files_that_are_not_the_models_are_neither_merged_nor_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_shards: bool
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = save_model(tmp_path / "base", torch.float32)
    shard = min(base.glob("model-*.safetensors"))
    if not has_shards:  # the shards and their index are stale
        tensors = {k: v for f in base.glob("*.safetensors") for k, v in load_file(f).items()}
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    for name in STRAYS:
        shutil.copy(shard, base / name)
    model: Any = PeftModel.from_pretrained(
        loaded(base), str(save_adapter(base, tmp_path / "adapter"))
    )
    merge(base, tmp_path / "adapter", tmp_path / "merged", console=QUIET)
    merged = tmp_path / "merged"
    assert not {path.name for path in merged.iterdir()} & {*STRAYS}
    assert (merged / "model.safetensors").exists() != has_shards
    assert (merged / "model.safetensors.index.json").exists() == has_shards
    assert torch.allclose(logits(loaded(merged)), logits(model), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.float8_e4m3fn),
        ("model.layers.0.mlp.up_proj.weight", torch.float8_e5m2),
        ("model.layers.0.mlp.up_proj.weight", torch.int8),
        ("model.layers.0.mlp.up_proj.weight", torch.uint8),
        ("model.layers.0.mlp.up_proj.qweight", torch.int32),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.float32),
        ("model.layers.0.mlp.up_proj.SCB", torch.float32),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", torch.uint8),
        ("quantization_config", None),
    ],
)
def test_quantised_base_is_refused_by_name(
    tmp_path: Path, name: str, dtype: torch.dtype | None
) -> None:
    base = save_model(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    if dtype is None:
        config = json.loads((base / "config.json").read_text())
        config[name] = {"quant_method": "fp8"}
        (base / "config.json").write_text(json.dumps(config))
    else:
        tensors = {k: v for f in base.glob("*.safetensors") for k, v in load_file(f).items()}
        tensors[name] = torch.ones(4, 4).to(dtype)
        save_file(tensors, base / "model.safetensors")
    with pytest.raises(CallerError, match=rf"quantised: .*{name}") as caught:
        merge(base, adapter, tmp_path / "merged", console=QUIET)
    assert caught.value.info.code is Code.FAILED_PRECONDITION
    assert caught.value.info.field == "base"
    assert not (tmp_path / "merged").exists()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("files", ["shards", "one", "head alone", "both", "untied"])
def test_adapter_on_a_tied_head_gives_the_model_a_head_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    """peft adds what the head's adapter says to the embedding, too."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = save_model(tmp_path / "base", torch.float32, tie_word_embeddings=files != "untied")
    if files not in ("shards", "untied"):
        tensors = {k: v for f in base.glob("*.safetensors") for k, v in load_file(f).items()}
        head = tensors["model.embed_tokens.weight"].clone()
        if files == "head alone":
            del tensors["model.embed_tokens.weight"]
        if files != "one":
            tensors["lm_head.weight"] = head
        for shard in base.glob("model*"):
            shard.unlink()
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    adapter = save_adapter(base, tmp_path / "adapter", [*TARGETS, "lm_head"])
    merge(base, adapter, tmp_path / "merged", console=QUIET)
    assert read_model("merged", tmp_path / "merged").config["tie_word_embeddings"] is False
    before, made = loaded(base), loaded(tmp_path / "merged")
    embeddings = (each.get_input_embeddings().weight for each in (before, made))
    assert torch.equal(*embeddings)
    tokens = torch.arange(12).view(2, 6)
    plain: Any = PeftModel.from_pretrained(before, str(adapter))
    with torch.no_grad():
        expected, said = plain(tokens).logits, made(tokens).logits
    assert torch.allclose(said, expected, rtol=0.0, atol=1e-4)
    if files in ("shards", "untied"):
        index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
        sizes = [t.nbytes for t in made.state_dict().values()]
        assert index["metadata"]["total_size"] == sum(sizes)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    good = json.loads(path.read_text())

    def refused(field: str, message: str, on: Path = base) -> None:
        with pytest.raises(CallerError, match=message) as caught:
            merge(on, adapter, tmp_path / "merged", console=QUIET)
        assert caught.value.info.field == field
        assert caught.value.info.remedy
        assert not (tmp_path / "merged").exists()
        assert not (tmp_path / ".merged.partial").exists()

    refused("base", "does not exist", tmp_path / "none")
    refused("base", r"config\.json is missing", adapter)
    refused("base", "in the base", save_model(tmp_path / "wide", hidden_size=64))
    path.write_text(json.dumps({**good, "rank_pattern": {"q_proj": 8}}))
    refused("adapter", "of rank 8")
    path.write_text(json.dumps({**good, "r": 8}))
    refused("adapter", "of rank 8")
    path.write_text("{")
    refused("adapter", "not a LoRA config")
    path.unlink()
    refused("adapter", "cannot be read")
    path.write_text(json.dumps(good))
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    odd = {name.replace("q_proj", "c_attn"): tensor for name, tensor in tensors.items()}
    save_file(odd, weights)
    refused("adapter", "exclude.*c_attn")
    path.write_text(json.dumps({**good, "target_modules": None}))
    refused("base", "c_attn.*the base does not have")
    save_file({**tensors, "lm_head.weight": torch.zeros(1)}, weights)
    refused("adapter", "expected pairs of matrices")
    (tmp_path / "merged").mkdir()
    with pytest.raises(CallerError, match="exists"):
        merge(base, adapter, tmp_path / "merged", console=QUIET)
