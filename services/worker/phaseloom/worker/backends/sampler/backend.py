"""The sampling backend: generates with a KV cache and computes log-probabilities.

A token is drawn by inverting the CDF at a uniform number that depends only on (prompt seed, sample,
position); see `rng`. Requests of one call are decoded as one batch, up to the memory limit.
Requests that join between two tokens enter the same batch. Each ends when its own samples have
ended. A request that comes alone is a batch of its own, and its result always has the same bits.
Every rank of a WPG holds the whole weights and generates for its own prompts, so there are no
collectives.

Shapes: P prompts of a wave, B rows of the batch, R rows of one wave, T tokens of a prompt, V
vocabulary. For keys and values (L, C, B, K, S, D) see `decoder`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from phaseloom.common.contract.arrays import int32s, length
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    Datum,
    Forward,
    ForwardResult,
    Generate,
    GenerateResult,
    Sequence,
)
from phaseloom.common.contract.specs import Adapter, DeploymentSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Holding, holding_of
from phaseloom.worker.backends import scoring
from phaseloom.worker.backends.base import ALONE, AdapterVersion, Memory, RankGroup, Watch, nothing
from phaseloom.worker.backends.batch import (
    Ints,
    forward_batch,
    joined_ints,
)
from phaseloom.worker.backends.digest import weights_sha256
from phaseloom.worker.backends.inference import InferenceBackend, check_spec, prompt_field
from phaseloom.worker.backends.layout import Layout, plan
from phaseloom.worker.backends.lora.adapters import own_parameters
from phaseloom.worker.backends.lora.sharedbase import SharedBase, base_scratch_bytes
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
from phaseloom.worker.backends.sampler.adaptercache import AdapterCache, place_bytes
from phaseloom.worker.backends.sampler.decoder import Cache, Prefill, decoder_of
from phaseloom.worker.backends.sampler.prefixcache import Prefix, planned_bytes, prefix_cache
from phaseloom.worker.backends.sampler.rows import Rows, Sampling, Start
from phaseloom.worker.state.devicememory import DeviceMemory, scratch_tensor

WAVE_TOKENS = 65536
"""Most cache columns (rows × capacity) decoded at a time. Bounds the KV cache."""

KEEP_ROWS = 0.75
"""Finished rows are dropped from the batch when less than this share of its rows is live."""


class SamplerBackend(InferenceBackend):
    """The `Backend` for generation.

    Log-probabilities are always the model's own, at temperature 1, because the learner compares its
    log-probabilities with them. The temperature affects only which tokens are drawn.
    """

    def __init__(self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE) -> None:
        check_spec(spec, ranks)
        super().__init__(spec)
        self._layout = _layout(spec)
        self._tensors = HeapTensors(heap)
        self.slots = self._layout.slots
        files = parameter_shapes(spec.model).files
        self.version_slots = plan(files, trainable=False, dtype=weights_dtype(spec.model)).slots
        self.holdings: Seq[Holding] = [holding_of(self.slots)] * ranks.world_size
        self._device = self._tensors.device
        self._dtype = weights_dtype(spec.model)
        self._model = build_model(spec.model).requires_grad_(False)
        self._base = None
        if spec.model.adapter is not None:
            self._base = SharedBase(self._model, spec.model, ranks, heap)
        # Moves the rotary frequencies, which are buffers and not state.
        module: torch.nn.Module = self._model
        module.to(self._device)
        self.config = config_dict(self._model, spec.model)
        # From here on, every parameter is a view of the heap.
        views = self._tensors.views(self._layout.weights)
        for name, parameter in own_parameters(self._model).items():
            views[name].copy_(parameter.data)
            parameter.data = views[name]
        self._decoder = decoder_of(self._model)
        self._prefixes = prefix_cache(spec, heap, self._decoder)
        self._weights_name = ""
        self._adapters = None
        if spec.model.adapter is not None:
            adapter_memory = torch.empty(0, dtype=torch.uint8, device=self._device)
            if spec.max_adapters:
                start = base_scratch_bytes(spec.model, ranks)
                adapter_memory = scratch_tensor(heap)[start : start + _adapter_bytes(spec)]
            self._adapters = AdapterCache(self._model, self.version_slots, adapter_memory)
        self._scorer = scoring.Scorer(self._model, TORCH_DTYPES[self._dtype])
        self.at_boundary: Callable[[], None] = nothing
        return_freed_memory()

    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        check_spec(spec, ranks)
        base_bytes = base_scratch_bytes(spec.model, ranks)
        scratch_bytes = base_bytes + _adapter_bytes(spec) + planned_bytes(spec)
        return Memory(_layout(spec).heap_bytes, scratch_bytes)

    def check_adapter(self, version: AdapterVersion) -> None:
        """Check that requests can use an adapter version. Raises: CallerError: they cannot."""
        if self._adapters is None:
            raise CallerError(
                "this deployment has no adapter, so it cannot use the weights of one",
                code=Code.FAILED_PRECONDITION,
                field="args.weights",
                remedy="declare it with model.adapter on the same base, and with max_adapters",
            )
        self._adapters.check(version)

    def adapter_slots(self, adapter: Adapter) -> list[TensorSlot]:
        assert self._adapters is not None
        shapes = self._adapters.shapes_of(adapter)
        return plan(shapes, trainable=False, dtype=self._dtype).slots

    def generate(self, requests: Seq[Generate], watch: Watch) -> None:
        call = _Call(watch)
        batch = _Batch()
        with torch.inference_mode():
            self._add_requests(call, requests)
            while call.has_waiting or batch.waves:
                num_adapters = self._adapters.num_places if self._adapters else 0
                # A new wave runs its prefill alone. Without one, all rows decode one token.
                wave = call.next_wave(batch, num_adapters)
                if wave:
                    self._start_wave(call, batch, wave)
                elif batch.waves:
                    self._step(call, batch)
                call.report_new_tokens(batch)
                self.at_boundary()
                self._add_requests(call, watch.joined())

    def _add_requests(self, call: _Call, requests: Seq[Generate]) -> None:
        for args in requests:
            version = call.next_adapter
            with nullcontext() if self._adapters is None else self._adapters.alone(version):
                scored = self._scored_prompts(args)
            call.add(args, scored, version)

    def forward(self, args: Forward) -> ForwardResult:
        with torch.inference_mode():
            batch = forward_batch(args, self.vocab_size)
            return ForwardResult([*scoring.logprobs(self._scorer, batch)])

    def forward_with(self, args: Forward, version: AdapterVersion) -> ForwardResult:
        assert self._adapters is not None
        with self._adapters.alone(version):
            return self.forward(args)

    def weights_sha256(self) -> str:
        views = ((slot.name, self._tensors.view(slot)) for slot in self.slots)
        return weights_sha256(as_little_endian(views), self._dtype)

    def weights_changed(self) -> None:
        """Drop cached keys and values, adapters and the base's copy. Weights are read in place."""
        if self._base is not None:
            self._base.refill()
        if self._adapters is not None:
            self._adapters.forget()
        if self._prefixes is not None:
            self._prefixes.clear()

    def weights_exchanged(self, name: str) -> None:
        """Cache keys and values under the name of the weights that they belong to."""
        self._weights_name = name

    def weights_updated(self) -> None:
        if self._prefixes is not None:
            self._prefixes.weights_updated()

    def use_threads(self, count: int) -> None:
        """Always use one thread. More threads hardly speed up a decode step, and the last bits of
        its matrix products would depend on their number."""
        torch.set_num_threads(1)

    def close(self) -> None:
        """Do nothing: there is no process group and no thread."""

    def _start_wave(self, call: _Call, batch: _Batch, wave: list[_Prompt]) -> None:
        """Prefill every prompt of the wave once, draw the first token of all its samples, and add
        their rows to the batch."""
        samplings = self._samplings(call, wave)
        rows = Rows(samplings, self.vocab_size)
        prefixes = self._find_prefixes(call, wave)
        prefill = self._prefill(wave, prefixes, rows.room)
        # All samples of a prompt start from one prefill: row b belongs to prompt expand_B[b].
        samples_P = [call.args(prompt).num_samples for prompt in wave]
        expand_B = torch.arange(len(wave)).repeat_interleave(torch.tensor(samples_P))
        expand_B = expand_B.to(self._device)
        new = zip(wave, prefixes, strict=True)
        call.stepped(sum(prompt.tokens_T.size - prefix.num_tokens for prompt, prefix in new))
        call.accept(rows, prefill.logits_BV.index_select(0, expand_B).cpu())
        origins = [prefixes[i].origin for i in expand_B.tolist()]
        adapters = [wave[i].adapter for i in expand_B.tolist()]
        prefill.cache.keep_rows(expand_B)
        batch.add(rows, prefill.cache, origins, adapters)
        self._cache_ended_rows(batch)

    def _find_prefixes(self, call: _Call, wave: list[_Prompt]) -> list[Prefix]:
        """Return the cached prefix of each prompt of the wave."""
        cache = self._prefixes
        if cache is None:
            return [Prefix(0)] * len(wave)
        prefixes = [
            cache.find(
                p.tokens_T.tolist(),
                len(p.start.generated),
                p.adapter.name if p.adapter else self._weights_name,
            )
            for p in wave
        ]
        for prompt, prefix in zip(wave, prefixes, strict=True):
            call.count_tokens(prompt, prefix.num_tokens)
        return prefixes

    def _prefill(self, wave: list[_Prompt], prefixes: list[Prefix], room: int) -> Prefill[Any]:
        """Run the uncached part of each prompt. Prompts with equally many uncached tokens run
        together, and so do all prompts without a cached prefix.

        Args: room: columns for tokens to generate.
        """
        # Prompts by number of uncached tokens. Key 0 has all without a cached prefix: `prefill`
        # pads them to one length, which `resume` cannot do.
        groups: dict[int, list[int]] = {}
        for i, (prompt, prefix) in enumerate(zip(wave, prefixes, strict=True)):
            num_new = prompt.tokens_T.size - prefix.num_tokens
            groups.setdefault(num_new if prefix.num_tokens else 0, []).append(i)
        parts = [
            self._prefill_group([wave[i] for i in group], [prefixes[i] for i in group], room)
            for group in groups.values()
        ]
        if len(parts) == 1:
            return parts[0]
        cache = parts[0].cache
        for part in parts[1:]:
            cache = cache.joined(part.cache, room)
        # Back from the order of groups to that of the wave.
        order_P = torch.tensor([i for group in groups.values() for i in group]).argsort()
        order_P = order_P.to(self._device)
        logits_PV = torch.cat([part.logits_BV for part in parts])
        cache.keep_rows(order_P)
        return Prefill(logits_PV.index_select(0, order_P), cache)

    def _prefill_group(
        self, wave: list[_Prompt], prefixes: list[Prefix], room: int
    ) -> Prefill[Any]:
        """Run prompts that have no cached prefix, or equally many uncached tokens."""
        new_tokens = [
            prompt.tokens_T[prefix.num_tokens :]
            for prompt, prefix in zip(wave, prefixes, strict=True)
        ]
        tokens_PT, padding_P = _left_pad(new_tokens)
        tokens_PT = tokens_PT.to(self._device)
        with self._row_adapters(prompt.adapter for prompt in wave):
            if not prefixes[0].num_tokens:
                capacity = tokens_PT.shape[1] + room
                return self._decoder.prefill(tokens_PT, padding_P.to(self._device), capacity)
            assert self._prefixes is not None
            kv_LCBKSD = self._prefixes.read(prefixes)
            columns = kv_LCBKSD.shape[-2]
            padding_P = torch.tensor([columns - prefix.num_tokens for prefix in prefixes])
            return self._decoder.resume(tokens_PT, kv_LCBKSD, padding_P.to(self._device), room)

    def _row_adapters(
        self, adapters: Iterable[AdapterVersion | None]
    ) -> AbstractContextManager[None]:
        """Return a context in which the rows of a pass use these adapters."""
        if self._adapters is None:
            return nullcontext()
        versions = [*adapters]
        return self._adapters.rows(versions) if any(versions) else nullcontext()

    def _cache_ended_rows(self, batch: _Batch) -> None:
        """Store the keys and values of rows that have just ended in the prefix cache."""
        if self._prefixes is None:
            return
        start = 0
        for rows, origins in zip(batch.waves, batch.origins, strict=True):
            for ended in rows.take_ended_rows():
                origin = origins[ended.row]
                self._prefixes.store(ended.tokens, origin, batch.cache, start + ended.place)
            start += rows.num_rows

    def _step(self, call: _Call, batch: _Batch) -> None:
        """Draw the next token of all rows."""
        batch.drop_finished()
        if not batch.waves:
            return
        last_B = torch.cat([rows.last_B for rows in batch.waves]).to(self._device)
        with self._row_adapters(chain.from_iterable(batch.adapters)):
            logits_BV = self._decoder.step(last_B, batch.cache).cpu()
        call.stepped(len(logits_BV))
        logits = torch.split(logits_BV, batch.num_rows_by_wave)
        for rows, logits_RV in zip(batch.waves, logits, strict=True):
            call.accept(rows, logits_RV)
        self._cache_ended_rows(batch)

    def _samplings(self, call: _Call, wave: list[_Prompt]) -> list[Sampling]:
        """Return the parameters of each request of the wave. A request's prompts are
        consecutive."""
        samplings: list[Sampling] = []
        for request in dict.fromkeys(prompt.request for prompt in wave):
            prompts = [prompt for prompt in wave if prompt.request == request]
            args = call.args(prompts[0])
            sampling = args.sampling
            samplings.append(
                Sampling(
                    request,
                    prompts[0].index,
                    [prompt.start for prompt in prompts],
                    args.num_samples,
                    sampling.max_tokens,
                    sampling,
                    self._stop_tokens(sampling),
                    [
                        self._stop_text(sampling, prompt.start.prompt, prompt.start.generated)
                        for prompt in prompts
                        for _ in range(args.num_samples)
                    ],
                )
            )
        return samplings

    def _scored_prompts(self, args: Generate) -> GenerateResult:
        """Return a result without sequences: the log-probabilities of each prompt, as in `forward`,
        after a 0 for its first token."""
        if not args.prompt_logprobs:
            return GenerateResult([])
        tokens = [int32s(prompt.tokens) for prompt in args.prompts]
        # A prompt of one token has no target to score.
        data = [Datum(tokens_T[:-1], tokens_T[1:]) for tokens_T in tokens if tokens_T[1:]]
        batch = forward_batch(Forward(data), self.vocab_size)
        num_top = min(args.prompt_top_logprobs, self.vocab_size)
        scored_prompts = iter(scoring.scores(self._scorer, batch, num_top))
        none = scoring.Scores(b"", b"", b"")
        scored = [next(scored_prompts) if tokens_T[1:] else none for tokens_T in tokens]
        first, first_top = bytes(4), bytes(4 * num_top)
        return GenerateResult(
            [],
            [first + scores.logprobs for scores in scored],
            [first_top + scores.top_tokens for scores in scored if num_top],
            [first_top + scores.top_logprobs for scores in scored if num_top],
        )


