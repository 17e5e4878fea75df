"""The tokens that end a sample are those of transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.worker.backends.inference import end_tokens
from phaseloom.worker.backends.model import model_config
from tests.support.pretrained import pinned, save_model

ABSENT = "absent"
LISTS = [ABSENT, None, 3, [3], [3, 5], []]


@pytest.mark.parametrize("in_config", [ABSENT, None, 2, [2, 4]])
@pytest.mark.parametrize("in_generation", [None, *LISTS])
def test_end_tokens_are_those_of_transformers(
    tmp_path: Path, in_config: Any, in_generation: Any
) -> None:
    save_model(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("eos_token_id", None)
    if in_config != ABSENT:
        values["eos_token_id"] = in_config
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if in_generation is not None:
        eos = {} if in_generation == ABSENT else {"eos_token_id": in_generation}
        (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, **eos}))
    factory: Any = AutoModelForCausalLM
    expected = factory.from_pretrained(tmp_path).generation_config.eos_token_id
    ids = [expected] if isinstance(expected, int) else expected or []
    spec = pinned(tmp_path)
    assert end_tokens(spec, model_config(spec)) == ids


def test_damaged_file_is_reported(tmp_path: Path) -> None:
    save_model(tmp_path)
    spec = pinned(tmp_path)
    for content in ("{", "[]", '{"eos_token_id": "x"}'):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ResourceError) as raised:
            end_tokens(spec, model_config(spec))
        assert raised.value.info.code is Code.DATA_LOSS
