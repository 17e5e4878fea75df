"""The training backend against plain PyTorch, and against losing its memory between two calls."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from phaseloom.common.contract.arrays import float32s, int32s
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.kinds import merge_metrics
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    Generate,
    Loss,
    OptimStep,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.backends.batch import without_loss
from phaseloom.worker.backends.model import build_model
from phaseloom.worker.state.heap import Heap
from tests.support.saved import load, save
from tests.support.tinymodel import VOCAB
from tests.unit.worker.backends.models import batch, generate, running, spec

STEP = OptimStep(AdamParams(1e-3, weight_decay=0.1, grad_clip_norm=1.0))


@pytest.fixture
def policy() -> Iterator[tuple[Backend, Heap]]:
    with running(spec("fsdp")) as built:
        yield built


def tensors(backend: Backend, heap: Heap, role: Role) -> dict[str, torch.Tensor]:
    return {
        slot.name: torch.frombuffer(
            heap.buffer[slot.offset : slot.offset + slot.num_bytes], dtype=torch.float32
        )
        .clone()
        .view(slot.shape)
        for slot in backend.slots
        if slot.role is role
    }


def plain_logprobs(model: PreTrainedModel, datum: Datum) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([int32s(datum.tokens)])).logits[0]
    targets = torch.tensor(int32s(datum.targets))
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def plain_metrics(model: PreTrainedModel, args: ForwardBackward) -> dict[str, float]:
    """The metrics of a loss with the sampler's log-probabilities, entropy and staleness included,
    position by position."""
    used: list[tuple[float, float, float, float]] = []
    for datum in args.batch:
        logits = model(input_ids=torch.tensor([int32s(datum.tokens)])).logits[0].detach().double()
        lp_TV = torch.log_softmax(logits, -1)
        lp_T = lp_TV.gather(-1, torch.tensor(int32s(datum.targets))[:, None])[:, 0]
        gaps = (lp_T - torch.tensor(float32s(datum.logprobs or []))).tolist()
        advantages = float32s(datum.advantages or [])
        entropies = -(lp_TV.exp() * lp_TV).sum(-1)
        stale = [float(datum.staleness or 0)] * len(gaps)
        rows = zip(gaps, advantages, entropies.tolist(), stale, strict=True)
        used += [row for row in rows if row[1] != 0]
    gaps, ratios = [row[0] for row in used], [math.exp(row[0]) for row in used]
    bounded = [min(max(ratio, args.clip_low), args.clip_high) for ratio in ratios]
    cut = [b != r for b, r in zip(bounded, ratios, strict=True)]
    if args.loss is Loss.PPO:
        lowers = [b * row[1] < r * row[1] for b, r, row in zip(bounded, ratios, used, strict=True)]
        cut = [one and other for one, other in zip(cut, lowers, strict=True)]
    return {
        "gap_abs:sum": sum(map(abs, gaps)),
        "gap:max": max(map(abs, gaps)),
        "kl_k1:sum": -sum(gaps),
        "kl_k3:sum": sum(ratio - 1 - gap for ratio, gap in zip(ratios, gaps, strict=True)),
        "clipped:sum": sum(cut) if args.loss in (Loss.PPO, Loss.CISPO) else 0,
        "ratio:max": max(ratios),
        "entropy:sum": sum(row[2] for row in used),
        "num_tokens:sum": len(used),
        "staleness:sum": sum(row[3] for row in used),
        "staleness:max": max(row[3] for row in used),
    }


def off_policy(loss: Loss, seed: int = 0) -> ForwardBackward:
    """A batch whose metrics all differ from 0, with the entropy and a staleness for each sample."""
    data = [replace(datum, staleness=i % 4) for i, datum in enumerate(batch(seed, loss=loss))]
    return ForwardBackward(data, loss, entropy=True)


@pytest.mark.parametrize("loss", [loss for loss in Loss if loss is not Loss.CROSS_ENTROPY])
def test_metrics_equal_those_of_plain_pytorch_whole_and_in_parts(
    policy: tuple[Backend, Heap], loss: Loss
) -> None:
    backend, _ = policy
    args = off_policy(loss)
    expected = plain_metrics(build_model(spec().model), args)
    whole = backend.forward_backward(args).metrics
    parts = [
        backend.forward_backward(replace(args, batch=part)).metrics
        for part in (args.batch[:5], args.batch[5:6], args.batch[6:])
    ]
    for actual in (whole, merge_metrics(parts)):
        loss_sum = actual.pop("loss:sum")
        assert loss_sum == pytest.approx(plain_loss(build_model(spec().model), args).item(), 1e-4)
        assert actual == pytest.approx(expected, rel=1e-4)


def test_entropy_is_reported_only_if_requested_and_changes_no_gradient(
    policy: tuple[Backend, Heap],
) -> None:
    backend, heap = policy
    digests = []
    for entropy in (False, True):
        args = ForwardBackward(batch(loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY, entropy=entropy)
        metrics = backend.forward_backward(args).metrics
        assert ("entropy:sum" in metrics) == entropy
        digests.append(bytes(heap.buffer))
        backend.zero_gradients()
    assert digests[0] == digests[1]


def plain_loss(model: PreTrainedModel, args: ForwardBackward) -> torch.Tensor:
    total = torch.zeros(())
    for datum in args.batch:
        lp = plain_logprobs(model, datum)
        if args.loss is Loss.CROSS_ENTROPY:
            assert datum.weights is not None
            total = total - (torch.tensor(float32s(datum.weights)) * lp).sum()
            continue
        assert datum.logprobs is not None
        assert datum.advantages is not None
        q, advantages = (
            torch.tensor(float32s(datum.logprobs)),
            torch.tensor(float32s(datum.advantages)),
        )
        ratio = torch.exp(lp - q)
        if args.loss is Loss.DRO:
            counts = (q != 0) | (advantages != 0)
            objective = advantages * lp - args.beta / 2 * (lp - q) ** 2
            total = total - objective[counts].sum()
            continue
        clipped = ratio.detach().clamp(args.clip_low, args.clip_high)
        objective = clipped * advantages * lp if args.loss is Loss.CISPO else ratio * advantages
        if args.loss is Loss.PPO:
            clipped = ratio.clamp(args.clip_low, args.clip_high) * advantages
            objective = torch.minimum(objective, clipped)
        total = total - objective.sum()
    return total


@pytest.mark.parametrize("loss", list(Loss))
def test_training_equals_plain_pytorch(policy: tuple[Backend, Heap], loss: Loss) -> None:
    """Three steps of two accumulated batches: losses, norms and weights."""
    backend, heap = policy
    model = build_model(spec().model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(3):
        for part in range(2):
            args = ForwardBackward(batch(2 * step + part, loss=loss), loss)
            expected = plain_loss(model, args)
            torch.autograd.backward(expected)
            metrics = backend.forward_backward(args).metrics
            assert metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
            weights = [float32s(d.weights or d.advantages or []) for d in args.batch]
            answers = sum(weight != 0 for each in weights for weight in each)
            assert metrics["num_tokens:sum"] == answers
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reported = backend.optim_step(STEP).metrics["grad_norm:mean"]
        assert reported == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    trained = tensors(backend, heap, Role.WEIGHT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.data, rtol=1e-3, atol=2e-5)


def distillation() -> list[Datum]:
    """Samples with one, two and three weighted targets a position; one has positions and targets
    that do not count."""
    random = np.random.default_rng(5)
    data = []
    for num_targets, num_tokens in ((3, 7), (1, 4), (2, 9)):
        tokens = random.integers(0, VOCAB, num_tokens).tolist()
        targets = random.integers(0, VOCAB, num_tokens * num_targets).tolist()
        weights = random.random(num_tokens * num_targets).astype(np.float32)
        weights[: 2 * num_targets] = 0.0
        weights[-1] = 0.0
        data.append(Datum(tokens, targets, weights.tolist(), num_targets=num_targets))
    return data


def plain_several(model: PreTrainedModel, datum: Datum) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([int32s(datum.tokens)])).logits[0]
    targets = torch.tensor(int32s(datum.targets)).view(-1, datum.num_targets)
    return torch.log_softmax(logits, -1).gather(-1, targets)


def test_several_targets_a_position_are_trained_and_scored_as_plain_pytorch_does(
    policy: tuple[Backend, Heap],
) -> None:
    backend, heap = policy
    model = build_model(spec().model)
    data = distillation()
    answer = backend.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY, logprobs=True))
    total = torch.zeros(())
    num_used = 0
    for datum in data:
        weights = torch.tensor(float32s(datum.weights or [])).view(-1, datum.num_targets)
        total = total - (weights * plain_several(model, datum)).sum()
        num_used += int((weights != 0).any(-1).sum())
    torch.autograd.backward(total)
    assert answer.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    assert answer.metrics["num_tokens:sum"] == num_used
    gradients = tensors(backend, heap, Role.GRADIENT)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            gradients[f"{name}.grad"], parameter.grad, rtol=1e-3, atol=1e-5, msg=name
        )
    scored = backend.forward(Forward([without_loss(datum) for datum in data]))
    for datum, lp, again in zip(data, scored.logprobs, answer.logprobs, strict=True):
        assert lp == again
        expected = plain_several(model, datum).flatten().detach()
        torch.testing.assert_close(torch.tensor(float32s(lp)), expected, rtol=1e-4, atol=1e-5)


def test_equal_targets_have_the_gradients_of_one_with_all_their_weight(
    policy: tuple[Backend, Heap],
) -> None:
    backend, heap = policy
    one = Datum([1, 2, 3], [4, 5, 6], [1.0, 0.5, 0.25])
    split = Datum([1, 2, 3], [4, 4, 5, 5, 6, 6], [0.75, 0.25, 0.25, 0.25, 0.25, 0.0], num_targets=2)
    found = []
    for datum in (one, split):
        backend.forward_backward(ForwardBackward([datum], Loss.CROSS_ENTROPY))
        found.append(tensors(backend, heap, Role.GRADIENT))
        backend.zero_gradients()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_add_up_in_the_heap_until_the_step_zeroes_them(
    policy: tuple[Backend, Heap],
) -> None:
    backend, heap = policy
    args = ForwardBackward(batch(loss=Loss.CROSS_ENTROPY), Loss.CROSS_ENTROPY)
    backend.forward_backward(args)
    once = tensors(backend, heap, Role.GRADIENT)
    backend.forward_backward(args)
    twice = tensors(backend, heap, Role.GRADIENT)
    for name, gradient in once.items():
        assert gradient.any()
        torch.testing.assert_close(twice[name], 2 * gradient)
    backend.optim_step(STEP)
    assert not any(gradient.any() for gradient in tensors(backend, heap, Role.GRADIENT).values())
    assert tensors(backend, heap, Role.OPTIMIZER)["step"] == 1


def test_weights_of_any_sign_and_size_scale_each_token(policy: tuple[Backend, Heap]) -> None:
    """What losses of one's own are built from: any gradient by log-probability, one pass."""
    backend, heap = policy
    model = build_model(spec().model)
    weights = [[0.5, -2.0, 0.0, 1e3], [-1e-3, 0.0, 7.0]]
    data = [Datum([1, 2, 3, 4], [2, 3, 4, 5], weights[0]), Datum([1, 2, 9], [2, 9, 4], weights[1])]
    args = ForwardBackward(data, Loss.CROSS_ENTROPY)
    expected = plain_loss(model, args)
    torch.autograd.backward(expected)
    metrics = backend.forward_backward(args).metrics
    assert metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["num_tokens:sum"] == 5
    gradients = tensors(backend, heap, Role.GRADIENT)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        actual = gradients[f"{name}.grad"]
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-3, atol=1e-5 * scale)