@dataclass(frozen=True)
class _Prompt:
    """A prompt of a request of the call."""

    request: int
    index: int
    """Index of the prompt in its request."""
    tokens_T: Ints
    start: Start
    max_tokens: int
    """Maximum number of further tokens for each of its samples."""
    adapter: AdapterVersion | None
    """None stands for the deployment's own weights."""


class _Batch:
    """The waves of prompts that decode together, and one cache for all their rows.

    The rows of a wave are consecutive in the cache. A wave that joins gets rows behind all others.
    A wave whose rows have all ended is dropped.
    """

    def __init__(self) -> None:
        self.waves: list[Rows] = []
        self.origins: list[list[int]] = []
        """The `Prefix.origin` of each row that was requested, by wave."""
        self.adapters: list[list[AdapterVersion | None]] = []
        """The adapter of each row still in the batch, by wave; None stands for the deployment's
        own."""
        self._cache: Cache | None = None

    @property
    def cache(self) -> Cache:
        assert self._cache is not None
        return self._cache

    @property
    def num_rows_by_wave(self) -> list[int]:
        return [rows.num_rows for rows in self.waves]

    @property
    def columns(self) -> int:
        return self.cache.columns if self.waves else 0

    @property
    def room(self) -> int:
        """Maximum number of further tokens for any row."""
        return max((rows.room for rows in self.waves), default=0)

    @property
    def versions(self) -> set[str]:
        """The names of the adapter versions that rows use, besides the deployment's own."""
        return {adapter.name for wave in self.adapters for adapter in wave if adapter is not None}

    def add(
        self,
        rows: Rows,
        cache: Cache,
        origins: list[int],
        adapters: list[AdapterVersion | None],
    ) -> None:
        self.waves.append(rows)
        self.origins.append(origins)
        self.adapters.append(adapters)
        is_first = len(self.waves) == 1
        self._cache = cache if is_first else self.cache.joined(cache, self.room)

    def drop_finished(self) -> None:
        """Drop finished rows if a wave has no live row, or if too few of all rows are live."""
        live = [rows.num_live_rows for rows in self.waves]
        if all(live) and sum(live) >= KEEP_ROWS * sum(self.num_rows_by_wave):
            return
        # A wave's first row in the cache.
        starts = np.cumsum([0, *self.num_rows_by_wave[:-1]])
        kept_by_wave = [rows.drop_finished() for rows in self.waves]
        kept_rows = [
            rows_R + int(start) for rows_R, start in zip(kept_by_wave, starts, strict=True)
        ]
        self.adapters = [
            [adapters[row] for row in rows_R.tolist()]
            for adapters, rows_R in zip(self.adapters, kept_by_wave, strict=True)
        ]
        has_rows = [bool(rows.num_rows) for rows in self.waves]
        self.waves = [*compress(self.waves, has_rows)]
        self.origins = [*compress(self.origins, has_rows)]
        self.adapters = [*compress(self.adapters, has_rows)]
        if self.waves:
            self.cache.keep_rows(torch.cat(kept_rows).to(self.cache.padding_B.device))


