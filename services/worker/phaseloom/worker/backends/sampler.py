"""Sampling backend: generates with a KV cache and gives log-probabilities; weights only.

A token is drawn by inverting the CDF at a uniform that is a function of (prompt seed, sample,
position), see `rng`. An operation is a batch of its own (`Batching.OPERATION`): its tokens depend
on its arguments and the weights, never on what else is in flight.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from phaseloom.common.arrays import length
from phaseloom.common.errors import CallerError
from phaseloom.common.messages import (
    AdamParams,
    DeploymentSpec,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStepResult,
    Prompt,
    SamplingParams,
    Sequence,
)
from phaseloom.worker.backends import checkpoint, scoring
from phaseloom.worker.backends.batch import Ints, check_tokens, joined_ints
from phaseloom.worker.backends.decode import Decoder
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.backends.model import (
    HeapTensors,
    as_arrays,
    build_model,
    parameter_shapes,
    return_freed_memory,
)
from phaseloom.worker.backends.rng import uniforms
from phaseloom.worker.heap import Heap

KINDS = frozenset({"generate", "forward", "save_state", "load_state", "sync_weights"})

WAVE_TOKENS = 65536
"""Most cache columns (rows × capacity) decoded at a time: bounds the KV cache."""

KEEP_ROWS = 0.75
"""Finished rows are dropped from the batch once fewer than this share of its rows are live."""


class SamplerBackend:
    """See `Backend`. Log-probabilities are the model's own (temperature 1), whatever the
    temperature that tokens were drawn at: what the learner's log-probabilities compare with."""

    def __init__(self, spec: DeploymentSpec, heap: Heap) -> None:
        self._layout = _layout(spec)
        self._tensors = HeapTensors(heap)
        self.slots = self._layout.slots
        self.kinds = KINDS
        self._model = build_model(spec.model).requires_grad_(False)
        self.vocab_size = int(self._model.config.vocab_size)
        self._max_positions = int(self._model.config.max_position_embeddings)
        views = self._tensors.views(self._layout.weights)
        for name, parameter in self._model.named_parameters():
            views[name].copy_(parameter.data)
            parameter.data = views[name]
        self._decoder = Decoder(self._model)
        self._scorer = scoring.Scorer(self._model)
        return_freed_memory()

    @staticmethod
    def heap_bytes(spec: DeploymentSpec) -> int:
        return _layout(spec).num_bytes

    def generate(self, args: Generate) -> GenerateResult:
        prompts = self._checked_prompts(args)
        longest = max(tokens_T.size for tokens_T in prompts)
        per_prompt = args.num_samples * (longest + args.sampling.max_tokens)
        wave = max(1, WAVE_TOKENS // per_prompt)
        sequences: list[list[Sequence]] = []
        with torch.inference_mode():
            for start in range(0, len(prompts), wave):
                part = slice(start, start + wave)
                sequences += self._generate_wave(prompts[part], args.prompts[part], args)
        return GenerateResult(sequences)

    def forward(self, args: Forward) -> ForwardResult:
        with torch.inference_mode():
            return scoring.forward(self._scorer, args, self.vocab_size)

    def check_forward_backward(self, args: ForwardBackward) -> None:
        raise _does_not_train("forward_backward")

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        raise _does_not_train("forward_backward")

    def optim_step(self, adam: AdamParams) -> OptimStepResult:
        raise _does_not_train("optim_step")

    def weights_sha256(self) -> str:
        return weights_sha256(as_arrays(self._tensors.views(self._layout.weights)))

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, self._model.config, self._layout, self._tensors)

    def load(self, directory: Path) -> None:
        checkpoint.load(directory, self._layout, self._tensors)

    def weights_changed(self) -> None:
        """Nothing is derived from the weights: every call reads them from the heap."""

    def close(self) -> None:
        """Nothing to end: no process group, no thread."""

    def _checked_prompts(self, args: Generate) -> list[Ints]:
        if not args.prompts:
            raise CallerError(
                "there are no prompts", field="args.prompts", remedy="send at least 1 prompt"
            )
        if args.num_samples < 1:
            raise CallerError("it is below 1", field="args.num_samples", remedy="use 1 or more")
        _check_sampling(args.sampling, self.vocab_size)
        tokens = [prompt.tokens for prompt in args.prompts]
        tokens_N = joined_ints(tokens, _prompt_field)
        check_tokens(tokens_N, self.vocab_size, tokens, _prompt_field)
        lengths = [length(array) for array in tokens]
        self._check_lengths(lengths, args.sampling.max_tokens)
        return np.split(tokens_N, np.cumsum(lengths)[:-1])

    def _check_lengths(self, lengths: list[int], max_tokens: int) -> None:
        for i, num_tokens in enumerate(lengths):
            if num_tokens == 0:
                raise CallerError(
                    "the prompt is empty", field=_prompt_field(i), remedy="begin with some token"
                )
            if num_tokens + max_tokens > self._max_positions:
                raise CallerError(
                    f"{num_tokens} tokens and {max_tokens} new ones are more than the "
                    f"{self._max_positions} positions of the model",
                    field=_prompt_field(i),
                    remedy="shorten the prompt or lower max_tokens",
                )

    def _generate_wave(
        self, tokens: list[Ints], prompts: list[Prompt], args: Generate
    ) -> list[list[Sequence]]:
        """Prefill every prompt once, decode all samples of all prompts together."""
        draws = uniforms([p.seed for p in prompts], args.num_samples, args.sampling.max_tokens)
        tokens_PT, padding_P = _left_pad(tokens)
        capacity = tokens_PT.shape[1] + args.sampling.max_tokens
        prefill = self._decoder.prefill(tokens_PT, padding_P, capacity)
        expand_B = torch.arange(len(prompts)).repeat_interleave(args.num_samples)
        batch = _Batch(args.sampling, self.vocab_size, draws.reshape(expand_B.numel(), -1))
        batch.accept(prefill.logits_BV.index_select(0, expand_B))
        cache = prefill.cache.rows(expand_B)
        while not batch.is_done:
            if batch.has_many_finished:
                cache = cache.rows(batch.drop_finished())
            batch.accept(self._decoder.step(batch.last_B, cache))
        flat, count = batch.sequences(), args.num_samples
        return [flat[start : start + count] for start in range(0, len(flat), count)]