def test_weights_that_cancel_out_leave_no_gradient(policy: tuple[Backend, Heap]) -> None:
    backend, heap = policy
    for sign in (1.0, -1.0):
        data = [Datum([1, 2, 3], [2, 3, 4], weights=[sign, 0.5 * sign, 0.0])]
        backend.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY))
    assert not any(gradient.any() for gradient in tensors(backend, heap, Role.GRADIENT).values())


def test_zero_gradients_forgets_what_was_accumulated(policy: tuple[Backend, Heap]) -> None:
    backend, heap = policy
    before = bytes(heap.buffer)
    backend.forward_backward(ForwardBackward(batch(), Loss.PPO))
    assert bytes(heap.buffer) != before
    backend.zero_gradients()
    assert bytes(heap.buffer) == before


def test_forward_gives_plain_logprobs_whatever_else_is_in_the_batch(
    policy: tuple[Backend, Heap],
) -> None:
    backend, _ = policy
    model = build_model(spec().model)
    data = batch(groups=5)
    logprobs = backend.forward(Forward(data)).logprobs
    with torch.no_grad():
        for datum, actual in zip(data, logprobs, strict=True):
            torch.testing.assert_close(
                torch.tensor(float32s(actual)), plain_logprobs(model, datum), rtol=1e-4, atol=1e-5
            )


