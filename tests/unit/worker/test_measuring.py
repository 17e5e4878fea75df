"""The process that `phaseloom measure-slowdown` times: the models that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.worker.measuring import MODEL, of_file, work_of


@pytest.mark.parametrize(
    ("changed", "field", "said"),
    [
        ({"model_type": None}, "config.model_type", "None"),
        ({"hidden_size": "many"}, "config.hidden_size", "many"),
        ({"vocab_size": 1}, "config.vocab_size", "1"),
        ({"max_position_embeddings": 8}, "config.max_position_embeddings", "8"),
        ({"hidden_size": -1}, "config", "negative"),
        ({"dtype": "float16"}, "config.dtype", "float16"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_by_its_field(
    changed: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(CallerError) as caught:
        work_of(ModelSpec({**MODEL, **changed}, init_seed=1), 1)
    refused = of_file(caught.value.info)
    assert refused.field == field
    assert said in refused.message
    assert refused.remedy
