"""Results of split operations, put together."""

from __future__ import annotations

import pytest

from phaseloom.client.job import merge_results
from phaseloom.common.contract.arrays import pack_float32s, pack_int32s
from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.operations import (
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    OptimStepResult,
    Sequence,
)


def test_metrics_are_reduced_as_their_names_say() -> None:
    parts = [
        ForwardBackwardResult(
            {"loss:sum": 1.0, "ratio:max": 2.0, "ratio:min": 0.5, "kl:mean": 1.0}
        ),
        ForwardBackwardResult(
            {"loss:sum": 2.5, "ratio:max": 1.0, "ratio:min": 0.1, "kl:mean": 3.0}
        ),
    ]
    assert merge_results([*parts], ForwardBackwardResult).metrics == {
        "loss:sum": 3.5,
        "ratio:max": 2.0,
        "ratio:min": 0.1,
        "kl:mean": 2.0,
    }


def test_arrays_come_out_as_lists_in_order() -> None:
    packed = Sequence(pack_int32s([1, 2]), pack_float32s([-0.5, -0.25]), "stop")
    plain = Sequence([3], [-1.0], "length")
    made = merge_results([GenerateResult([[packed]]), GenerateResult([[plain]])], GenerateResult)
    assert made.sequences == [[Sequence([1, 2], [-0.5, -0.25], "stop")], [plain]]
    parts = [ForwardResult([pack_float32s([-2.0])]), ForwardResult([[-3.0], []])]
    scored = merge_results([*parts], ForwardResult)
    assert scored.logprobs == [[-2.0], [-3.0], []]


def test_result_of_another_kind_is_our_error() -> None:
    result = OptimStepResult({})
    assert merge_results([result], OptimStepResult) is result
    with pytest.raises(InternalError):
        merge_results([result], ForwardResult)
    with pytest.raises(InternalError):
        merge_results([result], GenerateResult)