def test_forward_backward_answers_logprobs_and_the_gradients_stay_the_same_bits(
    policy: tuple[Backend, Heap],
) -> None:
    backend, heap = policy
    data = batch(loss=Loss.PPO)
    backend.forward_backward(ForwardBackward(data, Loss.PPO))
    without = tensors(backend, heap, Role.GRADIENT)
    backend.zero_gradients()
    answer = backend.forward_backward(ForwardBackward(data, Loss.PPO, logprobs=True))
    for name, gradient in tensors(backend, heap, Role.GRADIENT).items():
        assert torch.equal(gradient, without[name])
    scored = backend.forward(Forward([Datum(each.tokens, each.targets) for each in data]))
    assert len(answer.logprobs) == len(data)
    assert answer.logprobs == scored.logprobs
    assert backend.forward_backward(ForwardBackward(data, Loss.PPO)).logprobs == []


def test_forward_sees_new_weights_after_each_step(policy: tuple[Backend, Heap]) -> None:
    """FSDP2 keeps unsharded copies around; a stale one would give the old log-probabilities."""
    backend, _ = policy
    data = batch(loss=Loss.CROSS_ENTROPY)
    before = backend.forward(Forward(data))
    backend.forward_backward(ForwardBackward(data, Loss.CROSS_ENTROPY))
    assert backend.forward(Forward(data)) == before
    backend.optim_step(STEP)
    after = backend.forward(Forward(data))
    sums = [sum(sum(float32s(lp)) for lp in result.logprobs) for result in (before, after)]
    assert sums[1] > sums[0]


