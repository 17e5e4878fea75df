"""The table of operation kinds: the effect of each on the state, and how it is checked, cut and
merged.

Router, client, scheduler and worker read `KINDS`. Only the code that runs a kind knows more about
it: its backends and, for kinds that move state, modules of the worker. A new kind that moves no
state is a pair of messages in `contract.operations`, an entry here, a method of a backend, and a
method of the client's `Deployment`.

Pure functions. Nothing here knows a layout: an operation is cut into a number of parts, and the
results of the parts, in their order, are merged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from phaseloom.common.contract import checks
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.arrays import float32s, int32s, length
from phaseloom.common.contract.codec import JSON, MSGPACK, Message
from phaseloom.common.contract.errors import InternalError
from phaseloom.common.contract.ids import OperationKey

A = TypeVar("A", bound=Message)
R = TypeVar("R", bound=Message)
T = TypeVar("T")

TOKEN_BYTES = {MSGPACK: 4, JSON: 11}
"""Most bytes of a token in a result: int32, or ten digits and a comma."""
FLOAT_BYTES = {MSGPACK: 4, JSON: 24}
"""Most bytes of a log-probability in a result: float32, or 17 digits, sign, point, exponent and a
comma."""
_SEQUENCE_BYTES = 64
_ARRAY_BYTES = 8


class Gradients(Enum):
    """How a kind changes the gradients that accumulate between two steps."""

    NONE = auto()
    ADDS = auto()
    USES = auto()
    """The kind ends the batch: no gradients are left afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[A, R]):
    """One kind of operation. The defaults are those of a kind without data that a backend runs."""

    args: type[A]
    result: type[R]
    is_mutating: bool
    """Whether it changes the deployment's state. Such a kind needs a `seq`, runs alone, and counts
    towards seals and rebuilds. Other kinds read, and run together."""
    moves_state: bool = False
    """Whether ranks and state managers run it, and not a backend: checkpoints and weights versions.
    Every backend that lists such a kind can do it."""
    replaces_state: bool = False
    """Whether nothing of the earlier state is left: a rebuild starts at the last such operation."""
    gradients: Gradients = Gradients.NONE
    shares_calls: bool = False
    """Whether a backend takes several operations of the kind in one call, which is watched: it
    reports progress and can be cancelled between two tokens."""
    check: Callable[[OperationKey, A], None] = lambda key, args: None
    """Checks the arguments. Raises: CallerError: no deployment could run it; names the field and
    the remedy."""
    items: str = ""
    """The list among its arguments along which it is cut, over replicas and over messages. Empty:
    it is never cut, and every rank gets all of it."""
    item_tokens: Callable[[A], list[int]] = lambda args: []
    """The most tokens of each of its items, new ones included."""
    num_tokens: Callable[[A, R], int] | None = None
    """The number of tokens that it worked on, once its result is known. None: the sum of
    `item_tokens`."""
    result_bytes: Callable[[A, str], int] = lambda args, content_type: 0
    """The most bytes of its result in this content type, without the envelope. 0: the result is
    small."""
    merge: Callable[[Sequence[R]], R] | None = None
    """The whole result from the results of its parts, in their order. None: it has a single result,
    on which all ranks must agree."""
    as_lists: Callable[[R], R] = lambda result: result
    """The same result with lists instead of packed arrays, for JSON and for controllers."""

    @property
    def name(self) -> str:
        """The name of the kind in headers, spans, traces and on the wire."""
        return str(self.args.__struct_config__.tag)

    @property
    def trains(self) -> bool:
        """Whether only a trainable deployment can run it."""
        return self.gradients is not Gradients.NONE

    @property
    def ends_gradients(self) -> bool:
        """Whether gradients that were accumulated before it have no effect any more."""
        return self.replaces_state or self.gradients is Gradients.USES

    def num_tokens_at_most(self, args: A) -> int:
        return sum(self.item_tokens(args))

    def num_tokens_done(self, args: A, result: R) -> int:
        return self.num_tokens(args, result) if self.num_tokens else self.num_tokens_at_most(args)

    def cut(self, requests: Sequence[A], num_parts: int, part: int) -> list[A]:
        """One part of several operations of this kind that run together.

        Their items are balanced by tokens as those of one operation are, so that many operations of
        one item each keep all replicas busy. A part is a run of neighbours, so that samples which
        continue one prompt stay together. A part may be empty.
        """
        if not self.items:
            return [*requests]
        runs = self.runs(requests, num_parts, part)
        return [
            replace(args, **{self.items: getattr(args, self.items)[run.start : run.stop]})
            for args, run in zip(requests, runs, strict=True)
        ]

    def runs(self, requests: Sequence[A], num_parts: int, part: int) -> list[range]:
        """The places of the items that `cut` leaves each operation in this part."""
        tokens = [num for args in requests for num in self.item_tokens(args)]
        share = balanced(tokens, num_parts)[part]
        counts = [len(getattr(args, self.items)) for args in requests]
        starts = accumulate(counts, initial=0)
        return [
            range(max(0, share.start - start), min(count, max(0, share.stop - start)))
            for count, start in zip(counts, starts, strict=False)
        ]


