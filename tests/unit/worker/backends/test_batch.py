"""Validation of data: the error names the field, and wire forms are equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from phaseloom.common.arrays import pack_float32s, pack_int32s
from phaseloom.common.errors import CallerError, Code
from phaseloom.common.messages import Datum, Forward, ForwardBackward, Loss
from phaseloom.worker.backends.batch import forward_batch, loss_batch

GOOD = Datum([1, 2, 3], [2, 3, 4], [1.0] * 3, [-1.0] * 3, [0.5] * 3)


def _bad(**changes: object) -> Callable[[Loss], ForwardBackward]:
    fields = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__}
    datum = Datum(**{**fields, **changes})
    return lambda loss: ForwardBackward([GOOD, datum], loss)


CASES = {
    "short targets": (_bad(targets=[2, 3]), Loss.PPO, "args.batch[1].targets"),
    "no tokens": (_bad(tokens=[]), Loss.PPO, "args.batch[1].tokens"),
    "token too large": (_bad(tokens=[1, 9, 3]), Loss.PPO, "args.batch[1].tokens"),
    "token negative": (_bad(tokens=[1, -1, 3]), Loss.PPO, "args.batch[1].tokens"),
    "no int32": (_bad(tokens=[1, 2**40, 3]), Loss.PPO, "args.batch[1].tokens"),
    "no int64": (_bad(targets=[1, 2**70, 3]), Loss.PPO, "args.batch[1].targets"),
    "target too large": (_bad(targets=[2, 3, 9]), Loss.PPO, "args.batch[1].targets"),
    "odd bytes": (_bad(tokens=b"12345"), Loss.PPO, "args.batch[1].tokens"),
    "no weights": (_bad(weights=None), Loss.CROSS_ENTROPY, "args.batch[1].weights"),
    "short weights": (_bad(weights=[1.0]), Loss.CROSS_ENTROPY, "args.batch[1].weights"),
    "no logprobs": (_bad(logprobs=None), Loss.IMPORTANCE_SAMPLING, "args.batch[1].logprobs"),
    "no advantages": (_bad(advantages=None), Loss.PPO, "args.batch[1].advantages"),
    "short advantages": (_bad(advantages=[1.0] * 2), Loss.PPO, "args.batch[1].advantages"),
    "nan": (_bad(advantages=[1.0, float("nan"), 1.0]), Loss.PPO, "args.batch[1].advantages"),
    "too large": (_bad(logprobs=[1e39] * 3), Loss.PPO, "args.batch[1].logprobs"),
    "odd float bytes": (_bad(logprobs=b"123"), Loss.PPO, "args.batch[1].logprobs"),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_batch_names_the_field_at_fault(case: str) -> None:
    make, loss, field = CASES[case]
    with pytest.raises(CallerError) as raised:
        loss_batch(make(loss), vocab_size=9)
    assert raised.value.info.code is Code.INVALID_ARGUMENT
    assert raised.value.info.field == field


def test_batch_refuses_an_empty_batch() -> None:
    with pytest.raises(CallerError) as trained:
        loss_batch(ForwardBackward([], Loss.PPO), 9)
    with pytest.raises(CallerError) as scored:
        forward_batch(Forward([]), 9)
    assert trained.value.info.field == scored.value.info.field == "args.batch"


def test_loss_batch_refuses_a_clip_range_upside_down() -> None:
    with pytest.raises(CallerError) as raised:
        loss_batch(ForwardBackward([GOOD], Loss.PPO, clip_low=1.2, clip_high=0.8), 9)
    assert raised.value.info.field == "args.clip_low"


def test_loss_batch_takes_lists_and_bytes_alike() -> None:
    packed = Datum(
        pack_int32s([1, 2, 3]),
        pack_int32s([2, 3, 4]),
        pack_float32s([1.0] * 3),
        pack_float32s([-1.0] * 3),
        pack_float32s([0.5] * 3),
    )
    for loss in Loss:
        a = loss_batch(ForwardBackward([GOOD], loss), 9)
        b = loss_batch(ForwardBackward([packed], loss), 9)
        mixed = loss_batch(ForwardBackward([packed, GOOD], loss), 9)
        for name in ("starts", "tokens_N", "targets_N", "q_N", "coefficient_N"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
            assert np.array_equal(getattr(mixed, name)[: len(getattr(a, name))], getattr(a, name))