def _train(backend: Backend, heap: Heap, *, lose_memory: bool) -> tuple[list[float], str]:
    """Six calls; with `lose_memory` the heap is given back and restored between any two."""
    losses = []

    def pause() -> None:
        if lose_memory:
            content = bytes(heap.buffer)
            heap.release()
            assert not any(heap.buffer)
            heap.buffer[:] = content
            backend.weights_changed()

    for step in range(3):
        pause()
        metrics = backend.forward_backward(ForwardBackward(batch(step), Loss.PPO)).metrics
        losses.append(metrics["loss:sum"])
        pause()
        backend.optim_step(STEP)
    return losses, hashlib.sha256(heap.buffer).hexdigest()


def test_training_is_bit_equal_when_memory_is_lost_between_calls() -> None:
    """Offload may come at any time, also between a forward_backward and its step."""
    with running(spec()) as (backend, heap):
        undisturbed = _train(backend, heap, lose_memory=False)
    with running(spec()) as (backend, heap):
        assert _train(backend, heap, lose_memory=True) == undisturbed


def test_heap_is_the_whole_state_when_copied_to_another_backend() -> None:
    """The bytes of one life, put into the heap of the next, continue it bit for bit."""
    with running(spec()) as (first, heap), running(spec()) as (second, other):
        first.forward_backward(ForwardBackward(batch(0), Loss.PPO))
        first.optim_step(STEP)
        first.forward_backward(ForwardBackward(batch(1), Loss.PPO))
        other.buffer[:] = heap.buffer
        second.weights_changed()
        for backend in (first, second):
            backend.optim_step(STEP)
        assert heap.buffer == other.buffer


