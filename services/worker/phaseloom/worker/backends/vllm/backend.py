"""The `Backend` for generation with vLLM's engine.

Tokens are drawn as in our own sampler: the same draws by (prompt seed, sample, position) invert the
same CDF. Only the last bits of the model's logits differ. Each replica generates for its own
prompts. The ranks of a replica (see `replica`) all draw the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from phaseloom.common.contract.arrays import Float32s, int32s, pack_float32s, pack_int32s
from phaseloom.common.contract.errors import CallerError, Code, InternalError
from phaseloom.common.contract.operations import (
    Datum,
    DrawnTokens,
    Forward,
    ForwardResult,
    Generate,
    GenerateResult,
    Prompt,
    SamplingParams,
    Sequence,
)
from phaseloom.common.contract.specs import (
    Adapter,
    Batching,
    DeploymentSpec,
    DeviceKind,
    Layout,
)
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.resharding import Holding, holding_of
from phaseloom.common.text.parts import StopText
from phaseloom.worker.backends.architectures import has_dynamic_rope
from phaseloom.worker.backends.base import (
    ALONE,
    NONFINITE,
    AdapterVersion,
    Memory,
    RankGroup,
    Watch,
)
from phaseloom.worker.backends.batch import check_one_target
from phaseloom.worker.backends.gathering import inside, weights_digest
from phaseloom.worker.backends.inference import InferenceBackend, check_spec
from phaseloom.worker.backends.layout import Layout as AdapterLayout
from phaseloom.worker.backends.layout import plan as plan_layout
from phaseloom.worker.backends.lora.adapters import adapter_config, own_parameters
from phaseloom.worker.backends.lora.sharedbase import BaseMemory
from phaseloom.worker.backends.lora.versions import check_version, shapes_of, tensors_of
from phaseloom.worker.backends.model import (
    TORCH_DTYPES,
    HeapTensors,
    build_model,
    max_positions,
    meta_model,
    model_config,
    parameter_shapes,
    return_freed_memory,
    weights_dtype,
)
from phaseloom.worker.backends.processgroup import Member, collective
from phaseloom.worker.backends.shaping import is_plain, temperature_of
from phaseloom.worker.backends.vllm.adapters import (
    Part,
    parts_by_weight,
    plan_adapter,
    put_slices,
)
from phaseloom.worker.backends.vllm.draws import Draw
from phaseloom.worker.backends.vllm.engine import Engine, Request, Scored, Settings, Step, plan
from phaseloom.worker.backends.vllm.loader import Placement
from phaseloom.worker.backends.vllm.replica import Agreed, join
from phaseloom.worker.state.devicememory import DeviceMemory, as_tensor, scratch_tensor

_SEQUENCES = 8
"""Number of full-length sequences that the KV cache holds by default."""
_SPARE_POSITIONS = 2
"""Extra positions for scoring: a full-length sequence is followed by its last target, and vLLM then
draws one more token, which is ignored."""


class VllmBackend(InferenceBackend, Member):
    """The `Backend` that generates and scores with vLLM."""

    def __init__(self, spec: DeploymentSpec, heap: DeviceMemory, ranks: RankGroup = ALONE) -> None:
        check_spec(spec, ranks)
        super().__init__(spec)
        self._replica = join(spec.layout, ranks)
        settings, shapes = settings_of(spec), parameter_shapes(spec.model).files
        planned = _plan(spec, settings)
        if planned.heap_bytes != heap.num_bytes:
            raise InternalError(
                f"expected a heap of {planned.heap_bytes} bytes, got {heap.num_bytes}"
            )
        self._tensors = HeapTensors(heap)
        self.slots = planned.slots
        self._dtype = weights_dtype(spec.model)
        self.version_slots = plan_layout(shapes, trainable=False, dtype=self._dtype).slots
        views = {slot.name: self._tensors.view(slot) for slot in self.slots}
        memory, scratch, self._base = as_tensor(heap), scratch_tensor(heap), None
        if planned.adapter is not None:
            model, weights = spec.model, planned.weights
            self._base = BaseMemory(
                model,
                weights.slots,
                weights.num_bytes,
                ranks,
                heap,
                scratch_start=settings.kv_bytes,
            )
            memory = self._base.tensor
            self.config = adapter_config(model, meta_model(model))
        self._engine = Engine(
            settings,
            memory,
            scratch[: settings.kv_bytes],
            planned.shapes,
            is_filled=self._base is not None,
        )
        self._parts = planned.parts
        self._place = scratch[len(scratch) - _place_bytes(spec, planned) :]
        """Holds the slices of another adapter while a call uses that adapter."""
        if spec.model.adapter is not None:
            scale = spec.model.adapter.alpha / spec.model.adapter.rank
            self._engine.add_adapter(parts_by_weight(planned.parts, views, scale))
        self._replica_holdings = self._replica.gathered(holding_of(self.slots))
        self.holdings: Seq[Holding] = self._replica.spread(self._replica_holdings)
        self._keeps_prompts = spec.batching is Batching.SHARED or spec.prefix_cache
        if spec.model.pinned is None or planned.adapter is not None:
            local_slices = holding_of(self.slots)
            for name, parameter in own_parameters(build_model(spec.model)).items():
                if name in local_slices:
                    views[name].copy_(parameter.data[inside(local_slices[name])])
        return_freed_memory()

    @staticmethod
    def plan(spec: DeploymentSpec, ranks: RankGroup = ALONE) -> Memory:
        check_spec(spec, ranks)
        join(spec.layout, ranks)
        settings = settings_of(spec)
        planned = _plan(spec, settings)
        is_copied = planned.adapter is not None and ranks.device_kind is DeviceKind.CUDA
        base_bytes = planned.weights.num_bytes if is_copied else 0
        scratch_bytes = settings.kv_bytes + base_bytes + _place_bytes(spec, planned)
        return Memory(planned.heap_bytes, scratch_bytes)

    @collective
    def generate(self, requests: Seq[Generate], watch: Watch) -> None:
        self._prepare_call()
        if self._replica.size > 1:
            watch = Agreed(watch, self._replica, len(requests))
        call = _Call(self._engine, watch, self.vocab_size, self._stop_text)
        try:
            self._add_requests(call, requests)
            while call.has_live:
                call.step()
                self._add_requests(call, watch.joined())
        finally:
            call.abort()

    def _add_requests(self, call: _Call, requests: Seq[Generate]) -> None:
        for args in requests:
            call.add(args, self._stop_tokens(args.sampling))

    def check_forward(self, args: Forward) -> None:
        super().check_forward(args)
        check_one_target(args.batch)
        for i, datum in enumerate(args.batch):
            tokens, targets = int32s(datum.tokens), int32s(datum.targets)
            if list(tokens[1:]) != list(targets[:-1]):
                raise CallerError(
                    "the vllm backend scores only a sample's own next tokens as targets",
                    code=Code.FAILED_PRECONDITION,
                    field=f"args.batch[{i}].targets",
                    remedy="pass the tokens shifted by one, or use the backend 'sampler'",
                )

    @collective
    def forward(self, args: Forward) -> ForwardResult:
        self._prepare_call()
        return ForwardResult(self._score(args.batch))

    @collective
    def weights_sha256(self) -> str:
        views = {slot.name: self._tensors.view(slot) for slot in self.slots}
        return weights_digest(
            self.version_slots, self._replica_holdings, views, self._replica.rank, self._dtype
        )

    def weights_changed(self) -> None:
        if self._base is not None:
            self._base.refill()
        self._engine.forget_prompts()

    def weights_exchanged(self, name: str) -> None:
        """Share cached keys and values only between requests with the same weights."""
        self._engine.salt = name

    def adapter_slots(self, adapter: Adapter) -> list[TensorSlot]:
        shapes = shapes_of(self.version_slots, adapter)
        return plan_layout(shapes, trainable=False, dtype=self._dtype).slots

    def check_adapter(self, version: AdapterVersion) -> None:
        """Check that requests can use an adapter version. Raises: CallerError: they cannot."""
        check_version(version, self.version_slots)

    @contextmanager
    def switched(self, version: AdapterVersion) -> Iterator[None]:
        """Within the block, calls compute with a version, of which this rank copies its slices."""
        views = put_slices(tensors_of(version), self.slots, self._place)
        scale = version.adapter.alpha / version.adapter.rank
        with self._engine.exchanged_adapter(parts_by_weight(self._parts, views, scale)):
            self._engine.salt = version.name
            try:
                yield
            finally:
                self._engine.salt = ""

    def close(self) -> None:
        """Do nothing: there is no process and no thread."""

    def _prepare_call(self) -> None:
        """Prepare a call.

        If operations neither share batches nor use a prefix cache, drop what earlier calls left:
        the last bits of a result must not depend on earlier work.
        """
        if not self._keeps_prompts:
            self._engine.forget_prompts()

    def _score(self, batch: Seq[Datum]) -> list[Float32s]:
        """Return the log-probabilities of each sample's targets, which are its tokens shifted by
        one."""
        for i, datum in enumerate(batch):
            # vLLM scores the tokens of a prompt, so the last target joins them.
            tokens = [*int32s(datum.tokens), int32s(datum.targets)[-1]]
            self._engine.add(Request(f"{i}", tokens, max_tokens=1, scores_prompt=True))
        logprobs: dict[str, Float32s] = {}
        while not self._engine.is_idle:
            for step in self._engine.step():
                if step.prompt is not None:
                    logprobs[step.name] = pack_float32s([*step.prompt.logprobs])
        return [logprobs[f"{i}"] for i in range(len(batch))]


@dataclass(frozen=True)
class _Planned:
    """The memory plan of a rank."""

    shapes: Mapping[str, Seq[int]]
    """Shapes of the whole weights of vLLM's model."""
    weights: Placement
    """Placement of these weights, in the heap or in an adapter's base."""
    adapter: AdapterLayout | None
    """Layout of the adapter in the heap; None without an adapter."""
    parts: Seq[Part] = ()

    @property
    def heap_bytes(self) -> int:
        return self.weights.num_bytes if self.adapter is None else self.adapter.heap_bytes

    @property
    def slots(self) -> list[TensorSlot]:
        return self.weights.slots if self.adapter is None else self.adapter.slots


