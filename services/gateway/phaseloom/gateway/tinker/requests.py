"""The requests of the Tinker API: what the SDK sends, as far as it is read here."""

from __future__ import annotations

from typing import Any

import msgspec

from phaseloom.client import Adapter, CallerError
from phaseloom.common.contract.checks import MAX_TOP_LOGPROBS
from phaseloom.gateway.core import convert
from phaseloom.gateway.sampling import check_samples


class Loose(msgspec.Struct, frozen=True):
    """A request. Fields that it does not name are ignored."""


class CreateSession(Loose, frozen=True):
    user_metadata: dict[str, Any] | None = None


class OfSession(Loose, frozen=True):
    session_id: str


class LoraConfig(Loose, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def adapter(self) -> Adapter | None:
        """The adapter to train; None: the rank is 0, which trains all weights.

        Raises: CallerError: the rank is negative, or no layer is trained.
        """
        if self.rank == 0:
            return None
        if self.rank < 0 or not (self.train_attn or self.train_mlp or self.train_unembed):
            raise CallerError(
                f"nothing is trained by {self}",
                field="lora_config",
                remedy="use a rank of 1 or more and some layers, or rank=0 to train all weights",
            )
        targets = (
            *(ATTENTION if self.train_attn else ()),
            *(MLP if self.train_mlp else ()),
            *(UNEMBED if self.train_unembed else ()),
        )
        return Adapter(self.rank, seed=self.seed or 0, targets=targets)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = ("lm_head",)


class CreateModel(Loose, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    user_metadata: dict[str, Any] | None = None


class OfModel(Loose, frozen=True):
    model_id: str


class OptimStep(Loose, frozen=True):
    model_id: str
    seq_id: int
    adam_params: dict[str, float | None]


class SaveWeights(Loose, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class LoadWeights(Loose, frozen=True):
    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Loose, frozen=True):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class Sample(Loose, frozen=True):
    sampling_session_id: str
    seq_id: int
    prompt: convert.ModelInput
    sampling_params: convert.SampleParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None

    def check(self) -> None:
        """Check that all that is asked for can be answered.

        Raises: CallerError: something cannot; names the field.
        """
        check_samples(self.num_samples)
        for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(self, field) <= MAX_TOP_LOGPROBS:
                raise CallerError(
                    f"the {getattr(self, field)} likeliest tokens are not answered",
                    field=field,
                    remedy=f"use 0 to {MAX_TOP_LOGPROBS}",
                )
        for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, field):
                raise CallerError(
                    f"{field} is not answered here",
                    field=field,
                    remedy="leave it out; topk_prompt_logprobs has the likeliest tokens",
                )


class RetrieveFuture(Loose, frozen=True):
    request_id: str


class OfPath(Loose, frozen=True):
    tinker_path: str = ""
    path: str = ""