def test_save_and_load_continue_bit_equally_mid_accumulation(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    backend, heap = policy
    backend.forward_backward(ForwardBackward(batch(0), Loss.PPO))
    backend.optim_step(STEP)
    backend.forward_backward(ForwardBackward(batch(1), Loss.PPO))
    save(backend, heap, tmp_path)
    saved = bytes(heap.buffer)
    backend.optim_step(STEP)
    assert bytes(heap.buffer) != saved
    load(backend, heap, tmp_path)
    assert bytes(heap.buffer) == saved


@pytest.mark.parametrize("file_bytes", [10**9, 8192])
def test_saved_weights_load_in_transformers(
    policy: tuple[Backend, Heap], tmp_path: Path, file_bytes: int
) -> None:
    backend, heap = policy
    backend.forward_backward(ForwardBackward(batch(), Loss.PPO))
    backend.optim_step(STEP)
    save(backend, heap, tmp_path, file_bytes)
    assert (tmp_path / "model.safetensors").exists() == (file_bytes > 8192)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path)
    weights = tensors(backend, heap, Role.WEIGHT)
    assert {name for name, _ in model.named_parameters()} == set(weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, weights[name])


def test_load_of_weights_only_starts_the_optimizer_afresh(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    backend, heap = policy
    with running(spec("sampler")) as (sampler, other):
        save(sampler, other, tmp_path)
        backend.forward_backward(ForwardBackward(batch(), Loss.PPO))
        backend.optim_step(STEP)
        load(backend, heap, tmp_path)
        assert backend.weights_sha256() == sampler.weights_sha256()
    assert not any(t.any() for t in tensors(backend, heap, Role.OPTIMIZER).values())


def test_load_refuses_and_keeps_the_state_when_the_checkpoint_does_not_fit(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    backend, heap = policy
    before = bytes(heap.buffer)
    with pytest.raises(CallerError) as raised:
        load(backend, heap, tmp_path)
    assert raised.value.info.code is Code.NOT_FOUND
    with running(spec("sampler", intermediate_size=40)) as (other, other_heap):
        save(other, other_heap, tmp_path)
    with pytest.raises(CallerError) as raised:
        load(backend, heap, tmp_path)
    assert raised.value.info.code is Code.FAILED_PRECONDITION
    assert "mlp" in str(raised.value)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ResourceError) as torn:
        load(backend, heap, tmp_path)
    assert torn.value.info.code is Code.DATA_LOSS
    assert bytes(heap.buffer) == before


def test_weights_sha256_is_the_documented_digest(
    policy: tuple[Backend, Heap], tmp_path: Path
) -> None:
    backend, heap = policy
    save(backend, heap, tmp_path)
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(tmp_path / "model.safetensors").items()):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\nfloat32\n{shape}\n".encode())
        digest.update(tensor.numpy().astype("<f4").tobytes())
    assert backend.weights_sha256() == digest.hexdigest()


def test_check_forward_backward_names_the_field_and_touches_nothing(
    policy: tuple[Backend, Heap],
) -> None:
    backend, heap = policy
    before = bytes(heap.buffer)
    bad = [*batch(), Datum([1, 2], [2, VOCAB], [1.0, 1.0])]
    with pytest.raises(CallerError) as raised:
        backend.check_forward_backward(ForwardBackward(bad, Loss.CROSS_ENTROPY))
    assert raised.value.info.field == f"args.batch[{len(bad) - 1}].targets"
    backend.check_forward_backward(ForwardBackward(batch(), Loss.PPO))
    assert bytes(heap.buffer) == before