def _plan(spec: DeploymentSpec, settings: Settings) -> _Planned:
    """Plan a rank's memory. torch's process group must be the replica's. Raises: CallerError."""
    shapes = parameter_shapes(replace(spec.model, adapter=None)).files
    weights = plan(settings, shapes)
    if spec.model.adapter is None:
        return _Planned(shapes, weights, None)
    layout, parts = plan_adapter(spec.model, weights, parameter_shapes(spec.model))
    return _Planned(shapes, weights, layout, parts)


def _place_bytes(spec: DeploymentSpec, planned: _Planned) -> int:
    """Return the scratch bytes for another adapter's slices. One set is enough: a call reads with
    one adapter at a time."""
    return planned.heap_bytes if spec.max_adapters else 0


@dataclass
class _Row:
    """One sequence while it is decoded."""

    request: int
    prompt: int
    """Index of its prompt in the request."""
    sample: int
    text: StopText | None
    """The matcher of its stop strings; None if it has none."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    stop_reason: str = ""
    num_prompt: int = 0
    """Number of tokens that it starts with."""
    num_reported: int = 0
    """Number of its tokens that were reported during decoding."""


@dataclass
class _Request:
    args: Generate
    rows: list[_Row]
    """The rows, in the order of prompts and samples."""
    num_total: int
    """Maximum number of new tokens, summed over all its samples."""
    num_prompt_top: int
    """Number of likeliest tokens to return for each prompt token."""
    num_done: int = 0
    scored: dict[int, Scored] = field(default_factory=dict)
    """Log-probabilities of each prompt, without its first token, by the index of the prompt."""

    @property
    def is_scored(self) -> bool:
        """Whether all requested log-probabilities of the prompts are there."""
        return len(self.scored) == len(self.args.prompts) * self.args.prompt_logprobs

    def result(self) -> GenerateResult:
        flat = map(_sequence, self.rows)
        sequences = [[next(flat) for _ in range(self.args.num_samples)] for _ in self.args.prompts]
        scored = [scores for _, scores in sorted(self.scored.items())]
        first = [0] * self.num_prompt_top
        return GenerateResult(
            sequences,
            [pack_float32s([0.0, *scores.logprobs]) for scores in scored],
            [pack_int32s([*first, *scores.top_tokens]) for scores in scored if first],
            [pack_float32s([*first, *scores.top_logprobs]) for scores in scored if first],
        )

    def take_new_tokens(self) -> list[DrawnTokens]:
        """Return the tokens that its rows have got since the last report."""
        new_tokens = []
        for row in self.rows:
            start, row.num_reported = row.num_reported, len(row.tokens)
            if start < len(row.tokens):
                num_top = len(row.top_tokens) // len(row.tokens)
                new_tokens.append(
                    DrawnTokens(
                        row.prompt,
                        row.sample,
                        start,
                        pack_int32s(row.tokens[start:]),
                        pack_float32s(row.logprobs[start:]),
                        pack_int32s(row.top_tokens[start * num_top :]),
                        pack_float32s(row.top_logprobs[start * num_top :]),
                    )
                )
        return new_tokens


def _sequence(row: _Row) -> Sequence:
    sequence = Sequence(pack_int32s(row.tokens), pack_float32s(row.logprobs), row.stop_reason)
    if not row.top_tokens:
        return sequence
    return replace(
        sequence,
        top_tokens=pack_int32s(row.top_tokens),
        top_logprobs=pack_float32s(row.top_logprobs),
    )


def _parts(prompt: Prompt) -> tuple[Seq[int], Seq[int]]:
    """Split a prompt's tokens: the original prompt, and those of an earlier answer."""
    tokens = int32s(prompt.tokens)
    length = len(tokens) - prompt.num_generated
    return tokens[:length], tokens[length:]


