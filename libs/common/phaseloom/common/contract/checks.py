"""Checks of an operation's arguments that do not depend on the deployment.

Each kind with something to check has one `check_<kind>`, named in `contract.kinds`. The router
calls it before queueing the operation. The backend checks what depends on the model (token range,
context length). Each function takes the operation's key and arguments, and raises a CallerError
that names the field and the remedy.

Cost: linear in the payload, in C loops: about 10 ms for a batch of the largest size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import SupportsFloat

import msgspec

from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.arrays import Float32s, Int32s, float32s, int32s, length
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.ids import SEQ_END, OperationKey, check_name, parse_source

MAX_SAMPLES = 65_536
MAX_NEW_TOKENS = 1 << 20
MAX_BLOB_BYTES = 2**20
MAX_CHECKPOINTS = 64
MAX_CHECKPOINT_TTL_S = 10 * 365 * 86_400.0
MAX_KEPT = 100_000
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_TOP_LOGPROBS = 20
MAX_TARGETS = 128
MAX_REPETITION_PENALTY = 100.0
MAX_VERSION_TTL_S = 30 * 86_400.0
MIN_EPS = 1e-30
"""The smallest `eps` of AdamW, well within float32. With eps = 0, the step of a weight whose
gradients were all 0 is 0 / 0."""

_INT32_END = 1 << 31
_SEED_END = 1 << 63
_FLOAT32_MAX = 3.4028235e38
_LOSS_ARRAYS = {
    ops.Loss.CROSS_ENTROPY: ("weights",),
    ops.Loss.IMPORTANCE_SAMPLING: ("logprobs", "advantages"),
    ops.Loss.PPO: ("logprobs", "advantages"),
    ops.Loss.CISPO: ("logprobs", "advantages"),
    ops.Loss.DRO: ("logprobs", "advantages"),
}

MAX_METRICS = 32
MAX_METRIC_CHARS = 64
MAX_STEP = 1 << 53

MAX_CONFIG_BYTES = 16 * 1024
MAX_TAGS = 16
MAX_TAG_CHARS = 64

# --- Reports -------------------------------------------------------------------------------------

_METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]*\Z")


def check_report(job: str, step: int, values: Mapping[str, float]) -> None:
    """Check that a controller's report is valid.

    Raises: CallerError: the job's name, the step or a value is invalid, or there are too many
            values.
    """
    check_name(job, "job")
    check_range(step, 0, MAX_STEP, "step", "step")
    if not 1 <= len(values) <= MAX_METRICS:
        raise CallerError(
            f"expected 1 to {MAX_METRICS} values, got {len(values)}",
            field="values",
            remedy="report fewer values at once, and at least one",
        )
    for name, value in values.items():
        is_text = isinstance(name, str)
        if not is_text or len(name) > MAX_METRIC_CHARS or not _METRIC.match(name):
            raise CallerError(
                f"{str(name)[:MAX_METRIC_CHARS]!r} is not a valid name of a value",
                field="values",
                remedy=f"use 1 to {MAX_METRIC_CHARS} letters, digits, '_', '-', '.', '/' or ':', "
                "starting with a letter or digit",
            )
        if not (isinstance(value, SupportsFloat) and math.isfinite(value)):
            raise CallerError(
                f"{name} must be a finite number, got {value!r}",
                field=f"values.{name}",
                remedy="report finite numbers and omit other values",
            )


# --- Runs ----------------------------------------------------------------------------------------


def check_labels(config: Mapping[str, object], tags: Collection[str], prefix: str = "") -> None:
    """Check the settings and tags of a run.

    Args:   prefix: start of the name of the field that the error names.
    Raises: CallerError: the config is not JSON or too large, or a tag is invalid.
    """
    try:
        num_bytes = len(msgspec.json.encode(config))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise CallerError(
            f"config must have only values that JSON has: {error}",
            field=f"{prefix}config",
            remedy="use text, numbers, lists and dicts with text as keys",
        ) from None
    if num_bytes > MAX_CONFIG_BYTES:
        raise CallerError(
            f"config may have at most {MAX_CONFIG_BYTES} bytes as JSON, got {num_bytes}",
            field=f"{prefix}config",
            remedy="keep the settings that tell runs apart, and store the others elsewhere",
        )
    if len(tags) > MAX_TAGS:
        raise CallerError(
            f"a run may have at most {MAX_TAGS} tags, got {len(tags)}",
            field=f"{prefix}tags",
            remedy="omit some tags",
        )
    for index, tag in enumerate(tags):
        if not 1 <= len(tag) <= MAX_TAG_CHARS or not tag.isprintable():
            raise CallerError(
                f"a tag must have 1 to {MAX_TAG_CHARS} printable characters, got "
                f"{tag[: MAX_TAG_CHARS + 1]!r}",
                field=f"{prefix}tags[{index}]",
                remedy="use shorter words without line breaks",
            )


# --- Kinds ---------------------------------------------------------------------------------------


def check_generate(key: OperationKey, args: ops.Generate) -> None:
    if not args.prompts:
        raise CallerError(
            "expected at least one prompt, got none",
            field="args.prompts",
            remedy="pass at least one prompt",
        )
    for i, prompt in enumerate(args.prompts):
        _check_ints(prompt.tokens, f"args.prompts[{i}].tokens")
        check_range(prompt.seed, -_SEED_END, _SEED_END - 1, f"args.prompts[{i}].seed", "int64 seed")
        check_range(prompt.sample, 0, MAX_SAMPLES - 1, f"args.prompts[{i}].sample", "sample index")
    check_range(args.num_samples, 1, MAX_SAMPLES, "args.num_samples", "samples per prompt")
    _check_sampling(args.sampling)
    field = "args.prompt_top_logprobs"
    check_range(args.prompt_top_logprobs, 0, MAX_TOP_LOGPROBS, field, "tokens per position")
    if args.prompt_top_logprobs and not args.prompt_logprobs:
        raise CallerError(
            "prompt_top_logprobs needs prompt_logprobs",
            field="args.prompt_top_logprobs",
            remedy="set prompt_logprobs too, or omit prompt_top_logprobs",
        )
    _check_weights(args.weights)
    for i, prompt in enumerate(args.prompts):
        _check_generated(prompt, args.sampling.max_tokens, f"args.prompts[{i}].num_generated")


def check_forward(key: OperationKey, args: ops.Forward) -> None:
    check_batch(args.batch)
    _check_weights(args.weights)


def check_forward_backward(key: OperationKey, args: ops.ForwardBackward) -> None:
    check_num_targets(args)
    for i, datum in enumerate(args.batch):
        if datum.staleness is not None:
            field = f"args.batch[{i}].staleness"
            check_range(datum.staleness, 0, SEQ_END - 1, field, "versions")
    check_batch(args.batch, _LOSS_ARRAYS[args.loss])
    _check_unused(args)
    check_finite(args.clip_low, "args.clip_low")
    check_finite(args.clip_high, "args.clip_high")
    check_finite(args.beta, "args.beta")
    if args.clip_low > args.clip_high:
        raise CallerError(
            f"clip_low must be at most clip_high = {args.clip_high}, got {args.clip_low}",
            field="args.clip_low",
            remedy="pass bounds of the probability ratio, such as 0.8 and 1.2",
        )


def check_optim_step(key: OperationKey, args: ops.OptimStep) -> None:
    check_adam(args.adam)


def check_save_state(key: OperationKey, args: ops.SaveState) -> None:
    check_name(args.name, "args.name")
    check_range(args.keep, 0, MAX_KEPT, "args.keep", "checkpoints")
    check_ttl(args.ttl_s, "args.ttl_s")
    _check_checkpoints(key, args)


def check_delete_checkpoint(key: OperationKey, args: ops.DeleteCheckpoint) -> None:
    check_name(args.name, "args.name")


def check_load_state(key: OperationKey, args: ops.LoadState) -> None:
    check_name(args.name, "args.name")
    parse_source(key.deployment_key, args.source)


def check_publish_weights(key: OperationKey, args: ops.PublishWeights) -> None:
    check_between(args.ttl_s, 0.0, MAX_VERSION_TTL_S, "args.ttl_s")


def check_sync_weights(key: OperationKey, args: ops.SyncWeights) -> None:
    check_name(args.policy, "args.policy")
    check_range(args.version, 1, SEQ_END - 1, "args.version", "seq of the publish")


def check_ttl(ttl_s: float, field: str) -> None:
    """Check a time to live in seconds; 0 means no expiry.

    Raises: CallerError: it is negative, not finite, or too long.
    """
    check_between(ttl_s, 0.0, MAX_CHECKPOINT_TTL_S, field)


# --- Parts of them -------------------------------------------------------------------------------


def _check_generated(prompt: ops.Prompt, max_tokens: int, field: str) -> None:
    if not prompt.num_generated:
        return
    num_tokens = length(prompt.tokens)
    check_range(
        prompt.num_generated, 0, num_tokens - 1, field, f"of the prompt's {num_tokens} tokens"
    )
    if prompt.num_generated >= max_tokens:
        raise CallerError(
            f"num_generated must be less than max_tokens = {max_tokens}, "
            f"got {prompt.num_generated}",
            field=field,
            remedy="raise max_tokens, which includes the generated tokens, or omit the prompt",
        )


def _check_weights(weights: ops.NamedWeights | None) -> None:
    if weights is None:
        return
    check_name(weights.policy, "args.weights.policy")
    if weights.job:
        check_name(weights.job, "args.weights.job")
    if not weights.checkpoint:
        check_range(weights.version, 1, SEQ_END - 1, "args.weights.version", "seq of the publish")
        return
    check_name(weights.checkpoint, "args.weights.checkpoint")
    if weights.version:
        raise CallerError(
            "expected a version or a checkpoint, got both",
            field="args.weights.checkpoint",
            remedy="omit one of them",
        )


def _check_sampling(sampling: ops.SamplingParams) -> None:
    check_range(sampling.max_tokens, 1, MAX_NEW_TOKENS, "args.sampling.max_tokens", "new tokens")
    check_finite(sampling.temperature, "args.sampling.temperature")
    tokens, strings = sampling.stop_token_ids, sampling.stop_strings
    field = "args.sampling.stop_token_ids"
    check_range(len(tokens), 0, MAX_STOP_TOKENS, field, "stop tokens")
    for i, token in enumerate(tokens):
        check_range(token, 0, _INT32_END - 1, f"{field}[{i}]", "token id")
    field = "args.sampling.stop_strings"
    check_range(len(strings), 0, MAX_STOP_STRINGS, field, "stop strings")
    for i, text in enumerate(strings):
        check_range(len(text), 1, MAX_STOP_CHARS, f"{field}[{i}]", "characters")
    _check_shape(sampling)


def _check_shape(sampling: ops.SamplingParams) -> None:
    check_range(sampling.top_k, 0, _INT32_END - 1, "args.sampling.top_k", "tokens; 0: all")
    check_between(sampling.min_p, 0.0, 1.0, "args.sampling.min_p")
    for name in ("presence_penalty", "frequency_penalty"):
        check_between(getattr(sampling, name), -2.0, 2.0, f"args.sampling.{name}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise CallerError(
            f"top_p must be greater than 0 and at most 1, got {sampling.top_p}",
            field="args.sampling.top_p",
            remedy="use 1 to sample from all tokens",
        )
    if not 0.0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise CallerError(
            "repetition_penalty must be greater than 0 and at most "
            f"{MAX_REPETITION_PENALTY}, got {sampling.repetition_penalty}",
            field="args.sampling.repetition_penalty",
            remedy="use 1 for no penalty",
        )
    field = "args.sampling.bad_words"
    check_range(len(sampling.bad_words), 0, MAX_BAD_WORDS, field, "bad words")
    for i, word in enumerate(sampling.bad_words):
        check_range(len(word), 1, MAX_BAD_WORD_TOKENS, f"{field}[{i}]", "tokens")
        for token in word:
            check_range(token, 0, _INT32_END - 1, f"{field}[{i}]", "token id")
    field = "args.sampling.top_logprobs"
    check_range(sampling.top_logprobs, 0, MAX_TOP_LOGPROBS, field, "tokens per position")


def _check_checkpoints(key: OperationKey, args: ops.SaveState) -> None:
    check_range(len(args.controller_blob), 0, MAX_BLOB_BYTES, "args.controller_blob", "bytes")
    check_range(len(args.checkpoints), 0, MAX_CHECKPOINTS, "args.checkpoints", "checkpoints")
    for deployment, name in args.checkpoints.items():
        check_name(deployment, "args.checkpoints")
        check_name(name, f"args.checkpoints[{deployment}]")
    if key.deployment in args.checkpoints:
        raise CallerError(
            f"expected other deployments' checkpoints, got {key.deployment}, which this operation "
            "saves itself",
            field=f"args.checkpoints[{key.deployment}]",
            remedy="omit it",
        )
    if args.checkpoints and not args.controller_blob:
        raise CallerError(
            "checkpoints of other deployments need a controller_blob",
            field="args.checkpoints",
            remedy="pass a `controller_blob`, or save each deployment separately",
        )


def check_batch(batch: list[ops.Datum], needed: tuple[str, ...] = ()) -> None:
    if not batch:
        raise CallerError(
            "expected at least one sample, got an empty batch",
            field="args.batch",
            remedy="pass at least one sample",
        )
    for i, datum in enumerate(batch):
        _check_datum(datum, needed, f"args.batch[{i}]")


def check_num_targets(args: ops.ForwardBackward) -> None:
    """Check that the loss supports the number of targets per position.

    Raises: CallerError: a sample has several targets per position, and the loss supports only one.
    """
    if args.loss is ops.Loss.CROSS_ENTROPY:
        return
    for i, datum in enumerate(args.batch):
        if datum.num_targets != 1:
            raise CallerError(
                f"the loss {args.loss} supports one target per position, got {datum.num_targets}",
                field=f"args.batch[{i}].num_targets",
                remedy="use cross_entropy, or one target per position",
            )


def _check_unused(args: ops.ForwardBackward) -> None:
    """Reject arrays that the loss ignores, because the caller would expect them to have an
    effect."""
    # Cross-entropy is weighted by `weights`; all other losses by `advantages`.
    unused, used = ("weights", "advantages")
    if args.loss is ops.Loss.CROSS_ENTROPY:
        unused, used = used, unused
    for i, datum in enumerate(args.batch):
        if getattr(datum, unused) is not None:
            raise CallerError(
                f"the loss {args.loss} does not use {unused}",
                field=f"args.batch[{i}].{unused}",
                remedy=f"omit it, or multiply it into {used}",
            )


def _check_datum(datum: ops.Datum, needed: tuple[str, ...], field: str) -> None:
    _check_ints(datum.tokens, f"{field}.tokens")
    num_tokens = length(datum.tokens)
    check_range(datum.num_targets, 1, MAX_TARGETS, f"{field}.num_targets", "targets per position")
    num_targets = num_tokens * datum.num_targets
    _check_ints(datum.targets, f"{field}.targets")
    _check_length(datum.targets, num_targets, f"{field}.targets")
    for name in ("weights", "logprobs", "advantages"):
        values: Float32s | None = getattr(datum, name)
        if values is not None:
            _check_floats(values, f"{field}.{name}")
            expected = num_targets if name == "weights" else num_tokens
            _check_length(values, expected, f"{field}.{name}")
        elif name in needed:
            raise CallerError(
                f"the loss needs {name}",
                field=f"{field}.{name}",
                remedy="pass one number per target",
            )


def _check_ints(values: Int32s, field: str) -> None:
    _check_whole(values, field, "int32")
    numbers = int32s(values)
    if not numbers:
        raise CallerError(
            "expected at least one token, got none", field=field, remedy="pass at least one token"
        )
    if min(numbers) < 0 or max(numbers) >= _INT32_END:
        raise CallerError(
            "a token id is negative or too large", field=field, remedy="use 0 to 2^31 - 1"
        )


def _check_floats(values: Float32s, field: str) -> None:
    _check_whole(values, field, "float32")
    numbers = float32s(values)
    # `sum` runs in C. A sum of float32 values in float64 is finite only if every term is.
    if not math.isfinite(sum(numbers)):
        raise CallerError("a number is not finite", field=field, remedy="replace inf and nan")
    if isinstance(values, list) and numbers and max(map(abs, numbers)) > _FLOAT32_MAX:
        raise CallerError(
            "a number is too large for float32", field=field, remedy="use -3.4e38 to 3.4e38"
        )


def _check_whole(values: Int32s | Float32s, field: str, kind: str) -> None:
    if isinstance(values, bytes) and len(values) % 4:
        raise CallerError(
            f"expected a multiple of 4 bytes, got {len(values)} bytes of {kind}",
            field=field,
            remedy=f"send little-endian {kind}, 4 bytes each",
        )


def _check_length(values: Int32s | Float32s, expected: int, field: str) -> None:
    if length(values) != expected:
        raise CallerError(
            f"expected {expected} values, got {length(values)}",
            field=field,
            remedy="pass one value per token; for targets and weights, num_targets per token",
        )


def check_adam(adam: ops.AdamParams) -> None:
    """Check AdamW's hyperparameters.

    Raises: CallerError: one is out of range.
    """
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        check_finite(getattr(adam, name), f"args.adam.{name}")
    if adam.eps < MIN_EPS:
        raise CallerError(
            f"eps must be at least {MIN_EPS}, got {adam.eps}",
            field="args.adam.eps",
            remedy="use 1e-8; without eps, weights whose gradients are all 0 become NaN",
        )
    for name in ("beta1", "beta2"):
        value = getattr(adam, name)
        if not 0.0 <= value < 1.0:
            raise CallerError(
                f"{name} must be at least 0 and below 1, got {value}",
                field=f"args.adam.{name}",
                remedy="use a decay rate such as 0.9",
            )


def check_finite(value: float, field: str) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        name = field.rpartition(".")[2]
        raise CallerError(
            f"{name} must be finite and at least 0, got {value}",
            field=field,
            remedy="use a finite number, 0 or more",
        )


def check_between(value: float, low: float, high: float, field: str) -> None:
    if not low <= value <= high:
        name = field.rpartition(".")[2]
        raise CallerError(
            f"{name} must be between {low} and {high}, got {value}",
            field=field,
            remedy=f"use {low} to {high}",
        )


def check_range(value: int, low: int, high: int, field: str, unit: str) -> None:
    if not low <= value <= high:
        raise CallerError(
            f"expected {low} to {high} ({unit}), got {value}",
            field=field,
            remedy="use a value in this range",
        )
