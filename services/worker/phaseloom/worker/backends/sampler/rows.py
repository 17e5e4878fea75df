"""The tokens of a batch of rows: drawing them, and deciding when each row ends.

Rows of several requests decode together. A row's draws and its end depend only on its own request.
Which rows are still in the decoder's batch affects the cost and nothing else.

Shapes: R rows of all requests, B ≤ R rows still in the decoder's batch, I positions of new tokens,
V vocabulary, Q requests of the call.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from phaseloom.common.contract.operations import DrawnTokens, SamplingParams, Sequence
from phaseloom.common.text.parts import StopText
from phaseloom.worker.backends.base import NONFINITE
from phaseloom.worker.backends.rng import uniforms
from phaseloom.worker.backends.shaping import (
    Shaping,
    inverted,
    is_plain,
    temperature_of,
    with_logprobs,
)


@dataclass(frozen=True)
class Start:
    """The starting point of a prompt's samples."""

    seed: int
    sample: int
    """Number of the first sample."""
    prompt: list[int]
    """The prompt's tokens, without those generated earlier."""
    generated: list[int]
    """Tokens of an earlier answer, which the samples continue."""


@dataclass(frozen=True)
class Sampling:
    """The parameters of one request of the call."""

    request: int
    """Index of the request in the call."""
    first_prompt: int
    """Index, in the request, of its first prompt in this batch."""
    starts: list[Start]
    """One for each of its prompts in this batch, in order."""
    num_samples: int
    max_tokens: int
    """Maximum number of tokens of a sample, including those generated earlier."""
    params: SamplingParams
    stop_token_ids: list[int]
    """All tokens that end a sample."""
    stop_texts: Seq[StopText | None]
    """The matcher of stop strings for each row; None if the request has none."""

    @property
    def num_rows(self) -> int:
        return len(self.starts) * self.num_samples

    @property
    def limits(self) -> list[int]:
        """Most new tokens of each row."""
        limits = [self.max_tokens - len(start.generated) for start in self.starts]
        return [limit for limit in limits for _ in range(self.num_samples)]

    def draws(self, num_positions: int) -> torch.Tensor:
        """Return the uniform draws for each row's new tokens: (rows, num_positions) float64."""
        seeds = [start.seed for start in self.starts]
        samples = [start.sample for start in self.starts]
        positions = [len(start.generated) for start in self.starts]
        uniform_draws = uniforms(seeds, self.num_samples, num_positions, samples, positions)
        return torch.from_numpy(uniform_draws).flatten(0, 1)


class EndedRow(NamedTuple):
    """A row that has ended and is still in the decoder's batch."""

    place: int
    """Index of the row in the batch."""
    row: int
    """Index of the row among all rows."""
    tokens: list[int]
    """All tokens of the row from the prompt's first on, except the last one drawn, which the
    decoder has not run."""


