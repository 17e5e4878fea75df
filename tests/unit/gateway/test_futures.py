"""What the SDK prints of a call that waits."""

from __future__ import annotations

from phaseloom.common.contract.api import Explanation
from phaseloom.common.contract.ids import OperationKey
from phaseloom.gateway.futures import reason

KEY = OperationKey("demo", "tinker-1-0", "policy", "7")


def test_reason_has_all_that_the_scheduler_says_and_the_predicted_start() -> None:
    told = Explanation(
        KEY, "forward_backward", "queued", ["train-0: other.policy runs"], 2, 3.21, "hrrs: 1.4"
    )
    assert reason(told) == (
        "queued; waits for train-0: other.policy runs; place 2 on its device; "
        "starts in about 3.2 s; hrrs: 1.4"
    )


def test_reason_says_nothing_of_what_is_not_known() -> None:
    assert reason(Explanation(KEY, "forward", "permitted")) == "permitted"
    assert reason(Explanation(KEY, "forward", "queued", predicted_start_s=0.0)) == (
        "queued; starts in about 0.0 s"
    )
