"""Shapes the distribution that a token is drawn from, by the parameters of a request.

The steps and their order are those of vLLM. Bad words and penalties change the logits. Then, at
temperature 0, the likeliest token is taken. Otherwise the temperature divides the logits, and
min-p, top-k and top-p exclude tokens. A row's distribution depends on its own tokens only.
Log-probabilities in results are the model's own, before any of this.

Shapes: R rows of a request, B ≤ R of them still in the decoder's batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.operations import SamplingParams

_GREEDY_BELOW = 1e-5
"""A smaller temperature counts as 0, as in vLLM: dividing by it would overflow."""
_HOTTEST = 1e30
"""A higher temperature counts as this one: both draw uniformly, but dividing by infinity would turn
an excluded token's -inf into NaN."""


def temperature_of(params: SamplingParams) -> float:
    """Return the temperature to draw at; 0 stands for taking the likeliest token."""
    return 0.0 if params.temperature < _GREEDY_BELOW else min(params.temperature, _HOTTEST)


def is_plain(params: SamplingParams) -> bool:
    """Return whether only the temperature shapes the distribution."""
    return not (_penalises(params) or params.bad_words or _leaves_out(params))


def check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    """Check the bad words of a request.

    Raises: CallerError: a token id is outside the vocabulary, or all tokens could be excluded.
    """
    for i, word in enumerate(params.bad_words):
        for token in word:
            if not 0 <= token < vocab_size:
                raise CallerError(
                    f"token id {token} is outside the vocabulary of {vocab_size} tokens",
                    field=f"args.sampling.bad_words[{i}]",
                    remedy=f"use ids from 0 to {vocab_size - 1}",
                )
    if len({word[-1] for word in params.bad_words}) >= vocab_size:
        raise CallerError(
            "the bad words could exclude every token of the vocabulary",
            field="args.sampling.bad_words",
            remedy="keep at least one token that ends none of them",
        )


class Shaping:
    """The tokens of a request's rows so far that its parameters depend on."""

    def __init__(
        self,
        params: SamplingParams,
        prompts: Seq[Seq[int]],
        generated: Seq[Seq[int]],
        vocab_size: int,
    ) -> None:
        """Args: prompts: the prompt of each row.
        generated: the tokens that each row has already."""
        self._params = params
        self._is_penalised = _penalises(params)
        num_rows = len(prompts)
        self._outputs = [list(tokens) for tokens in generated]
        if self._is_penalised:
            self._is_in_prompt_RV = torch.zeros(num_rows, vocab_size, dtype=torch.bool)
            self._counts_RV = torch.zeros(num_rows, vocab_size)
            for row, (prompt, earlier) in enumerate(zip(prompts, generated, strict=True)):
                self._is_in_prompt_RV[row, list(prompt)] = True
                for token in earlier:
                    self._counts_RV[row, token] += 1

    def add(self, rows: Seq[int], tokens: Seq[int]) -> None:
        """Record that each of these rows has got a token."""
        for row, token in zip(rows, tokens, strict=True):
            self._outputs[row].append(token)
            if self._is_penalised:
                self._counts_RV[row, token] += 1

    def draw(
        self, rows_B: torch.Tensor, logits_BV: torch.Tensor, draws_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens (B,) at these uniforms. Returns: as `with_logprobs`."""
        raw_BV = logits_BV.float()
        logprobs_BV = torch.log_softmax(raw_BV, dim=-1)
        shaped_BV = self._shaped(rows_B, raw_BV)
        temperature = temperature_of(self._params)
        if temperature == 0:
            tokens_B = shaped_BV.argmax(dim=-1)
        else:
            kept_BV = _filtered(shaped_BV / temperature, self._params)
            tokens_B = inverted(torch.softmax(kept_BV, dim=-1), draws_B)
        return with_logprobs(tokens_B, logprobs_BV)

    def _shaped(self, rows_B: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        params, shaped_BV = self._params, logits_BV.clone()
        for i, row in enumerate(rows_B.tolist()):
            for word in params.bad_words:
                # Only the last token of a bad word is excluded, once all others precede it.
                if _ends_with(self._outputs[row], word[:-1]):
                    shaped_BV[i, word[-1]] = -torch.inf
        if self._is_penalised:
            counts_BV = self._counts_RV[rows_B]
            is_output_BV = counts_BV > 0
            is_seen_BV = self._is_in_prompt_RV[rows_B] | is_output_BV
            factor = params.repetition_penalty
            repeated_BV = torch.where(shaped_BV > 0, shaped_BV / factor, shaped_BV * factor)
            shaped_BV = torch.where(is_seen_BV, repeated_BV, shaped_BV)
            shaped_BV = shaped_BV - params.frequency_penalty * counts_BV
            shaped_BV = shaped_BV - params.presence_penalty * is_output_BV
        return shaped_BV


def inverted(probabilities_BV: torch.Tensor, draws_B: torch.Tensor) -> torch.Tensor:
    """Return each row's first token whose cumulative probability exceeds draw × total. The
    comparison is strict, so a token of probability 0 is never drawn. A row whose probabilities are
    NaN gets V, which is no token."""
    cdf_BV = probabilities_BV.double().cumsum(dim=-1)
    threshold_B = draws_B * cdf_BV[:, -1]
    return torch.searchsorted(cdf_BV, threshold_B[:, None], right=True).flatten()


def with_logprobs(
    tokens_B: torch.Tensor, logprobs_BV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens with the model's log-probabilities of them.

    A row whose numbers are not finite gets a valid token with a log-probability that is not finite.
    """
    last = logprobs_BV.shape[-1] - 1
    is_token_B = tokens_B <= last
    tokens_B = tokens_B.clamp(max=last)
    picked_B = logprobs_BV.gather(-1, tokens_B[:, None]).flatten()
    return tokens_B, picked_B.where(is_token_B, torch.nan)


def _filtered(logits_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set the logits that min-p, top-k or top-p exclude to -inf. The likeliest token always
    stays."""
    if params.min_p > 0:
        probabilities_BV = torch.softmax(logits_BV, dim=-1)
        least_B1 = probabilities_BV.amax(dim=-1, keepdim=True) * params.min_p
        logits_BV = logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
    if 0 < params.top_k < logits_BV.shape[-1]:
        # Tokens that tie with the k-th one stay too.
        last_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < last_B1, -torch.inf)
    if params.top_p < 1:
        # Ascending, so the cumulative sum at a token covers it and all less likely ones.
        sorted_BV, index_BV = logits_BV.sort(dim=-1, stable=True)
        is_out_BV = torch.softmax(sorted_BV, dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        is_out_BV[:, -1] = False
        sorted_BV = sorted_BV.masked_fill(is_out_BV, -torch.inf)
        logits_BV = torch.empty_like(sorted_BV).scatter_(-1, index_BV, sorted_BV)
    return logits_BV


def _ends_with(tokens: Seq[int], end: Seq[int]) -> bool:
    return not end or list(tokens[-len(end) :]) == list(end)


def _penalises(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _leaves_out(params: SamplingParams) -> bool:
    return (params.top_k, params.top_p, params.min_p) != (0, 1.0, 0.0)
