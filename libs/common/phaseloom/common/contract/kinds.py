"""The table of operation kinds: how each one affects the state, and how it is checked, split and
merged.

Router, client, scheduler and worker read `KINDS`. Only the code that runs a kind knows more about
it: the backends and, for kinds that move state, modules of the worker. To add a kind that moves no
state, add a pair of messages in `contract.operations`, an entry here, a method of a backend, and a
method of the client's `Deployment`.

All functions are pure. This module knows nothing about layouts: it splits an operation into a given
number of parts and merges the results of the parts, given in order.
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
"""Maximum bytes of a token in a result: int32, or ten digits and a comma."""
FLOAT_BYTES = {MSGPACK: 4, JSON: 24}
"""Maximum bytes of a log-probability in a result: float32, or 17 digits, sign, point, exponent and
comma."""
_SEQUENCE_BYTES = 64
_ARRAY_BYTES = 8


class Gradients(Enum):
    """How a kind affects the gradients that accumulate between two optimizer steps."""

    NONE = auto()
    ADDS = auto()
    USES = auto()
    """The kind consumes the gradients, so that none remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[A, R]):
    """One kind of operation. The defaults suit a kind without batch data that a backend runs."""

    args: type[A]
    result: type[R]
    is_mutating: bool
    """Whether it changes the deployment's state. A mutating kind needs a `seq`, runs alone, and
    counts towards seals and rebuilds. All other kinds only read and may run concurrently."""
    moves_state: bool = False
    """Whether ranks and state managers run it instead of a backend, as for checkpoints and weights
    versions. Every backend that lists such a kind supports it."""
    replaces_state: bool = False
    """Whether it overwrites the whole state, so that a rebuild can start at the last such
    operation."""
    gradients: Gradients = Gradients.NONE
    shares_calls: bool = False
    """Whether a backend runs several operations of the kind in one call. Such a call reports
    progress and can be cancelled between two tokens."""
    check: Callable[[OperationKey, A], None] = lambda key, args: None
    """Checks the arguments. Raises: CallerError: no deployment could run the operation; the error
    names the field and the remedy."""
    items: str = ""
    """The list argument along which an operation is split, over replicas and over messages. Empty:
    it is never split, and every rank gets the whole operation."""
    item_tokens: Callable[[A], list[int]] = lambda args: []
    """Upper bound on the number of tokens of each item, including generated tokens."""
    num_tokens: Callable[[A, R], int] | None = None
    """Number of tokens that it processed, computed from its result. None: the sum of
    `item_tokens`."""
    result_bytes: Callable[[A, str], int] = lambda args, content_type: 0
    """Upper bound of the result's size in this content type, without the envelope. 0: the result is
    small."""
    merge: Callable[[Sequence[R]], R] | None = None
    """Merges the results of the parts, given in order. None: there is a single result, on which all
    ranks must agree."""
    as_lists: Callable[[R], R] = lambda result: result
    """Returns the result with lists instead of packed arrays, for JSON and for controllers."""

    @property
    def name(self) -> str:
        """The name of the kind in headers, spans, traces and on the wire."""
        return str(self.args.__struct_config__.tag)

    @property
    def trains(self) -> bool:
        """Whether it needs a trainable deployment."""
        return self.gradients is not Gradients.NONE

    @property
    def ends_gradients(self) -> bool:
        """Whether it discards or consumes all gradients accumulated before it."""
        return self.replaces_state or self.gradients is Gradients.USES

    def max_num_tokens(self, args: A) -> int:
        return sum(self.item_tokens(args))

    def num_tokens_done(self, args: A, result: R) -> int:
        return self.num_tokens(args, result) if self.num_tokens else self.max_num_tokens(args)

    def split(self, requests: Sequence[A], num_parts: int, part: int) -> list[A]:
        """Return one part of several operations of this kind that run together.

        The items of all operations are balanced by tokens as if they were one list, so that many
        one-item operations keep all replicas busy. A part is a contiguous range, so that samples of
        the same prompt stay together. A part may be empty.
        """
        if not self.items:
            return [*requests]
        ranges = self.item_ranges(requests, num_parts, part)
        return [
            replace(
                args, **{self.items: getattr(args, self.items)[item_range.start : item_range.stop]}
            )
            for args, item_range in zip(requests, ranges, strict=True)
        ]

    def item_ranges(self, requests: Sequence[A], num_parts: int, part: int) -> list[range]:
        """Return, for each operation, the index range of the items that `split` assigns to this
        part."""
        tokens = [num for args in requests for num in self.item_tokens(args)]
        share = balanced(tokens, num_parts)[part]
        counts = [len(getattr(args, self.items)) for args in requests]
        starts = accumulate(counts, initial=0)
        return [
            range(max(0, share.start - start), min(count, max(0, share.stop - start)))
            for count, start in zip(counts, starts, strict=False)
        ]


