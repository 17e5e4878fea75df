"""The part that backends without training share (`sampler`, `vllm`): checks before anything runs.

A check compares an operation with the model's config and touches nothing else: no weights, no
device, no state. It sees the whole operation, before that is split over ranks, and names the first
value at fault by its path in the request, so that the caller can correct it and send it again.
Operations that train are refused.

Shapes: N tokens of all prompts of a request, end to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedConfig

from phaseloom.common.contract.arrays import length
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.operations import (
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    Generate,
    OptimStep,
    OptimStepResult,
    Prompt,
    SamplingParams,
)
from phaseloom.common.contract.specs import DeploymentSpec, ModelSpec
from phaseloom.common.contract.state_layout import TensorSlot
from phaseloom.common.tensors.modelfiles import GENERATION_FILE, GenerationFile
from phaseloom.common.text.parts import Decoder, StopText
from phaseloom.worker.backends.base import RankGroup
from phaseloom.worker.backends.batch import (
    check_positions,
    check_samples,
    check_tokens,
    forward_batch,
    joined_ints,
)
from phaseloom.worker.backends.capabilities import kinds_of
from phaseloom.worker.backends.layout import check_layout
from phaseloom.worker.backends.model import HeapTensors, max_positions, model_config, weights_dtype
from phaseloom.worker.backends.shaping import check_bad_words
from phaseloom.worker.backends.stoptext import text_decoder


class InferenceBackend:
    """The part of a `Backend` that depends only on the model's config."""

    slots: list[TensorSlot]
    _tensors: HeapTensors

    def __init__(self, spec: DeploymentSpec) -> None:
        config = model_config(spec.model)
        self.kinds = kinds_of(spec)
        self.host_bytes = 0
        self.config: dict[str, Any] = {**config.to_dict(), "dtype": weights_dtype(spec.model)}
        self.vocab_size = int(config.vocab_size)
        self._name = spec.backend
        self._model_spec = spec.model
        self._end_tokens = end_tokens(spec.model, config)
        self._max_positions = max_positions(config)

    def use_host_memory(self, buffer: memoryview) -> None:
        """Do nothing: only optimizer state can live in host memory."""

    def check_generate(self, args: Generate) -> None:
        if not args.prompts:
            raise CallerError(
                "expected at least one prompt, got none",
                field="args.prompts",
                remedy="pass at least one prompt",
            )
        if args.num_samples < 1:
            raise CallerError(
                f"num_samples must be at least 1, got {args.num_samples}",
                field="args.num_samples",
                remedy="use 1 or more",
            )
        _check_sampling(args.sampling, self.vocab_size)
        check_bad_words(args.sampling, self.vocab_size)
        if args.sampling.stop_strings:
            # Reads the tokenizer on first use. An unreadable one must fail here, not mid-decode.
            _ = self._text_decoder
        tokens = [prompt.tokens for prompt in args.prompts]
        tokens_N = joined_ints(tokens, prompt_field)
        check_tokens(tokens_N, self.vocab_size, tokens, prompt_field)
        self._check_lengths(args.prompts, args.sampling.max_tokens)

    def check_forward(self, args: Forward) -> None:
        check_samples(args.batch, self._max_positions)
        # Building the batch checks it. `forward` builds another one, from its rank's share.
        forward_batch(args, self.vocab_size)

    def check_forward_backward(self, args: ForwardBackward) -> None:
        raise self._cannot_train("forward_backward")

    def forward_backward(self, args: ForwardBackward) -> ForwardBackwardResult:
        raise self._cannot_train("forward_backward")

    def check_optim_step(self, args: OptimStep) -> None:
        raise self._cannot_train("optim_step")

    def optim_step(self, args: OptimStep) -> OptimStepResult:
        raise self._cannot_train("optim_step")

    def nonfinite_weights(self) -> list[str]:
        return self._tensors.nonfinite(self.slots)

    def zero_gradients(self) -> None:
        """Do nothing: there are no gradients."""

    @cached_property
    def _text_decoder(self) -> tuple[Decoder, list[str]]:
        return text_decoder(self._model_spec)

    def _stop_text(
        self, sampling: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
    ) -> StopText | None:
        """Return the matcher of stop strings for one sample; None if the request has none.

        Args: prompt: the tokens before the sample.
        generated: the sample's tokens so far. A stop string may begin in their text.
        """
        if not sampling.stop_strings:
            return None
        return StopText(*self._text_decoder, sampling.stop_strings, prompt, generated)

    def _stop_tokens(self, sampling: SamplingParams) -> list[int]:
        """Return all tokens that end a sample, those of the request and those of the model."""
        return [*([] if sampling.ignore_eos else self._end_tokens), *sampling.stop_token_ids]

    def _check_lengths(self, prompts: list[Prompt], max_tokens: int) -> None:
        for i, prompt in enumerate(prompts):
            num_tokens = length(prompt.tokens)
            if num_tokens == 0:
                raise CallerError(
                    "expected at least one token, got an empty prompt",
                    field=prompt_field(i),
                    remedy="pass at least one token, such as the model's start token",
                )
            # A prompt may end with the tokens of an earlier, interrupted answer. They count
            # towards max_tokens, because the sample continues that answer.
            num_generated = prompt.num_generated
            if not 0 <= num_generated < min(num_tokens, max_tokens):
                raise CallerError(
                    f"num_generated must be at least 0, and less than both the prompt's length "
                    f"({num_tokens}) and max_tokens ({max_tokens}), got {num_generated}",
                    field=f"args.prompts[{i}].num_generated",
                    remedy="keep at least one token of the original prompt, and at least one "
                    "token to generate",
                )
            check_positions(
                num_tokens,
                self._max_positions,
                prompt_field(i),
                num_new=max_tokens - num_generated,
            )

    def _cannot_train(self, kind: str) -> CallerError:
        return CallerError(
            f"the {self._name} backend does not support {kind}",
            field="args.type",
            remedy="send it to a trainable deployment, with the backend 'fsdp' for example",
        )


