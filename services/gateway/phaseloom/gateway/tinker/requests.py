"""The requests of the Tinker API, with the fields that the gateway reads."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec.structs import replace

from phaseloom.client import Adapter, CallerError
from phaseloom.common.contract.checks import MAX_TOP_LOGPROBS
from phaseloom.common.contract.specs import ALL_ATTENTION, ALL_MLP, UNEMBED
from phaseloom.gateway.core import convert
from phaseloom.gateway.core.bodies import check_short, decoded
from phaseloom.gateway.sampling import check_samples

_LEAST_SDK = (0, 25)
"""Oldest supported version of the SDK."""
_MAX_NAME_CHARS = 256
"""Maximum characters of a session's name."""


class Loose(msgspec.Struct, frozen=True):
    """A request. Unknown fields are ignored."""


class CreateSession(Loose, frozen=True):
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    sdk_version: str | None = None

    def check(self) -> None:
        """Raises: CallerError: the name is too long, or the SDK too old."""
        number = re.match(r"(\d{1,9})\.(\d{1,9})", self.sdk_version or "", re.ASCII)
        if number is not None and (int(number[1]), int(number[2])) < _LEAST_SDK:
            raise CallerError(
                f"version {(self.sdk_version or '')[:_MAX_NAME_CHARS]} of the Tinker SDK is not "
                "supported: its messages have another form",
                field="sdk_version",
                remedy="pip install 'tinker>=0.25'",
            )
        if len(self.display_name or "") > _MAX_NAME_CHARS:
            raise CallerError(
                "the session's name is too long",
                field="display_name",
                remedy=f"use at most {_MAX_NAME_CHARS} characters",
            )


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
        """The adapter to train. None: the rank is 0, which trains all weights.

        Raises: CallerError: the rank is negative, or no layer is trained.
        """
        if self.rank == 0:
            return None
        if self.rank < 0 or not (self.train_attn or self.train_mlp or self.train_unembed):
            raise CallerError(
                f"this adapter would train nothing: {self}",
                field="lora_config",
                remedy="use a rank of 1 or more and some layers, or rank=0 to train all weights",
            )
        groups = (
            (ALL_ATTENTION, self.train_attn),
            (ALL_MLP, self.train_mlp),
            (UNEMBED, self.train_unembed),
        )
        targets = tuple(group for group, is_trained in groups if is_trained)
        return Adapter(self.rank, seed=self.seed or 0, targets=targets)


class OptimizerConfig(Loose, frozen=True):
    type: str = "adamw"

    def check(self) -> None:
        """Raises: CallerError: an optimizer other than AdamW."""
        if self.type != "adamw":
            raise CallerError(
                f"unknown optimizer {self.type!r}",
                field="optimizer_config",
                remedy="omit it; models are trained with AdamW",
            )


class CreateModel(Loose, frozen=True):
    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: dict[str, Any] | None = None


class OfModel(Loose, frozen=True):
    model_id: str


class Numbered(Loose, frozen=True):
    """What every numbered call of a model has."""

    model_id: str
    seq_id: int


class OptimStep(Loose, frozen=True):
    model_id: str
    seq_id: int
    adam_params: dict[str, float | None] | None = None
    optimizer_params: dict[str, Any] | None = None
    """Parameters of an optimizer other than AdamW."""


class SaveWeights(Loose, frozen=True):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None

    def check(self) -> None:
        """Raises: CallerError: a sampling client that follows later weights."""
        if self.kind != "snapshot":
            raise CallerError(
                f"sampling clients of kind {self.kind!r} are not supported",
                field="kind",
                remedy='use kind="snapshot", and create a new sampling client for newer weights',
            )


class LoadWeights(Loose, frozen=True):
    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    def check(self, base: str) -> None:
        """Check that every argument is supported.

        Args:   base: base model of the checkpoint.
        Raises: CallerError: an argument is not supported; names the field.
        """
        if self.weights_access_token is not None:
            raise CallerError(
                "weights_access_token is not supported",
                field="weights_access_token",
                remedy="omit it; a checkpoint is loaded with its own tenant's key",
            )
        if self.base_model not in (None, base):
            raise CallerError(
                f"expected base_model {base!r}, as the checkpoint has, got {self.base_model!r}",
                field="base_model",
                remedy="omit base_model; a checkpoint keeps its own base",
            )
        (self.optimizer_config or OptimizerConfig()).check()


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
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Check that every argument is supported.

        Raises: CallerError: an argument is not supported; names the field.
        """
        check_samples(self.num_samples, "num_samples")
        for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(self, field) <= MAX_TOP_LOGPROBS:
                raise CallerError(
                    f"{field} must be between 0 and {MAX_TOP_LOGPROBS}, got {getattr(self, field)}",
                    field=field,
                    remedy=f"request at most {MAX_TOP_LOGPROBS} tokens",
                )
        last_n = self.prompt_logprobs_last_n
        if last_n is not None and last_n < 1:
            raise CallerError(
                f"expected 1 or more tokens, got {last_n}",
                field="prompt_logprobs_last_n",
                remedy="use 1 or more, or omit it for the whole prompt",
            )
        for field in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, field):
                raise CallerError(
                    f"{field} is not supported",
                    field=field,
                    remedy="omit it; topk_prompt_logprobs returns the likeliest tokens",
                )
        if self.record_stability_info:
            raise CallerError(
                "record_stability_info is not supported",
                field="record_stability_info",
                remedy="omit it; it belongs to the loss stable_reinforce, which is not supported",
            )


def read_sample(content: bytes) -> tuple[bytes, bytes]:
    """Read the body of a sample. Returns: it in JSON without its prompt, and the tokens of
    the prompt.

    Raises: CallerError: it is invalid; names the field.
    """
    sample = decoded(content or b"{}", Sample)
    short = replace(sample, prompt=convert.ModelInput())
    content = msgspec.json.encode(short)
    check_short(content, msgspec.structs.asdict(short))
    return content, convert.prompt_tokens(sample.prompt)


class RetrieveFuture(Loose, frozen=True):
    request_id: str


class OfPath(Loose, frozen=True):
    tinker_path: str = ""
    path: str = ""