def balanced(costs: Sequence[int], parts: int) -> list[range]:
    """Cut neighbours into `parts` runs of about equal cost; runs may be empty.

    Each item goes where its middle falls, so no run's cost exceeds an equal part by more than the
    dearest item's.
    """
    total = sum(costs) or 1
    ends = accumulate(costs)
    middles = (2 * end - cost for end, cost in zip(ends, costs, strict=True))
    part_of = [min(parts - 1, middle * parts // (2 * total)) for middle in middles]
    counts = [part_of.count(part) for part in range(parts)]
    stops = accumulate(counts)
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def merge_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of all parts, each reduced as the end of its name says: `loss:sum`, `norm:mean`,
    …

    `sum` adds up over the parts; `max` and `min` are taken over the parts that report the metric;
    for `mean` each part counts once, so a backend reports one only where all ranks know the same
    value.

    Raises: InternalError: a metric with another reduction.
    """
    names = dict.fromkeys(chain.from_iterable(metrics))
    return {
        name: _reduced(name, [each[name] for each in metrics if name in each]) for name in names
    }


def _reduced(name: str, values: list[float]) -> float:
    if len(set(values)) == 1 and not name.endswith(":sum"):
        return values[0]
    match name.rpartition(":")[2]:
        case "sum":
            return math.fsum(values)
        case "mean":
            return math.fsum(values) / len(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
    raise InternalError(f"metric {name!r} names no known reduction")


def joined(parts: Iterable[Sequence[T]]) -> list[T]:
    return [*chain.from_iterable(parts)]


# --- Batches: `forward`, `forward_backward` and whatever else works on samples --------------------


def batch_tokens(args: ops.Forward | ops.ForwardBackward) -> list[int]:
    return [length(datum.tokens) for datum in args.batch]


def scored_bytes(args: ops.Forward | ops.ForwardBackward, content_type: str) -> int:
    counts = (length(datum.tokens) * datum.num_targets for datum in args.batch)
    return sum(num * FLOAT_BYTES[content_type] + _ARRAY_BYTES for num in counts)


# --- `generate` ----------------------------------------------------------------------------------


def _generate_tokens(args: ops.Generate) -> list[int]:
    new = args.sampling.max_tokens
    return [args.num_samples * (length(prompt.tokens) + new) for prompt in args.prompts]


def _generated_tokens(args: ops.Generate, result: ops.GenerateResult) -> int:
    new = sum(length(s.tokens) for group in result.sequences for s in group)
    return new + sum(length(prompt.tokens) for prompt in args.prompts)


def _generated_bytes(args: ops.Generate, content_type: str) -> int:
    number = FLOAT_BYTES[content_type]
    token = (1 + args.sampling.top_logprobs) * (TOKEN_BYTES[content_type] + number)
    sequence = args.sampling.max_tokens * token + _SEQUENCE_BYTES
    if args.sampling.top_logprobs:
        sequence += _SEQUENCE_BYTES
    num_bytes = len(args.prompts) * args.num_samples * sequence
    if args.prompt_logprobs:
        prompt_token = number + args.prompt_top_logprobs * (TOKEN_BYTES[content_type] + number)
        num_bytes += sum(length(p.tokens) * prompt_token + 3 * _ARRAY_BYTES for p in args.prompts)
    return num_bytes


def _generated(parts: Sequence[ops.GenerateResult]) -> ops.GenerateResult:
    return ops.GenerateResult(
        joined(part.sequences for part in parts),
        joined(part.prompt_logprobs for part in parts),
        joined(part.prompt_top_tokens for part in parts),
        joined(part.prompt_top_logprobs for part in parts),
        merge_metrics([part.metrics for part in parts]),
    )


def _as_lists(result: ops.GenerateResult) -> ops.GenerateResult:
    return ops.GenerateResult(
        [[_listed(sequence) for sequence in group] for group in result.sequences],
        [float32s(values) for values in result.prompt_logprobs],
        [int32s(tokens) for tokens in result.prompt_top_tokens],
        [float32s(values) for values in result.prompt_top_logprobs],
        result.metrics,
    )


def _listed(sequence: ops.Sequence) -> ops.Sequence:
    return ops.Sequence(
        int32s(sequence.tokens),
        float32s(sequence.logprobs),
        sequence.stop_reason,
        int32s(sequence.top_tokens),
        float32s(sequence.top_logprobs),
    )


# --- The table -----------------------------------------------------------------------------------

_TABLE: tuple[Kind[Any, Any], ...] = (
    Kind(
        args=ops.Generate,
        result=ops.GenerateResult,
        is_mutating=False,
        shares_calls=True,
        check=checks.check_generate,
        items="prompts",
        item_tokens=_generate_tokens,
        num_tokens=_generated_tokens,
        result_bytes=_generated_bytes,
        merge=_generated,
        as_lists=_as_lists,
    ),
    Kind(
        args=ops.Forward,
        result=ops.ForwardResult,
        is_mutating=False,
        check=checks.check_forward,
        items="batch",
        item_tokens=batch_tokens,
        result_bytes=scored_bytes,
        merge=lambda parts: ops.ForwardResult(joined(part.logprobs for part in parts)),
        as_lists=lambda result: ops.ForwardResult([float32s(each) for each in result.logprobs]),
    ),
    Kind(
        args=ops.ForwardBackward,
        result=ops.ForwardBackwardResult,
        is_mutating=True,
        gradients=Gradients.ADDS,
        check=checks.check_forward_backward,
        items="batch",
        item_tokens=batch_tokens,
        result_bytes=lambda args, form: scored_bytes(args, form) if args.logprobs else 0,
        merge=lambda parts: ops.ForwardBackwardResult(
            merge_metrics([part.metrics for part in parts]),
            joined(part.logprobs for part in parts),
        ),
        as_lists=lambda result: ops.ForwardBackwardResult(
            result.metrics, [float32s(each) for each in result.logprobs]
        ),
    ),
    Kind(
        args=ops.OptimStep,
        result=ops.OptimStepResult,
        is_mutating=True,
        gradients=Gradients.USES,
        check=checks.check_optim_step,
        merge=lambda parts: ops.OptimStepResult(merge_metrics([part.metrics for part in parts])),
    ),
    Kind(
        args=ops.SaveState,
        result=ops.SaveStateResult,
        is_mutating=False,
        moves_state=True,
        check=checks.check_save_state,
    ),
    Kind(
        args=ops.DeleteCheckpoint,
        result=ops.DeleteCheckpointResult,
        is_mutating=False,
        moves_state=True,
        check=checks.check_delete_checkpoint,
    ),
    Kind(
        args=ops.LoadState,
        result=ops.LoadStateResult,
        is_mutating=True,
        moves_state=True,
        replaces_state=True,
        check=checks.check_load_state,
    ),
    Kind(
        args=ops.PublishWeights,
        result=ops.PublishWeightsResult,
        is_mutating=True,
        moves_state=True,
        check=checks.check_publish_weights,
    ),
    Kind(
        args=ops.SyncWeights,
        result=ops.SyncWeightsResult,
        is_mutating=True,
        moves_state=True,
        replaces_state=True,
        check=checks.check_sync_weights,
    ),
)

KINDS: dict[str, Kind[Any, Any]] = {kind.name: kind for kind in _TABLE}
MUTATING_KINDS = frozenset(name for name, kind in KINDS.items() if kind.is_mutating)
READING_KINDS = frozenset(KINDS) - MUTATING_KINDS


def kind_for(args: ops.Args) -> Kind[Any, Any]:
    return KINDS[ops.kind_of(args)]


def as_lists(result: ops.Result) -> ops.Result:
    """The same result with lists instead of packed arrays, for JSON and for controllers."""
    unpacked: ops.Result = KINDS[ops.result_kind(result)].as_lists(result)
    return unpacked
