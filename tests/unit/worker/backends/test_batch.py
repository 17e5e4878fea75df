"""Validation of data: the error names the field, and wire forms are equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from phaseloom.common.contract.arrays import int32s, pack_float32s, pack_int32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import Datum, Forward, ForwardBackward, Loss
from phaseloom.worker.backends.batch import check_samples, forward_batch, loss_batch
from phaseloom.worker.backends.packing import passes

WEIGHTED = Datum([1, 2, 3], [2, 3, 4], weights=[1.0] * 3)
GOOD = Datum([1, 2, 3], [2, 3, 4], logprobs=[-1.0] * 3, advantages=[0.5] * 3)


def _good(loss: Loss) -> Datum:
    return WEIGHTED if loss is Loss.CROSS_ENTROPY else GOOD


def _bad(**changes: object) -> Callable[[Loss], ForwardBackward]:
    def make(loss: Loss) -> ForwardBackward:
        return ForwardBackward([_good(loss), replace(_good(loss), **changes)], loss)

    return make


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
    "unused weights": (_bad(weights=[1.0] * 3), Loss.CISPO, "args.batch[1].weights"),
    "unused advantages": (
        _bad(advantages=[1.0] * 3),
        Loss.CROSS_ENTROPY,
        "args.batch[1].advantages",
    ),
    "no targets": (_bad(num_targets=0), Loss.CROSS_ENTROPY, "args.batch[1].num_targets"),
    "missing targets": (_bad(num_targets=2), Loss.CROSS_ENTROPY, "args.batch[1].targets"),
    "several targets": (_bad(num_targets=2), Loss.PPO, "args.batch[1].num_targets"),
    "one weight for two targets": (
        _bad(num_targets=2, targets=[2, 3, 4] * 2),
        Loss.CROSS_ENTROPY,
        "args.batch[1].weights",
    ),
    "odd float bytes": (_bad(logprobs=b"123"), Loss.PPO, "args.batch[1].logprobs"),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_batch_names_the_field_at_fault(case: str) -> None:
    make, loss, field = CASES[case]
    with pytest.raises(CallerError) as raised:
        loss_batch(make(loss), vocab_size=9)
    assert raised.value.info.code is Code.INVALID_ARGUMENT
    assert raised.value.info.field == field


def test_only_an_operation_must_have_data_and_a_share_of_one_may_have_none() -> None:
    with pytest.raises(CallerError) as raised:
        check_samples([], 9)
    assert raised.value.info.field == "args.batch"
    for batch in (loss_batch(ForwardBackward([], Loss.PPO), 9), forward_batch(Forward([]), 9)):
        assert batch.tokens_N.size == batch.lengths_S.size == 0
        assert [*passes(batch, only_used=False)] == []


def test_loss_batch_refuses_a_clip_range_upside_down() -> None:
    with pytest.raises(CallerError) as raised:
        loss_batch(ForwardBackward([GOOD], Loss.PPO, clip_low=1.2, clip_high=0.8), 9)
    assert raised.value.info.field == "args.clip_low"


@pytest.mark.parametrize("loss", list(Loss))
def test_loss_batch_takes_lists_and_bytes_alike(loss: Loss) -> None:
    good = _good(loss)
    packed = replace(
        good, tokens=pack_int32s(int32s(good.tokens)), targets=pack_int32s(int32s(good.targets))
    )
    for name in ("weights", "logprobs", "advantages"):
        values = getattr(good, name)
        packed = replace(packed, **{name: values and pack_float32s(values)})
    a = loss_batch(ForwardBackward([good], loss), 9)
    b = loss_batch(ForwardBackward([packed], loss), 9)
    mixed = loss_batch(ForwardBackward([packed, good], loss), 9)
    for name in ("starts", "tokens_N", "targets_N", "q_N", "coefficient_N"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
        assert np.array_equal(getattr(mixed, name)[: len(getattr(a, name))], getattr(a, name))


def test_dro_counts_where_there_is_no_advantage_but_not_on_prompts() -> None:
    datum = Datum([1, 2, 3], [2, 3, 4], logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 0.0, 1.0])
    counts = {
        loss: loss_batch(ForwardBackward([datum], loss), 9).is_used_N.tolist()
        for loss in (Loss.DRO, Loss.PPO)
    }
    assert counts == {Loss.DRO: [False, True, True], Loss.PPO: [False, False, True]}
