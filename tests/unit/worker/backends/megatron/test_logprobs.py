"""`forward_backward` with its targets' log-probabilities, over tensor and pipeline ranks."""

from __future__ import annotations

from pathlib import Path

from phaseloom.common.contract.operations import Datum, Forward, ForwardBackward, Loss
from phaseloom.common.contract.specs import Layout
from tests.support.megatron import spec, tiny
from tests.unit.worker.backends.megatron.test_backend import STEP, ranks_of
from tests.unit.worker.backends.models import batch


def test_logprobs_are_those_of_forward_and_the_weights_the_same_bits(tmp_path: Path) -> None:
    data = batch(loss=Loss.PPO)
    deployment = spec(Layout(tp=2, pp=2), tiny(num_hidden_layers=4))
    digests = []
    for asked in (True, False):
        directory = tmp_path / str(asked)
        directory.mkdir()
        with ranks_of(deployment, directory) as ranks:
            scored = ranks.forward(Forward([Datum(each.tokens, each.targets) for each in data]))
            answer = ranks.forward_backward(ForwardBackward(data, Loss.PPO, logprobs=asked))
            assert answer.logprobs == (scored.logprobs if asked else [])
            ranks.optim_step(STEP)
            digests.append(ranks.weights_sha256())
    assert digests[0] == digests[1]
