"""Sampling backend: generates with a KV cache and gives log-probabilities; weights only.

A token is drawn by inverting the CDF at a uniform that is a function of (prompt seed, sample,
position), see `rng`. Requests that come in one call are decoded as one batch, in as few waves as
memory allows; one that comes alone is a batch of its own, and its result the same bits always.
Every rank of a WPG holds the whole weights and generates for its own prompts: no collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from phaseloom.common.contract.arrays import int32s, length
from phaseloom.common.contract.base import Float32s
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    OptimStep,
    OptimStepResult,
    SamplingParams,
    Sequence,
)
from phaseloom.common.contract.specs import DeploymentSpec
from phaseloom.common.tensors.resharding import Sharding
from phaseloom.worker.backends import scoring
from phaseloom.worker.backends.base import ALONE, RankGroup, Watch
from phaseloom.worker.backends.batch import (
    Ints,
    check_some,
    check_tokens,
    forward_batch,
    joined_ints,
)
from phaseloom.worker.backends.decode import decoder_of
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.generation import Rows, Sampling
from phaseloom.worker.backends.layout import Layout, check_layout, plan
from phaseloom.worker.backends.model import (
    TORCH_DTYPES,
    HeapTensors,
    as_little_endian,
    build_model,
    config_dict,
    parameter_shapes,
    return_freed_memory,
    weights_dtype,
)
from phaseloom.worker.state.devicememory import DeviceMemory

KINDS = frozenset({"generate", "forward", "save_state", "load_state", "sync_weights"})

WAVE_TOKENS = 65536
"""Most cache columns (rows × capacity) decoded at a time: bounds the KV cache."""


class SamplerBackend:
    """`Backend` for generation.

    Log-probabilities are the model's own (temperature 1), whatever the temperature that tokens were
    drawn at: the learner's log-probabilities compare with those.
    """

    def __init__(self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE) -> None:
        check_layout(spec, ranks)
        self._layout = _layout(spec)
        self._tensors = HeapTensors(heap)
        self.slots = self._layout.slots
        self.version_slots = self.slots
        self.sharding = Sharding(spec.layout, 1)
        self.host_bytes = 0
        self.kinds = KINDS
        self._token_texts = spec.model.token_texts
        self._device = self._tensors.device
        self._dtype = weights_dtype(spec.model)
        self._model = build_model(spec.model).requires_grad_(False)
        # Moves its rotary frequencies, which are no state.
        module: torch.nn.Module = self._model
        module.to(self._device)
        self.vocab_size = int(self._model.config.vocab_size)
        self.config = config_dict(self._model, self._dtype)
        self._ends = _end_tokens(self._model.config, self.vocab_size)
        self._max_positions = int(self._model.config.max_position_embeddings)
        views = self._tensors.views(self._layout.weights)
        for name, parameter in self._model.named_parameters():
            views[name].copy_(parameter.data)
            parameter.data = views[name]
        self._decoder = decoder_of(self._model)
        self._scorer = scoring.Scorer(self._model, TORCH_DTYPES[self._dtype])
        return_freed_memory()

    @staticmethod
    def heap_bytes(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> int:
        check_layout(spec, ranks)
        return _layout(spec).heap_bytes

    def use_host_memory(self, buffer: memoryview) -> None:
        """Nothing: no state of it lives in host memory."""

    def check_generate(self, args: Generate) -> None:
        if not args.prompts:
            raise CallerError(
                "there are no prompts", field="args.prompts", remedy="send at least 1 prompt"
            )
        if args.num_samples < 1:
            raise CallerError("it is below 1", field="args.num_samples", remedy="use 1 or more")
        _check_sampling(args.sampling, self.vocab_size)
        if args.sampling.stop_strings and not self._token_texts:
            raise CallerError(
                "the model has no token_texts to find strings in",
                code=Code.FAILED_PRECONDITION,
                field="args.sampling.stop_strings",
                remedy="declare the deployment with model.token_texts, or use stop_token_ids",
            )
        tokens = [prompt.tokens for prompt in args.prompts]
        check_tokens(joined_ints(tokens, _prompt_field), self.vocab_size, tokens, _prompt_field)
        self._check_lengths([length(array) for array in tokens], args.sampling.max_tokens)

    def generate(self, requests: Seq[Generate], watch: Watch) -> list[GenerateResult | None]:
        call = _Call(requests, watch)
        with torch.inference_mode():
            logprobs = [self._prompt_logprobs(args) for args in requests]
            for wave in call.waves():
                self._generate_wave(call, wave)
        return [
            None if i in call.cancelled else GenerateResult(call.sequences[i], logprobs[i])
            for i in range(len(requests))
        ]

    def check_forward(self, args: Forward) -> None:
        check_some(args.batch)
        forward_batch(args, self.vocab_size)

    def forward(self, args: Forward) -> ForwardResult:
        with torch.inference_mode():
            batch = forward_batch(args, self.vocab_size)
            return ForwardResult([*scoring.logprobs(self._scorer, batch)])

    def check_forward_backward(self, args: ForwardBackward) -> None:
        raise _does_not_train("forward_backward")

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        raise _does_not_train("forward_backward")

    def check_optim_step(self, args: OptimStep) -> None:
        raise _does_not_train("optim_step")

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        raise _does_not_train("optim_step")

    def zero_gradients(self) -> None:
        """Nothing: there are no gradients."""

    def weights_sha256(self) -> str:
        views = self._tensors.views(self._layout.weights)
        return weights_sha256(as_little_endian(views.items()), self._dtype)

    def weights_changed(self) -> None:
        """Nothing: nothing is derived from the weights; every call reads them from the heap."""

    def close(self) -> None:
        """Nothing: there is no process group and no thread."""

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

    def _generate_wave(self, call: _Call, wave: list[_Prompt]) -> None:
        """Prefill every prompt once, decode all samples of all prompts together."""
        asked = self._sampling(call, wave)
        rows = Rows(asked, self.vocab_size, self._token_texts)
        tokens_PT, padding_P = _left_pad([prompt.tokens_T for prompt in wave])
        capacity = tokens_PT.shape[1] + max(each.max_tokens for each in asked)
        prefill = self._decoder.prefill(
            tokens_PT.to(self._device), padding_P.to(self._device), capacity
        )
        samples_P = [call.requests[prompt.request].num_samples for prompt in wave]
        expand_B = torch.arange(len(wave)).repeat_interleave(torch.tensor(samples_P))
        expand_B = expand_B.to(self._device)
        call.accept(rows, prefill.logits_BV.index_select(0, expand_B).cpu())
        cache = prefill.cache.rows(expand_B)
        while not rows.is_done:
            if rows.has_many_finished:
                cache = cache.rows(rows.drop_finished().to(self._device))
            call.accept(rows, self._decoder.step(rows.last_B.to(self._device), cache).cpu())
        for each, sequences in zip(asked, rows.sequences(), strict=True):
            call.sequences[each.request] += sequences

    def _sampling(self, call: _Call, wave: list[_Prompt]) -> list[Sampling]:
        """Parameters of each request of the wave; a request's prompts follow one another."""
        asked: list[Sampling] = []
        for request in dict.fromkeys(prompt.request for prompt in wave):
            args = call.requests[request]
            sampling = args.sampling
            ends = [] if sampling.ignore_eos else self._ends
            asked.append(
                Sampling(
                    request,
                    [prompt.seed for prompt in wave if prompt.request == request],
                    args.num_samples,
                    sampling.max_tokens,
                    sampling.temperature,
                    [*ends, *sampling.stop_token_ids],
                    sampling.stop_strings,
                )
            )
        return asked

    def _prompt_logprobs(self, args: Generate) -> list[Float32s]:
        """Log-probabilities of each prompt, as `forward` gives them, behind a 0 for its first
        token."""
        if not args.prompt_logprobs:
            return []
        tokens = [int32s(prompt.tokens) for prompt in args.prompts]
        scored = [Datum(tokens_T[:-1], tokens_T[1:]) for tokens_T in tokens if tokens_T[1:]]
        lp = iter(scoring.logprobs(self._scorer, forward_batch(Forward(scored), self.vocab_size)))
        return [b"\0\0\0\0" + (next(lp) if tokens_T[1:] else b"") for tokens_T in tokens]


