"""What controllers put into messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phaseloom.common.contract.api import JobReport
from phaseloom.common.contract.codec import JSON, MSGPACK, decode, encode
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import AdamParams, Operation, OptimStep
from phaseloom.common.contract.specs import ModelSpec


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("rate", [np.float64(0.5), np.float32(0.5), torch.tensor(0.5)])
def test_numbers_of_other_libraries_are_numbers(content_type: str, rate: Any) -> None:
    """A learning rate of a schedule, a mean of rewards, a step of `np.arange`."""
    step: Any = np.int64(3)
    sent = Operation("a", step, OptimStep(AdamParams(rate)))
    received = decode(encode(sent, content_type), Operation, content_type)
    assert received == Operation("a", 3, OptimStep(AdamParams(0.5)))
    report = JobReport("sums", step, {"reward": rate})
    assert decode(encode(report, content_type), JobReport, content_type).step == 3


def test_what_is_no_part_of_a_message_is_refused_by_its_type() -> None:
    with pytest.raises(CallerError, match="object"):
        encode(ModelSpec({"dtype": object()}))
    with pytest.raises(CallerError, match="ndarray"):
        encode(ModelSpec({"sizes": np.zeros(2)}))