@dataclass
class _Request:
    args: Generate
    scored: GenerateResult
    """The part of its result about the prompts, without sequences."""
    num_total: int
    """Most new tokens of all its samples."""
    num_open: int
    """Number of samples that have not ended."""
    num_done: int = 0
    sequences: dict[int, list[Sequence]] = field(default_factory=dict)
    """The sequences of each prompt whose samples have all ended, by the index of the prompt."""
    metrics: dict[str, float] = field(default_factory=dict)


class _Call:
    """The requests of one call: prompts that wait, and sequences that have ended."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._requests: list[_Request] = []
        self._closed: set[int] = set()
        """Requests that have ended or were cancelled."""
        self._streams: set[int] = set()
        """Requests that stream and have not ended."""
        self._waiting: deque[_Prompt] = deque()

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def args(self, prompt: _Prompt) -> Generate:
        return self._requests[prompt.request].args

    @property
    def next_adapter(self) -> AdapterVersion | None:
        """The adapter version of the next request to add."""
        return self._watch.adapter(len(self._requests))

    def add(self, args: Generate, scored: GenerateResult, adapter: AdapterVersion | None) -> None:
        if args.stream:
            self._streams.add(len(self._requests))
        prompts = _prompts(args, len(self._requests), adapter)
        total = args.num_samples * sum(prompt.max_tokens for prompt in prompts)
        num_open = args.num_samples * len(prompts)
        self._requests.append(_Request(args, scored, total, num_open))
        self._waiting += prompts
        if not prompts:  # a rank's share of an operation may be empty
            self._end(len(self._requests) - 1, GenerateResult([], []))

    def count_tokens(self, prompt: _Prompt, num_reused: int) -> None:
        """Count the tokens of a prompt that are run now, and those reused from the prefix cache."""
        metrics = self._requests[prompt.request].metrics
        for name, num in (
            ("prefilled_tokens:sum", prompt.tokens_T.size - num_reused),
            ("reused_tokens:sum", num_reused),
        ):
            metrics[name] = metrics.get(name, 0.0) + num

    def stepped(self, tokens: int) -> None:
        self._watch.stepped(tokens)

    def next_wave(self, batch: _Batch, num_adapters: int) -> list[_Prompt]:
        """Take the waiting prompts that can start now, next to the rows that decode already.

        All rows together use at most `num_adapters` versions of other adapters. Prompts start if
        all that wait fit, or if half of the memory is free: each wave that joins costs a copy of
        the cache.
        """
        self._end_cancelled()
        if not self._waiting:
            return []
        num_rows, longest, room = sum(batch.num_rows_by_wave), batch.columns, batch.room
        is_half_free = num_rows * (longest + room) <= WAVE_TOKENS / 2
        wave: list[_Prompt] = []
        versions = batch.versions
        for prompt in self._waiting:
            if prompt.adapter is not None:
                versions.add(prompt.adapter.name)
            if len(versions) > num_adapters:
                break
            num_samples = self.args(prompt).num_samples
            longest = max(longest, prompt.tokens_T.size)
            room = max(room, prompt.max_tokens)
            # The very first prompt always starts, even if it exceeds the bound by itself.
            is_first = not (wave or batch.waves)
            if not is_first and (num_rows + num_samples) * (longest + room) > WAVE_TOKENS:
                break
            num_rows += num_samples
            wave.append(prompt)
        if len(wave) < len(self._waiting) and not is_half_free:
            return []
        for _ in wave:
            self._waiting.popleft()
        return wave

    def accept(self, rows: Rows, logits_BV: torch.Tensor) -> None:
        """Draw a token in every row, report progress, and end requests that are done or
        cancelled."""
        live_before = rows.num_live()
        rows.accept(logits_BV)
        live_after = dict(rows.num_live())
        for i, num_tokens in live_before:
            request = self._requests[i]
            request.num_done += num_tokens
            self._watch.progress(i, request.num_done, request.num_total)
            if live_after.get(i, 0) < num_tokens:
                request.num_open -= num_tokens - live_after.get(i, 0)
                self._watch.still_open(i, request.num_open)
        for i in live_after:
            if i in self._closed or self._watch.is_cancelled(i):
                rows.cancel(i)
                self._end(i, None)
            elif self._watch.is_stopped(i):
                rows.stop(i)
        for sampling, sequences in rows.take_ended():
            if self._requests[sampling.request].args.stream:
                self._watch.drawn(sampling.request, rows.take_new_tokens(sampling.request))
            self._record(sampling.request, sampling.first_prompt, sequences)

    def report_new_tokens(self, batch: _Batch) -> None:
        """Report the new tokens of streaming requests, over all waves at once."""
        for i in [i for i in self._streams if self._watch.wants_tokens(i)]:
            new_tokens = [tokens for rows in batch.waves for tokens in rows.take_new_tokens(i)]
            if new_tokens:
                self._watch.drawn(i, new_tokens)

    def _end_cancelled(self) -> None:
        """End waiting prompts whose requests were cancelled or stopped."""
        for prompt in list(self._waiting):
            i = prompt.request
            if i not in self._closed and self._watch.is_cancelled(i):
                self._end(i, None)
            if i in self._closed:
                self._waiting.remove(prompt)
            elif self._watch.is_stopped(i):
                self._waiting.remove(prompt)
                none = Sequence(b"", b"", "partial")
                self._record(i, prompt.index, [[none] * self.args(prompt).num_samples])

    def _record(self, i: int, first: int, sequences: list[list[Sequence]]) -> None:
        """Record the sequences of a request's prompts from `first` on. After its last prompt,
        report the request's result."""
        request = self._requests[i]
        request.sequences |= dict(enumerate(sequences, first))
        if len(request.sequences) == len(request.args.prompts):
            groups = [request.sequences[k] for k in range(len(request.args.prompts))]
            result = replace(request.scored, sequences=groups, metrics=request.metrics)
            self._end(i, result)

    def _end(self, i: int, result: GenerateResult | None) -> None:
        if i not in self._closed:
            self._closed.add(i)
            self._streams.discard(i)
            self._watch.ended(i, result)


