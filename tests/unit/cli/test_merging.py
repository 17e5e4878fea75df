"""Merging an adapter into its base: what `peft` makes of them, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file

from phaseloom.cli.merging import merge
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.tensors.modelfiles import read_model
from tests.support.pretrained import TOKENIZER_FILES, loaded, save_model

QUIET = Console(file=io.StringIO())
TARGETS = ["q_proj", "down_proj"]


def save_adapter(base: Path, directory: Path, targets: list[str] = TARGETS) -> Path:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
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
    plain: Any = PeftModel.from_pretrained(loaded(base, dtype), str(adapter))
    expected = plain.merge_and_unload().state_dict()
    before, made = (loaded(tmp_path / name, dtype).state_dict() for name in ("base", "merged"))
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name
        assert torch.equal(made[name], before[name]) != (name.split(".")[-2] in TARGETS)


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
    for changes in ({"use_dora": True}, {"rank_pattern": {"q_proj": 8}}, {"r": 0}):
        path.write_text(json.dumps({**good, **changes}))
        refused("adapter", str(next(iter(changes))))
    path.write_text(json.dumps({**good, "r": 8}))
    refused("adapter", "of rank 8")
    path.write_text("{")
    refused("adapter", "cannot be read")
    path.write_text(json.dumps(good))
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    odd = {name.replace("q_proj", "c_attn"): tensor for name, tensor in tensors.items()}
    save_file(odd, weights)
    refused("base", "c_attn.*the base does not have")
    save_file({**tensors, "lm_head.weight": torch.zeros(1)}, weights)
    refused("adapter", "expected pairs of low-rank")
    (tmp_path / "merged").mkdir()
    with pytest.raises(CallerError, match="exists"):
        merge(base, adapter, tmp_path / "merged", console=QUIET)