class _Call:
    """The requests of one call. Each ends when its own rows have ended."""

    def __init__(
        self,
        engine: Engine,
        watch: Watch,
        vocab_size: int,
        stop_text: Callable[[SamplingParams, Seq[int], Seq[int]], StopText | None],
    ) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._watch = watch
        self._stop_text = stop_text
        self._requests: list[_Request] = []
        self._live: dict[int, set[str]] = {}
        """Names of the live rows, for each request that has some."""
        self._rows: dict[str, _Row] = {}

    @property
    def has_live(self) -> bool:
        return bool(self._live)

    def add(self, args: Generate, stops: list[int]) -> None:
        """Start a request, next to those that are being decoded."""
        i = len(self._requests)
        rows = [
            _Row(i, k, sample, self._stop_text(args.sampling, *_parts(prompt)))
            for k, prompt in enumerate(args.prompts)
            for sample in range(args.num_samples)
        ]
        total = sum(self._start_row(row, args, stops) for row in rows)
        self._requests.append(_Request(args, rows, total, self._num_prompt_top(args)))
        if not rows:  # a rank's share of an operation may be empty
            self._watch.ended(i, GenerateResult([], []))

    def _start_row(self, row: _Row, args: Generate, stops: list[int]) -> int:
        """Start decoding a row. Returns: the most new tokens that it can get."""
        prompt, sampling = args.prompts[row.prompt], args.sampling
        tokens, start = [*int32s(prompt.tokens)], prompt.num_generated
        # Without a `Draw`, vLLM decodes greedily.
        draw = None
        if temperature_of(sampling) or not is_plain(sampling):
            end = len(tokens) - start
            sample = prompt.sample + row.sample
            draw = Draw(prompt.seed, sample, sampling, tokens[:end], tokens[end:])
        row.num_prompt = len(tokens)
        name = f"{row.request}.{row.prompt}.{row.sample}"
        self._rows[name] = row
        self._live.setdefault(row.request, set()).add(name)
        self._engine.add(
            Request(
                name,
                tokens,
                sampling.max_tokens - start,
                stops,
                draw,
                min(sampling.top_logprobs, self._vocab_size),
                scores_prompt=args.prompt_logprobs and row.sample == 0,
                num_prompt_top=self._num_prompt_top(args),
            )
        )
        return sampling.max_tokens - start

    def _num_prompt_top(self, args: Generate) -> int:
        return min(args.prompt_top_logprobs, self._vocab_size)

    def step(self) -> None:
        """Add a token to each row in vLLM's batch, and end requests that are done, stopped or
        cancelled."""
        for i in list(self._live):
            if self._watch.is_cancelled(i):
                self._drop(i)
                self._watch.ended(i, None)
            # A stopped request still gets the log-probabilities of its prompts.
            elif self._requests[i].is_scored and self._watch.is_stopped(i):
                for name in self._live[i]:
                    self._rows[name].stop_reason = "partial"
                self._drop(i)
                self._end(i)
        stepped: set[int] = set()
        num_open = {i: len(names) for i, names in self._live.items()}
        ended = [*self._engine.step()] if self._live else []
        if tokens := sum(map(self._tokens_run, ended)):
            self._watch.stepped(tokens)
        for step in ended:
            self._accept(step)
            stepped.add(self._rows[step.name].request)
        for i in stepped:
            request = self._requests[i]
            self._watch.progress(i, request.num_done, request.num_total)
            if self._live[i] and request.args.stream and self._watch.wants_tokens(i):
                self._watch.drawn(i, request.take_new_tokens())
            if len(self._live[i]) < num_open[i]:
                self._watch.still_open(i, len(self._live[i]))
            if not self._live[i]:
                del self._live[i]
                self._end(i)

    def _tokens_run(self, step: Step) -> int:
        """Return the tokens that a row's step ran. A prompt counts in the step that completes
        it."""
        row = self._rows[step.name]
        return len(step.tokens) if row.tokens else row.num_prompt

    def abort(self) -> None:
        """Drop the rows that are still being decoded."""
        for i in list(self._live):
            self._drop(i)

    def _accept(self, step: Step) -> None:
        row = self._rows[step.name]
        request = self._requests[row.request]
        request.num_done += len(step.tokens)
        if step.prompt is not None:
            request.scored[row.prompt] = step.prompt
        if not all(map(math.isfinite, step.scored.logprobs)):
            row.stop_reason = NONFINITE
        else:
            row.tokens += step.tokens
            row.logprobs += step.scored.logprobs
            row.top_tokens += step.scored.top_tokens
            row.top_logprobs += step.scored.top_logprobs
            row.stop_reason = step.stop_reason
        if row.text is not None and not row.stop_reason:
            for token in step.tokens:
                if row.text.ends_with(token):
                    row.stop_reason = "stop"
        if row.stop_reason:
            self._live[row.request].discard(step.name)
            self._engine.abort([step.name])

    def _end(self, i: int) -> None:
        """Report a request's result, after its tokens that were not reported yet."""
        request = self._requests[i]
        if request.args.stream:
            self._watch.drawn(i, request.take_new_tokens())
        self._watch.ended(i, request.result())

    def _drop(self, i: int) -> None:
        """Make vLLM stop decoding a request's rows."""
        self._engine.abort(list(self._live.pop(i)))