@dataclass(frozen=True)
class _Prompt:
    """A prompt of a request of the call."""

    request: int
    tokens_T: Ints
    seed: int


class _Call:
    """The requests of one call: the sequences drawn for each so far, and which are cancelled."""

    def __init__(self, requests: Seq[Generate], watch: Watch) -> None:
        self.requests = requests
        self.cancelled: set[int] = set()
        self.sequences: list[list[list[Sequence]]] = [[] for _ in requests]
        self._watch = watch
        self._num_done = [0] * len(requests)
        self._num_total = [
            len(args.prompts) * args.num_samples * args.sampling.max_tokens for args in requests
        ]

    def waves(self) -> Iterator[list[_Prompt]]:
        """Prompts to decode together; those of requests that are cancelled by then are left out."""
        prompts = [prompt for i in range(len(self.requests)) for prompt in self._prompts(i)]
        if not prompts:
            return
        longest = max(prompt.tokens_T.size for prompt in prompts)
        capacity = longest + max(args.sampling.max_tokens for args in self.requests)
        wave: list[_Prompt] = []
        num_rows = 0
        for prompt in prompts:
            num_samples = self.requests[prompt.request].num_samples
            if wave and (num_rows + num_samples) * capacity > WAVE_TOKENS:
                yield wave
                wave, num_rows = [], 0
            if self._is_cancelled(prompt.request):
                continue
            wave.append(prompt)
            num_rows += num_samples
        if wave:
            yield wave

    def _prompts(self, request: int) -> list[_Prompt]:
        prompts = self.requests[request].prompts
        tokens = [prompt.tokens for prompt in prompts]
        ends = np.cumsum([length(array) for array in tokens])
        tokens_P = np.split(joined_ints(tokens, _prompt_field), ends)
        return [_Prompt(request, tokens_P[i], prompt.seed) for i, prompt in enumerate(prompts)]

    def accept(self, rows: Rows, logits_BV: torch.Tensor) -> None:
        """Draw a token in every row; tell how far that is, and end what nobody wants any more."""
        drawn = rows.num_live()
        rows.accept(logits_BV)
        for request, num_tokens in drawn:
            self._num_done[request] += num_tokens
            self._watch.progress(request, self._num_done[request], self._num_total[request])
        for request, _ in rows.num_live():
            if self._is_cancelled(request):
                rows.cancel(request)

    def _is_cancelled(self, request: int) -> bool:
        if request not in self.cancelled and self._watch.is_cancelled(request):
            self.cancelled.add(request)
        return request in self.cancelled


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
    if "" in sampling.stop_strings:
        raise CallerError(
            "a string is empty", field="args.sampling.stop_strings", remedy="leave it out"
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


def _end_tokens(config: PreTrainedConfig, vocab_size: int) -> list[int]:
    """The end-of-sequence tokens that the model can say; a config may name one, several or none."""
    named = config.eos_token_id
    ids = [named] if isinstance(named, int) else named or []
    return [token for token in ids if 0 <= token < vocab_size]


def _layout(spec: DeploymentSpec) -> Layout:
    if spec.trainable:
        raise CallerError(
            "the sampler backend does not train",
            field="deployments.trainable",
            remedy="use the backend 'fsdp'",
        )
    dtype = weights_dtype(spec.model)
    return plan(parameter_shapes(spec.model), trainable=False, dtype=dtype)
