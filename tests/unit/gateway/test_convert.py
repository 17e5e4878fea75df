"""What the Tinker SDK says of sampling and of losses, in the mesh's words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import ForwardBackward, Loss, SamplingParams
from phaseloom.gateway.core import convert, wire
from phaseloom.gateway.core.convert import SampleParams


def asked(loss: str, forward_only: bool = False, **settings: Any) -> Any:
    request = wire.ForwardBackwardRequest(loss_fn=loss, forward_only=forward_only)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        wire.Tensor(dense=np.array([2, 3], "<i8").tobytes(), dtype=2, shape=[2])
    )
    for name, value in settings.items():
        kind = "text" if isinstance(value, str) else "number"
        setattr(request.loss_fn_config_values[name], kind, value)
    return request


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SampleParams(), SamplingParams(13)),
        (SampleParams(max_tokens=5, top_k=-1), SamplingParams(5)),
        (SampleParams(max_tokens=99), SamplingParams(13)),
        # An empty list of stops is told apart from none, as the SDK has it.
        (SampleParams(stop=[]), SamplingParams(13, ignore_eos=True)),
        (SampleParams(stop="a"), SamplingParams(13, stop_strings=["a"])),
        (SampleParams(stop=[3, 4]), SamplingParams(13, stop_token_ids=[3, 4])),
        # What makes no sense is left as it is, and the mesh refuses it: it was taken for a default.
        (
            SampleParams(max_tokens=0, top_p=0.0, top_k=-3),
            SamplingParams(0, top_p=0.0, top_k=-3),
        ),
    ],
)
def test_sampling_parameters(given: SampleParams, expected: SamplingParams) -> None:
    assert convert.sampling(given, 3, 16) == expected


@pytest.mark.parametrize("forward_only", [False, True])
def test_weights_of_another_length_are_refused(forward_only: bool) -> None:
    """A `forward` failed when it summed its loss, as if the gateway were at fault."""
    request = asked("cross_entropy", forward_only)
    weights = wire.Tensor(dense=np.ones(3, "<f4").tobytes(), dtype=1, shape=[3])
    request.data[0].loss_fn_inputs["weights"].CopyFrom(weights)
    with pytest.raises(CallerError) as refused:
        convert.trained(request, 16)
    assert refused.value.info.field == "data[0].loss_fn_inputs.weights"


def test_losses_have_their_own_settings_and_no_others() -> None:
    bounds: dict[str, Any] = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    operation = convert.trained(asked("ppo", **bounds), 16)
    assert isinstance(operation, ForwardBackward)
    assert (operation.loss, operation.clip_low, operation.clip_high) == (Loss.PPO, 0.9, 1.1)
    wrongs: list[tuple[Any, str, str]] = [
        (asked("ppo", beta=0.1), "loss_fn_config", "ppo has no setting 'beta'"),
        (asked("cross_entropy", **bounds), "loss_fn_config", "cross_entropy has no setting"),
        (asked("dro", beta="much"), "loss_fn_config", "beta must be a number, got 'much'"),
        (asked("kto"), "loss_fn", "unknown loss 'kto'"),
        (asked("kto", forward_only=True), "loss_fn", "unknown loss 'kto'"),
    ]
    for request, field, why in wrongs:
        with pytest.raises(CallerError, match=why) as refused:
            convert.trained(request, 16)
        assert refused.value.info.field == field
        assert refused.value.info.remedy