def settings_of(spec: DeploymentSpec) -> Settings:
    """Return the settings of one rank's engine.

    Raises: CallerError: the config is not supported, or the model has experts.
    """
    if parameter_shapes(replace(spec.model, adapter=None)).splits_parameters:
        raise CallerError(
            "the vllm backend does not support models with experts",
            field="model.config.model_type",
            remedy="use the backend 'sampler', or a model without experts",
        )
    config = model_config(spec.model)
    if has_dynamic_rope(config):
        raise CallerError(
            "the vllm backend does not support rope_type dynamic: vLLM computes one set of "
            "frequencies for all lengths",
            field="model.config.rope_parameters",
            remedy="use the backend 'sampler', or another rope_type such as yarn",
        )
    tp, pp = spec.layout.tp, spec.layout.pp
    _check_divides("tp", tp, config.num_attention_heads, "attention heads")
    # Equal stages have room for equally many tokens, so that all ranks schedule the same.
    _check_divides("pp", pp, config.num_hidden_layers, "layers")
    num_positions = max_positions(config) + _SPARE_POSITIONS
    dtype = weights_dtype(spec.model)
    per_token = _kv_bytes(config, dtype, spec.layout)
    kv_bytes = spec.scratch_bytes or _SEQUENCES * num_positions * per_token
    return Settings(config.to_dict(), dtype, kv_bytes, num_positions, tp, pp)


def _check_divides(axis: str, size: int, number: int, label: str) -> None:
    if number % size:
        raise CallerError(
            f"the model's {number} {label} cannot be split evenly over layout.{axis} = {size}",
            code=Code.FAILED_PRECONDITION,
            field=f"layout.{axis}",
            remedy=f"use a divisor of {number}",
        )


def _kv_bytes(config: Any, dtype: str, layout: Layout) -> int:
    """Return the KV cache bytes of one token, over the layers and heads of a rank."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = max(1, heads // layout.tp)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers // layout.pp
    return 2 * int(layers * heads * size) * TORCH_DTYPES[dtype].itemsize
