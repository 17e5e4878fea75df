"""Simulates the time that decoding takes on a device, for benchmarks of scheduling.

The model's config sets it under `decode`:

  {"step_s": 0.004, "row_s": 0.00002, "prompt_token_s": 0.0001, "mean_tokens": 250}

Prefill takes `prompt_token_s` per prompt token. Each step then adds a token to every open row: it
takes `step_s` for reading the weights, plus `row_s` per row. A row's number of new tokens is drawn
by (seed, sample) with the mean `mean_tokens`, as if it ended with the same probability at each
token. All tokens are 0. Waiting uses no CPU time, so emulated devices do not slow each other down.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from phaseloom.common.contract.arrays import length
from phaseloom.common.contract.continuation import PARTIAL
from phaseloom.common.contract.operations import (
    DrawnTokens,
    Generate,
    GenerateResult,
    Sequence,
)
from phaseloom.worker.backends.base import Watch, nothing


class Decoding(msgspec.Struct, frozen=True):
    step_s: float
    row_s: float = 0.0
    prompt_token_s: float = 0.0
    mean_tokens: float = 100.0


@dataclass(slots=True)
class _Row:
    num_new: int
    """Number of new tokens until the row ends."""
    is_at_limit: bool
    done: int = 0
    num_reported: int = 0
    is_partial: bool = False

    @property
    def is_open(self) -> bool:
        return self.done < self.num_new and not self.is_partial

    def sequence(self) -> Sequence:
        reason = PARTIAL if self.is_partial else "length" if self.is_at_limit else "stop"
        return Sequence(bytes(4 * self.done), bytes(4 * self.done), reason)


def decode(
    decoding: Decoding,
    requests: Seq[Generate],
    watch: Watch,
    at_boundary: Callable[[], None] = nothing,
) -> None:
    """Decode requests together, as slowly as a device would."""
    rows = [_rows(decoding, args) for args in requests]
    num_prompt = sum(length(prompt.tokens) for args in requests for prompt in args.prompts)
    time.sleep(decoding.prompt_token_s * num_prompt)
    if num_prompt:
        watch.stepped(num_prompt)
    waiting = dict(enumerate(rows))
    num_open = {i: len(request_rows) for i, request_rows in waiting.items()}
    while waiting:
        for i, request_rows in [*waiting.items()]:
            is_cancelled = watch.is_cancelled(i)
            if is_cancelled or watch.is_stopped(i):
                for row in request_rows:
                    row.is_partial = row.is_open
            num_open_rows = sum(row.is_open for row in request_rows)
            if requests[i].stream and (not num_open_rows or watch.wants_tokens(i)):
                watch.drawn(i, _new_tokens(requests[i], request_rows))
            if num_open_rows < num_open[i]:
                num_open[i] = num_open_rows
                watch.still_open(i, num_open_rows)
            if not num_open_rows:
                del waiting[i]
                watch.ended(i, None if is_cancelled else _result(requests[i], request_rows))
        live = [row for request_rows in waiting.values() for row in request_rows if row.is_open]
        if live:
            time.sleep(decoding.step_s + decoding.row_s * len(live))
            watch.stepped(len(live))
            at_boundary()
        for row in live:
            row.done += 1


def _rows(decoding: Decoding, args: Generate) -> list[_Row]:
    """Return a request's rows, in the order of prompts and samples."""
    limit, rate = args.sampling.max_tokens, 1 / decoding.mean_tokens
    rows = []
    for prompt in args.prompts:
        for sample in range(prompt.sample, prompt.sample + args.num_samples):
            length = random.Random(f"{prompt.seed}/{sample}").expovariate(rate)
            num_tokens = min(limit, 1 + int(length))
            rows.append(_Row(num_tokens - prompt.num_generated, num_tokens == limit))
    return rows


def _new_tokens(args: Generate, rows: list[_Row]) -> list[DrawnTokens]:
    """Return the tokens that a request's rows have got since the last report."""
    tokens = []
    for k, row in enumerate(rows):
        start, row.num_reported = row.num_reported, row.done
        if start < row.done:
            zeroes = bytes(4 * (row.done - start))
            prompt, sample = divmod(k, args.num_samples)
            tokens.append(DrawnTokens(prompt, sample, start, zeroes, zeroes))
    return tokens


def _result(args: Generate, rows: list[_Row]) -> GenerateResult:
    sequences = [row.sequence() for row in rows]
    size = args.num_samples
    return GenerateResult([sequences[i : i + size] for i in range(0, len(sequences), size)])
