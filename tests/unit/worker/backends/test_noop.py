"""The no-op backend's answers are well formed, whatever it is asked."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.kinds import MUTATING_KINDS, READING_KINDS
from phaseloom.common.contract.operations import (
    AdamParams,
    Forward,
    ForwardBackward,
    Generate,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import ModelSpec
from phaseloom.worker.rank.tails import remainder_of
from tests.support.looker import Looker
from tests.support.saved import load, save
from tests.unit.worker.backends.models import batch, generate, running, spec, watched


def test_noop_answers_every_kind_in_the_right_shape(tmp_path: Path) -> None:
    with running(spec("noop")) as (backend, heap):
        assert backend.kinds == MUTATING_KINDS | READING_KINDS
        (result,) = generate(backend, Generate([Prompt([1]), Prompt([2])], SamplingParams(5), 3))
        assert [len(samples) for samples in result.sequences] == [3, 3]
        sample = result.sequences[0][0]
        assert len(int32s(sample.tokens)) == len(float32s(sample.logprobs)) == 1
        asked = Generate([Prompt([1, 2])], SamplingParams(5), 1, prompt_logprobs=True)
        (result,) = generate(backend, replace(asked, prompt_top_logprobs=3))
        assert [len(float32s(lp)) for lp in result.prompt_logprobs] == [2]
        assert [len(int32s(top)) for top in result.prompt_top_tokens] == [6]
        assert [len(float32s(top)) for top in result.prompt_top_logprobs] == [6]
        data = batch()
        scored = backend.forward(Forward(data)).logprobs
        assert [len(float32s(lp)) for lp in scored] == [len(datum.tokens) for datum in data]
        args = ForwardBackward(data, Loss.PPO)
        backend.check_forward(Forward(data))
        backend.check_forward_backward(args)
        assert set(backend.forward_backward(args).metrics) == {"loss:sum", "num_tokens:sum"}
        assert set(backend.optim_step(OptimStep(AdamParams(1.0))).metrics) == {"grad_norm:mean"}
        backend.zero_gradients()
        heap.buffer[:4] = b"seal"
        digest = backend.weights_sha256()
        save(backend, heap, tmp_path)
        heap.release()
        assert backend.weights_sha256() != digest
        load(backend, heap, tmp_path)
        assert backend.weights_sha256() == digest


def test_noop_rows_end_one_after_another_and_go_on_where_they_were_stopped() -> None:
    decode = {"step_s": 1e-4, "row_s": 1e-6, "prompt_token_s": 1e-6, "mean_tokens": 20}
    config = {"decode": decode}
    args = Generate([Prompt([1], seed) for seed in range(4)], SamplingParams(50), 8)
    with running(replace(spec("noop"), model=ModelSpec(config))) as (backend, _):
        (whole,) = generate(backend, args)
        looker = Looker(stop_once_open=10)
        (had,) = watched(backend, [args], looker)
        assert had is not None
        rest = remainder_of(args, had)
        assert rest is not None
        (more,) = generate(backend, rest.args)
        assert looker.open[0] == sorted(looker.open[0], reverse=True)
        (cancelled,) = watched(backend, [args], Looker(cancel_at={0: 0}))
    lengths = [len(int32s(s.tokens)) for group in whole.sequences for s in group]
    assert len(set(lengths)) > 10
    assert max(lengths) <= 50
    completed = rest.complete_with(more).sequences
    assert [len(int32s(s.tokens)) for group in completed for s in group] == lengths
    assert completed == whole.sequences
    assert cancelled is None