class Rows:
    """The tokens drawn so far. Rows are in the order of requests, prompts and samples."""

    def __init__(self, samplings: Seq[Sampling], vocab_size: int) -> None:
        self._samplings = samplings
        counts = [sampling.num_rows for sampling in samplings]
        self._limit_R = torch.tensor([limit for sampling in samplings for limit in sampling.limits])
        num_rows, limit = sum(counts), int(self._limit_R.max())
        self._sampling_R = torch.arange(len(samplings)).repeat_interleave(torch.tensor(counts))
        self._draws_RI = torch.zeros(num_rows, limit, dtype=torch.float64)
        self._is_stop_QV = torch.zeros(len(samplings), vocab_size, dtype=torch.bool)
        self._shapings = [_shaping(sampling, vocab_size) for sampling in samplings]
        self._temperatures = sorted({temperature_of(sampling.params) for sampling in samplings})
        which = [self._temperatures.index(temperature_of(s.params)) for s in samplings]
        self._temperature_R = torch.tensor(which)[self._sampling_R]
        self._texts: dict[int, StopText] = {}
        start = 0
        for i, sampling in enumerate(samplings):
            rows = slice(start, start + sampling.num_rows)
            longest = max(sampling.limits)
            self._draws_RI[rows, :longest] = sampling.draws(longest)
            self._is_stop_QV[i, sampling.stop_token_ids] = True
            self._texts |= {
                start + i: text for i, text in enumerate(sampling.stop_texts) if text is not None
            }
            start += sampling.num_rows
        self._tokens_RI = np.zeros((num_rows, limit), dtype="<i4")
        self._logprobs_RI = np.zeros((num_rows, limit), dtype="<f4")
        num_top = min(max(sampling.params.top_logprobs for sampling in samplings), vocab_size)
        self._top_tokens_RIK = np.zeros((num_rows, limit, num_top), dtype="<i4")
        self._top_logprobs_RIK = np.zeros((num_rows, limit, num_top), dtype="<f4")
        # A row that nothing stops ends at its limit.
        self._length_R = self._limit_R.numpy().copy()
        self._stop_reason_R = np.full(num_rows, "length", dtype=object)
        self._rows_B = torch.arange(num_rows)
        self._is_taken_R = torch.zeros(num_rows, dtype=torch.bool)
        """Whether `take_ended_rows` has returned the row, or must never return it."""
        self._live_B = torch.ones(num_rows, dtype=torch.bool)
        self._position = 0
        self._is_open = [True] * len(samplings)
        self._num_reported = [0] * len(samplings)
        """For each request, how many new tokens of its rows `take_new_tokens` has returned."""
        self.last_B = torch.empty(0, dtype=torch.int64)

    @property
    def num_rows(self) -> int:
        """Number of rows still in the decoder's batch."""
        return self._live_B.numel()

    @property
    def num_live_rows(self) -> int:
        return int(self._live_B.sum())

    @property
    def room(self) -> int:
        """Maximum number of further tokens for a row."""
        return self._tokens_RI.shape[1] - self._position

    def num_live(self) -> list[tuple[int, int]]:
        """Return (request, number of live rows) for each request that has live rows."""
        pairs = zip(self._samplings, self._live_counts(), strict=True)
        return [(sampling.request, count) for sampling, count in pairs if count]

    def cancel(self, request: int) -> None:
        """End the rows of a request and discard their tokens."""
        i = self._index(request)
        self._is_open[i] = False
        self._is_taken_R |= self._sampling_R == i
        self._live_B &= self._sampling_R[self._rows_B] != i

    def stop(self, request: int) -> None:
        """End the rows of a request with the tokens that they have."""
        stopped_B = self._live_B & (self._sampling_R[self._rows_B] == self._index(request))
        self._end(stopped_B, "partial")

    def take_ended(self) -> list[tuple[Sampling, list[list[Sequence]]]]:
        """Return the requests whose rows have all ended since the last call, each with its
        sequences by [prompt][sample]."""
        counts = self._live_counts()
        ended = []
        for i, sampling in enumerate(self._samplings):
            if self._is_open[i] and not counts[i]:
                self._is_open[i] = False
                ended.append((sampling, self._sequences(i)))
        return ended

    def take_new_tokens(self, request: int) -> list[DrawnTokens]:
        """Return the tokens that a request's rows have got since the last call; empty if it has no
        rows here."""
        if all(sampling.request != request for sampling in self._samplings):
            return []
        i = self._index(request)
        sampling, start, first = self._samplings[i], self._num_reported[i], self._first_row(i)
        self._num_reported[i] = self._position
        new_tokens = []
        for k in range(sampling.num_rows):
            stop = min(int(self._length_R[first + k]), self._position)
            if start < stop:
                new = self._sequence(sampling, first + k, start, stop)
                prompt, sample = divmod(k, sampling.num_samples)
                new_tokens.append(
                    DrawnTokens(
                        sampling.first_prompt + prompt,
                        sample,
                        start,
                        new.tokens,
                        new.logprobs,
                        new.top_tokens,
                        new.top_logprobs,
                    )
                )
        return new_tokens

    def take_ended_rows(self) -> list[EndedRow]:
        """Return the rows that have ended since the last call, except those of cancelled requests.

        Call it after each token, before `drop_finished`.
        """
        ended_B = ~(self._live_B | self._is_taken_R[self._rows_B])
        self._is_taken_R[self._rows_B[ended_B]] = True
        indices = ended_B.nonzero().flatten()
        return [
            EndedRow(place, row, self._decoded_tokens(row))
            for place, row in zip(indices.tolist(), self._rows_B[indices].tolist(), strict=True)
        ]

    def _decoded_tokens(self, row: int) -> list[int]:
        i = int(self._sampling_R[row])
        start = self._samplings[i].starts[
            (row - self._first_row(i)) // self._samplings[i].num_samples
        ]
        # The decoder has not run the last token drawn, so that one has no keys and values.
        sampled = self._tokens_RI[row, : self._length_R[row] - 1].tolist()
        return [*start.prompt, *start.generated, *sampled]

    def drop_finished(self) -> torch.Tensor:
        """Keep only the live rows. Returns: their indices in the batch."""
        kept_indices = self._live_B.nonzero().flatten()
        self._rows_B = self._rows_B[kept_indices]
        self.last_B = self.last_B[kept_indices]
        self._live_B = self._live_B[kept_indices]
        return kept_indices

    def accept(self, logits_BV: torch.Tensor) -> None:
        """Draw the next token of every row. Finished rows ignore it."""
        self.last_B, logprobs_B = self._draw(logits_BV)
        # Such a row ends without this token. All others go on.
        self._end(self._live_B & ~logprobs_B.isfinite(), NONFINITE)
        live = self._live_B.numpy()
        rows = self._rows_B.numpy()[live]
        tokens = self.last_B.numpy()[live]
        self._tokens_RI[rows, self._position] = tokens
        self._logprobs_RI[rows, self._position] = logprobs_B.numpy()[live]
        self._keep_top(rows, logits_BV)
        self._position += 1
        ends_B = self._is_stop_QV[self._sampling_R[self._rows_B], self.last_B]
        if self._texts:
            ends_B[
                torch.from_numpy(live.nonzero()[0][self._completes_stop_string(rows, tokens)])
            ] = True
        # Finished rows still in the batch draw tokens too, which must not end them again.
        ends_B &= self._live_B
        self._end(ends_B, "stop")
        self._live_B &= self._limit_R[self._rows_B] > self._position

    def _end(self, ends_B: torch.Tensor, reason: str) -> None:
        rows = self._rows_B[ends_B].numpy()
        self._length_R[rows] = self._position
        self._stop_reason_R[rows] = reason
        self._live_B &= ~ends_B

    def _index(self, request: int) -> int:
        return next(i for i, sampling in enumerate(self._samplings) if sampling.request == request)

    def _live_counts(self) -> list[int]:
        """Return each request's number of live rows."""
        if len(self._samplings) == 1:
            return [self.num_live_rows]
        live = self._sampling_R[self._rows_B].numpy()[self._live_B.numpy()]
        counts: list[int] = np.bincount(live, minlength=len(self._samplings)).tolist()
        return counts

    def _sequences(self, i: int) -> list[list[Sequence]]:
        """Return the sequences of a request, by [prompt][sample]."""
        sampling = self._samplings[i]
        first = self._first_row(i)
        rows = iter(range(first, first + sampling.num_rows))
        return [
            [self._sequence(sampling, next(rows)) for _ in range(sampling.num_samples)]
            for _ in sampling.starts
        ]

    def _sequence(
        self, sampling: Sampling, row: int, start: int = 0, stop: int | None = None
    ) -> Sequence:
        """Return the tokens of a row from `start` up to `stop`, or to its end if `stop` is None."""
        new = slice(start, self._length_R[row] if stop is None else stop)
        sequence = Sequence(
            tokens=self._tokens_RI[row, new].tobytes(),
            logprobs=self._logprobs_RI[row, new].tobytes(),
            stop_reason=self._stop_reason_R[row],
        )
        num_top = sampling.params.top_logprobs
        if not num_top:
            return sequence
        return replace(
            sequence,
            top_tokens=self._top_tokens_RIK[row, new, :num_top].tobytes(),
            top_logprobs=self._top_logprobs_RIK[row, new, :num_top].tobytes(),
        )

    def _keep_top(self, rows: npt.NDArray[np.int64], logits_BV: torch.Tensor) -> None:
        """Record the likeliest tokens of the live rows at this position."""
        num_top = self._top_tokens_RIK.shape[-1]
        if num_top:
            logits_LV = logits_BV[self._live_B]
            top = torch.log_softmax(logits_LV.float(), dim=-1).topk(num_top, dim=-1)
            self._top_tokens_RIK[rows, self._position] = top.indices.numpy()
            self._top_logprobs_RIK[rows, self._position] = top.values.numpy()

    def _draw(self, logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draws_B = self._draws_RI[self._rows_B, self._position]
        # The usual case needs a single call for all rows.
        if not any(self._shapings) and len(self._temperatures) == 1:
            return draw(logits_BV, draws_B, *self._temperatures)
        tokens_B = torch.empty(draws_B.shape, dtype=torch.int64)
        logprobs_B = torch.empty(draws_B.shape)
        sampling_B = self._sampling_R[self._rows_B]
        is_plain_B = torch.tensor([shaping is None for shaping in self._shapings])[sampling_B]
        for i, temperature in enumerate(self._temperatures):
            has_temperature_B = (self._temperature_R[self._rows_B] == i) & is_plain_B
            index = has_temperature_B.nonzero().flatten()
            tokens_and_logprobs = draw(logits_BV[index], draws_B[index], temperature)
            tokens_B[index], logprobs_B[index] = tokens_and_logprobs
        for i, shaping in enumerate(self._shapings):
            if shaping is None:
                continue
            index = (sampling_B == i).nonzero().flatten()
            rows_b = self._rows_B[index] - self._first_row(i)
            tokens_and_logprobs = shaping.draw(rows_b, logits_BV[index], draws_B[index])
            tokens_B[index], logprobs_B[index] = tokens_and_logprobs
            shaping.add(rows_b.tolist(), tokens_and_logprobs[0].tolist())
        return tokens_B, logprobs_B

    def _first_row(self, i: int) -> int:
        return sum(before.num_rows for before in self._samplings[:i])

    def _completes_stop_string(
        self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return which rows have completed one of their stop strings with these tokens."""
        ends = np.zeros(rows.size, dtype=np.bool_)
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            text = self._texts.get(row)
            ends[i] = text is not None and text.ends_with(token)
        return ends


def _shaping(sampling: Sampling, vocab_size: int) -> Shaping | None:
    """Return the `Shaping` of a request; None if only the temperature shapes its distribution."""
    if is_plain(sampling.params):
        return None
    starts = [start for start in sampling.starts for _ in range(sampling.num_samples)]
    prompts, generated = [s.prompt for s in starts], [s.generated for s in starts]
    return Shaping(sampling.params, prompts, generated, vocab_size)


def draw(
    logits_BV: torch.Tensor, draws_B: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens (B,) at these uniforms. Temperature 0 takes the likeliest token.

    Returns: as `with_logprobs`.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float(), dim=-1)
    if temperature == 0:
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        scaled_BV = logprobs_BV if temperature == 1 else logprobs_BV / temperature
        tokens_B = inverted(torch.softmax(scaled_BV, dim=-1), draws_B)
    return with_logprobs(tokens_B, logprobs_BV)