def balanced(costs: Sequence[int], parts: int) -> list[range]:
    """Split a list into `parts` contiguous ranges of about equal cost. Ranges may be empty.

    Each item goes to the part that contains its midpoint. So the cost of a range exceeds an equal
    share by at most the cost of the most expensive item.
    """
    total = sum(costs) or 1
    ends = accumulate(costs)
    # Midpoints times two, to stay in integers.
    middles = (2 * end - cost for end, cost in zip(ends, costs, strict=True))
    part_of = [min(parts - 1, middle * parts // (2 * total)) for middle in middles]
    counts = [part_of.count(part) for part in range(parts)]
    stops = accumulate(counts)
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


MAX_NONFINITE = 16
"""Tensors that an `optim_step` names as not finite."""


def merge_metrics(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of all parts. The suffix of a name is its reduction: `loss:sum`,
    `norm:mean`, …

    `sum` adds the values of the parts. `max` and `min` consider the parts that report the metric.
    `mean` weighs all parts equally, so a backend may report such a metric only if all ranks compute
    the same value.

    Raises: InternalError: a metric has another reduction.
    """
    names = dict.fromkeys(chain.from_iterable(metrics))
    return {
        name: _reduced(name, [part[name] for part in metrics if name in part]) for name in names
    }


def _reduced(name: str, values: list[float]) -> float:
    # Equal values need no reduction, and their mean could differ in the last bit.
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
    raise InternalError(f"metric {name!r} has no known reduction suffix")


def concatenate(parts: Iterable[Sequence[T]]) -> list[T]:
    return [*chain.from_iterable(parts)]


# --- Batches: `forward`, `forward_backward` and other kinds that process samples ------------------


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
        concatenate(part.sequences for part in parts),
        concatenate(part.prompt_logprobs for part in parts),
        concatenate(part.prompt_top_tokens for part in parts),
        concatenate(part.prompt_top_logprobs for part in parts),
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
        merge=lambda parts: ops.ForwardResult(concatenate(part.logprobs for part in parts)),
        as_lists=lambda result: ops.ForwardResult(
            [float32s(logprobs) for logprobs in result.logprobs]
        ),
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
            concatenate(part.logprobs for part in parts),
        ),
        as_lists=lambda result: ops.ForwardBackwardResult(
            result.metrics, [float32s(logprobs) for logprobs in result.logprobs]
        ),
    ),
    Kind(
        args=ops.OptimStep,
        result=ops.OptimStepResult,
        is_mutating=True,
        gradients=Gradients.USES,
        check=checks.check_optim_step,
        merge=lambda parts: ops.OptimStepResult(
            merge_metrics([part.metrics for part in parts]),
            # Each rank names the tensors of which it holds a slice.
            sorted({name for part in parts for name in part.nonfinite_weights})[:MAX_NONFINITE],
        ),
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
    """Return the result with lists instead of packed arrays, for JSON and for controllers."""
    unpacked: ops.Result = KINDS[ops.result_kind(result)].as_lists(result)
    return unpacked