def _prompts(args: Generate, request: int, adapter: AdapterVersion | None) -> list[_Prompt]:
    if not args.prompts:
        return []
    tokens = [prompt.tokens for prompt in args.prompts]
    ends = np.cumsum([length(array) for array in tokens])
    tokens_P = np.split(joined_ints(tokens, prompt_field), ends)
    prompts = []
    for i, prompt in enumerate(args.prompts):
        num_prompt_tokens = tokens_P[i].size - prompt.num_generated
        prompt_tokens, generated = (
            tokens_P[i][:num_prompt_tokens].tolist(),
            tokens_P[i][num_prompt_tokens:].tolist(),
        )
        start = Start(prompt.seed, prompt.sample, prompt_tokens, generated)
        limit = args.sampling.max_tokens - prompt.num_generated
        prompts.append(_Prompt(request, i, tokens_P[i], start, limit, adapter))
    return prompts


def _left_pad(tokens: list[Ints]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens (P, T), and the columns of padding on the left of each row (P,)."""
    length = max(tokens_T.size for tokens_T in tokens)
    padded_PT = np.zeros((len(tokens), length), dtype=np.int64)
    for row, tokens_T in enumerate(tokens):
        padded_PT[row, length - tokens_T.size :] = tokens_T
    padding_P = [length - tokens_T.size for tokens_T in tokens]
    return torch.from_numpy(padded_PT), torch.tensor(padding_P)


def _adapter_bytes(spec: DeploymentSpec) -> int:
    """Return each rank's scratch bytes for versions of other adapters."""
    if not spec.max_adapters or spec.model.adapter is None:
        return 0
    return spec.max_adapters * place_bytes(_layout(spec).slots)


def _layout(spec: DeploymentSpec) -> Layout:
    dtype = weights_dtype(spec.model)
    return plan(parameter_shapes(spec.model), trainable=False, dtype=dtype)