class _Batch:
    """The tokens drawn so far. R rows asked for, B ≤ R rows still in the decoder's batch."""

    def __init__(
        self, sampling: SamplingParams, vocab_size: int, draws_RI: npt.NDArray[np.float64]
    ) -> None:
        num_rows, self._max_tokens = draws_RI.shape
        self._temperature = sampling.temperature
        self._draws_RI = torch.from_numpy(draws_RI)
        self._is_stop_V = torch.zeros(vocab_size, dtype=torch.bool)
        self._is_stop_V[sampling.stop_token_ids] = True
        self._tokens_RI = np.zeros((num_rows, self._max_tokens), dtype="<i4")
        self._logprobs_RI = np.zeros((num_rows, self._max_tokens), dtype="<f4")
        self._length_R = np.full(num_rows, self._max_tokens)
        self._stopped_R = np.zeros(num_rows, dtype=np.bool_)
        self._rows_B = torch.arange(num_rows)
        self._live_B = torch.ones(num_rows, dtype=torch.bool)
        self._position = 0
        self.last_B = torch.empty(0, dtype=torch.int64)

    @property
    def is_done(self) -> bool:
        return self._position == self._max_tokens or not bool(self._live_B.any())

    @property
    def has_many_finished(self) -> bool:
        return int(self._live_B.sum()) < KEEP_ROWS * self._live_B.numel()

    def drop_finished(self) -> torch.Tensor:
        """Keep the live rows only; which of the batch's rows they are."""
        kept = self._live_B.nonzero().flatten()
        self._rows_B = self._rows_B[kept]
        self.last_B = self.last_B[kept]
        self._live_B = self._live_B[kept]
        return kept

    def accept(self, logits_BV: torch.Tensor) -> None:
        """Draw the next token of every row; a finished row's is ignored."""
        draws_B = self._draws_RI[self._rows_B, self._position]
        self.last_B, logprobs_B = draw(logits_BV, draws_B, self._temperature)
        live = self._live_B.numpy()
        rows = self._rows_B.numpy()[live]
        self._tokens_RI[rows, self._position] = self.last_B.numpy()[live]
        self._logprobs_RI[rows, self._position] = logprobs_B.numpy()[live]
        self._position += 1
        ends_B = self._is_stop_V[self.last_B] & self._live_B
        ended = self._rows_B[ends_B].numpy()
        self._length_R[ended] = self._position
        self._stopped_R[ended] = True
        self._live_B &= ~ends_B

    def sequences(self) -> list[Sequence]:
        return [
            Sequence(
                tokens=self._tokens_RI[row, :length].tobytes(),
                logprobs=self._logprobs_RI[row, :length].tobytes(),
                stop_reason="stop" if stopped else "length",
            )
            for row, (length, stopped) in enumerate(
                zip(self._length_R.tolist(), self._stopped_R.tolist(), strict=True)
            )
        ]


def draw(
    logits_BV: torch.Tensor, draws_B: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B,) at these uniforms and their log-probabilities at temperature 1.

    The token is the first whose cumulated probability exceeds draw × total, so one of probability
    zero is never drawn. Temperature 0 takes the likeliest.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float(), dim=-1)
    if temperature == 0:
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        scaled_BV = logprobs_BV if temperature == 1 else logprobs_BV / temperature
        cdf_BV = torch.softmax(scaled_BV, dim=-1).double().cumsum(dim=-1)
        threshold_B = draws_B * cdf_BV[:, -1]
        tokens_B = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True).flatten()
    return tokens_B, logprobs_BV.gather(-1, tokens_B[:, None]).flatten()


def _left_pad(tokens: list[Ints]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (P, T) and the columns of padding on the left of each row (P,)."""
    length = max(tokens_T.size for tokens_T in tokens)
    padded_PT = np.zeros((len(tokens), length), dtype=np.int64)
    for row, tokens_T in enumerate(tokens):
        padded_PT[row, length - tokens_T.size :] = tokens_T
    padding_P = [length - tokens_T.size for tokens_T in tokens]
    return torch.from_numpy(padded_PT), torch.tensor(padding_P)


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if sampling.max_tokens < 1:
        raise CallerError("it is below 1", field="args.sampling.max_tokens", remedy="use 1 or more")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise CallerError(
            f"{sampling.temperature} is no temperature",
            field="args.sampling.temperature",
            remedy="use 0 for greedy, or a positive number",
        )
    stops = [sampling.stop_token_ids]

    def field(_: int) -> str:
        return "args.sampling.stop_token_ids"

    check_tokens(joined_ints(stops, field), vocab_size, stops, field)


def _prompt_field(i: int) -> str:
    return f"args.prompts[{i}].tokens"


def _does_not_train(kind: str) -> CallerError:
    return CallerError(
        f"the sampler backend does not do {kind}",
        field="args.type",
        remedy="send it to a trainable deployment with the backend 'fsdp'",
    )


def _layout(spec: DeploymentSpec) -> Layout:
    if spec.trainable:
        raise CallerError(
            "the sampler backend does not train",
            field="deployments.trainable",
            remedy="use the backend 'fsdp'",
        )
    return plan(parameter_shapes(spec.model), trainable=False)