def check_spec(spec: DeploymentSpec, ranks: RankGroup) -> None:
    """Check that a backend without training can run the deployment.

    Raises: CallerError: the layout is not supported, or the deployment is trainable.
    """
    check_layout(spec, ranks)
    if spec.trainable:
        raise CallerError(
            f"the {spec.backend} backend cannot train, but the deployment is declared trainable",
            field="deployments.trainable",
            remedy="use the backend 'fsdp', or declare the deployment with trainable = false",
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if sampling.max_tokens < 1:
        raise CallerError(
            f"max_tokens must be at least 1, got {sampling.max_tokens}",
            field="args.sampling.max_tokens",
            remedy="use 1 or more",
        )
    # Infinity passes the comparison, so it needs a test of its own.
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise CallerError(
            f"temperature must be finite and at least 0, got {sampling.temperature}",
            field="args.sampling.temperature",
            remedy="use 0 for greedy decoding, or a positive number",
        )
    if "" in sampling.stop_strings:
        raise CallerError(
            "a stop string is empty, so every sample would end at once",
            field="args.sampling.stop_strings",
            remedy="omit empty strings",
        )
    stop_ids = [sampling.stop_token_ids]

    def field(_: int) -> str:
        return "args.sampling.stop_token_ids"

    check_tokens(joined_ints(stop_ids, field), vocab_size, stop_ids, field)


def prompt_field(i: int) -> str:
    """Return the path of a prompt's tokens in the request, for refusals."""
    return f"args.prompts[{i}].tokens"


def end_tokens(spec: ModelSpec, config: PreTrainedConfig) -> list[int]:
    """Return the end-of-sequence tokens that the model can draw: one, several or none.

    If a model has a `generation_config.json`, only that file counts, as in `transformers`.

    Raises: ResourceError: DATA_LOSS: the file cannot be read.
    """
    eos = config.eos_token_id
    names = [] if spec.pinned is None else [file.name for file in spec.pinned.files]
    if spec.pinned is not None and GENERATION_FILE in names:
        path = Path(spec.pinned.path) / GENERATION_FILE
        try:
            eos = msgspec.json.decode(path.read_bytes(), type=GenerationFile).eos_token_id
        except (OSError, msgspec.DecodeError) as error:
            raise ResourceError(
                f"file {path} of the registered model cannot be read: {error}",
                code=Code.DATA_LOSS,
                field="model.registered",
                remedy="restore the file, or register the directory under another name",
            ) from error
    ids = [eos] if isinstance(eos, int) else eos or []
    # Some configs name a token beyond the vocabulary, which can never be drawn.
    return [token for token in ids if 0 <= token < config.vocab_size]
