"""A checkpoint of a registered model has the model's own tokenizer, with all its templates."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import AutoTokenizer

from phaseloom.common.contract.errors import CallerError, ResourceError
from phaseloom.common.contract.specs import ModelFile, ModelSpec
from phaseloom.common.contract.state_layout import Role, TensorSlot
from phaseloom.common.tensors.modelfiles import check_companions, read_model
from phaseloom.statemgr.checkpoints.shards import write_state
from phaseloom.statemgr.disk.disk import Disk
from phaseloom.worker.rank.stateops import _companions
from tests.support.pretrained import pinned, save_model

MESSAGES = [{"role": "user", "content": "w5 w9"}, {"role": "assistant", "content": "w1"}]
SPOKEN = "{% for m in messages %}w3 {{ m.content }}\n{% endfor %}"
GENERATED = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
SLOT = TensorSlot("x", Role.WEIGHT, "float32", [2], 0, 8)

FILES: dict[str, dict[str, str]] = {
    "jinja": {"chat_template.jinja": SPOKEN},
    "directory": {
        "chat_template.jinja": SPOKEN,
        "additional_chat_templates/tool_use.jinja": GENERATED,
        "additional_chat_templates/rag.jinja": "rag",
    },
    "list": {
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": [
                    {"name": "default", "template": SPOKEN},
                    {"name": "tool_use", "template": GENERATED},
                ],
            }
        )
    },
    "tokens": {
        "special_tokens_map.json": json.dumps(
            {"bos_token": {"content": "w2", "lstrip": True}, "eos_token": "w3"}
        ),
        "added_tokens.json": '{"<new>": 29}',
    },
}


def put(directory: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)
    return directory


def export(model: ModelSpec, directory: Path) -> None:
    directory.mkdir()
    write_state(
        Disk(directory),
        directory,
        [([SLOT], memoryview(bytearray(8)))],
        json.dumps({"model_type": "qwen3"}),
        file_bytes=2**20,
        cancelled=threading.Event(),
        companions=_companions(model),
    )


@pytest.mark.parametrize("case", FILES)
def test_exported_tokenizer_is_the_same(case: str, tmp_path: Path) -> None:
    source = put(save_model(tmp_path / "model"), FILES[case])
    export(pinned(source), tmp_path / "export")
    factory: Any = AutoTokenizer
    theirs, ours = (factory.from_pretrained(path) for path in (source, tmp_path / "export"))
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    templates = theirs.chat_template or {}
    for name in templates if isinstance(templates, dict) else [None]:
        if templates:
            said = [
                each.apply_chat_template(MESSAGES, chat_template=name) for each in (theirs, ours)
            ]
            assert said[0] == said[1]
    for text in ("w5 w9", "<new> w2w1", " w3  w4"):
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_changed_or_new_template_is_a_loss(tmp_path: Path) -> None:
    source = put(save_model(tmp_path / "model"), FILES["directory"])
    model = read_model("tiny", source)
    check_companions(model)
    put(source, {"additional_chat_templates/more.jinja": "x"})
    with pytest.raises(ResourceError, match=r"additional_chat_templates/more\.jinja"):
        check_companions(model)


@pytest.mark.parametrize(
    "name",
    ["../tokenizer.json", "additional_chat_templates/../../x.jinja", "a/b.jinja", "/etc/vocab.txt"],
)
def test_names_outside_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    model = pinned(save_model(tmp_path / "model"))
    assert model.pinned is not None
    companions = replace(model.pinned, files=[ModelFile(name, 1, "")])
    (tmp_path / "export").mkdir()
    with pytest.raises(CallerError, match="small file"):
        write_state(
            Disk(tmp_path),
            tmp_path / "export",
            [([SLOT], memoryview(bytearray(8)))],
            "{}",
            file_bytes=2**20,
            cancelled=threading.Event(),
            companions=companions,
        )