def test_sample_longer_than_the_models_positions_is_refused(policy: tuple[Backend, Heap]) -> None:
    """`generate` refused it; training computed with positions that the model has never seen."""
    backend, _ = policy
    longest = Datum([1] * 64, [2] * 64, weights=[1.0] * 64)
    long = Datum([1] * 65, [2] * 65, weights=[1.0] * 65)
    backend.check_forward(Forward([without_loss(longest)]))
    backend.check_forward_backward(ForwardBackward([longest], Loss.CROSS_ENTROPY))
    lesson = ForwardBackward([longest, long], Loss.CROSS_ENTROPY)
    for check in (
        partial(backend.check_forward, Forward([without_loss(longest), without_loss(long)])),
        partial(backend.check_forward_backward, lesson),
    ):
        with pytest.raises(CallerError, match="65 tokens exceed the 64 positions") as raised:
            check()
        assert raised.value.info.field == "args.batch[1].tokens"


def test_forward_backward_raises_when_the_loss_overflows(policy: tuple[Backend, Heap]) -> None:
    huge = Datum([1, 2], [2, 3], logprobs=[0.0, -1e4], advantages=[0.0, 1.0])
    with pytest.raises(CallerError, match="not finite"):
        policy[0].forward_backward(ForwardBackward([huge], Loss.IMPORTANCE_SAMPLING))


@pytest.mark.parametrize(
    ("adam", "field"),
    [
        (AdamParams(float("nan")), "args.adam.learning_rate"),
        (AdamParams(-1.0), "args.adam.learning_rate"),
        (AdamParams(1e-3, beta2=1.0), "args.adam.beta2"),
        (AdamParams(1e-3, grad_clip_norm=float("inf")), "args.adam.grad_clip_norm"),
        # 0 / 0 where a gradient has always been 0, as those of an adapter's A in its first step.
        (AdamParams(1e-3, eps=0.0), "args.adam.eps"),
    ],
)
def test_optim_step_refuses_and_touches_nothing_when_a_number_is_out_of_range(
    policy: tuple[Backend, Heap], adam: AdamParams, field: str
) -> None:
    backend, heap = policy
    backend.forward_backward(ForwardBackward(batch(), Loss.PPO))
    before = bytes(heap.buffer)
    with pytest.raises(CallerError) as raised:
        backend.optim_step(OptimStep(adam))
    assert raised.value.info.field == field
    assert bytes(heap.buffer) == before


def test_frozen_policy_refuses_to_train_and_keeps_weights_only() -> None:
    with running(spec("fsdp", trainable=False)) as (backend, _):
        assert {slot.role for slot in backend.slots} == {Role.WEIGHT}
        assert "forward_backward" not in backend.kinds
        with pytest.raises(CallerError):
            backend.check_forward_backward(ForwardBackward(batch(), Loss.PPO))
        with pytest.raises(CallerError):
            backend.optim_step(STEP)
        backend.zero_gradients()
        assert backend.forward(Forward(batch())).logprobs


def test_operations_leave_the_global_generator_alone(policy: tuple[Backend, Heap]) -> None:
    before = torch.get_rng_state()
    policy[0].forward_backward(ForwardBackward(batch(), Loss.PPO))
    policy[0].optim_step(STEP)
    policy[0].forward(Forward(batch()))
    with running(spec("sampler")) as (sampler, _):
        generate(sampler, Generate([Prompt([1, 2])], SamplingParams(5), 3))
    assert torch.equal(before, torch.get_rng_state())


def test_policy_does_not_generate(policy: tuple[Backend, Heap]) -> None:
    with pytest.raises(CallerError, match="sampler"):
        generate(policy[0], Generate([Prompt([1])], SamplingParams(1)))
    assert "generate" not in policy[0].kinds


def test_step_changes_nothing_when_the_loss_is_zero_everywhere(
    policy: tuple[Backend, Heap],
) -> None:
    backend, _ = policy
    before = backend.weights_sha256()
    masked = [Datum([1, 2], [2, 3], weights=[0.0, 0.0])]
    result = backend.forward_backward(ForwardBackward(masked, Loss.CROSS_ENTROPY))
    assert result.metrics == {"loss:sum": 0.0, "num_tokens:sum": 0.0}
    assert backend.optim_step(OptimStep(AdamParams(1e-3))).metrics == {"grad_norm:mean": 0.0}
    assert backend.weights_sha256() == before
