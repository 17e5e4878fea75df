"""Operations and their outcomes: the narrow API between a controller and a model.

Operation:  controller → OPS → router; the WPG leader reads its payload
Completion: WPG leader, or the scheduler for operations that never ran → DONE, republished to
            the controller
Progress:   WPG leader → controller, not stored

Shapes: T is the number of tokens of one sample. All losses follow one rule: position i predicts
`targets[i]`, and the loss is a plain sum over positions. With lp the learner's log-probability of
the target, q the given `logprobs` (of the sampler), A `advantages`, w `weights`, r = exp(lp − q):
    cross_entropy        −Σ w·lp
    importance_sampling  −Σ r·A
    ppo                  −Σ min(r·A, clip(r, clip_low, clip_high)·A)
    cispo                −Σ clip(r, clip_low, clip_high)·A·lp, the clipped ratio without gradient
    dro                  −Σ (A·lp − beta/2·(lp − q)²), over positions where A or q is not 0
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from phaseloom.common.contract.arrays import Float32s, Int32s
from phaseloom.common.contract.codec import Message, snake_case
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import OperationKey


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rules for sampling tokens and ending a sample. Names and meanings are vLLM's.

    At each position the steps are, in this order: exclude bad words, apply penalties to the logits,
    divide by the temperature, exclude tokens by min-p, top-k and top-p, sample one of the remaining
    tokens. The log-probabilities in the result are the model's own, before all of this.
    """

    max_tokens: int
    """Maximum number of new tokens of a sample, including the prompt's `num_generated`."""
    temperature: float = 1.0
    """0: always choose the likeliest token."""
    stop_token_ids: list[int] = []
    """Tokens that end a sample, in addition to the end-of-sequence tokens of the model's config."""
    stop_strings: list[str] = []
    """Stop once the text of the new tokens contains one of these. Needs a registered model or the
    model's `token_texts`."""
    ignore_eos: bool = False
    top_k: int = 0
    """Sample from this many likeliest tokens, plus those tied with the last; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens whose total probability reaches this
    value."""
    min_p: float = 0.0
    """Sample only tokens whose probability is at least this fraction of the likeliest token's."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt or the sample: divides positive logits and multiplies negative
    ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the sample."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each occurrence in the sample."""
    bad_words: list[list[int]] = []
    """Token sequences that a sample never completes."""
    top_logprobs: int = 0
    """Number of likeliest tokens per position whose log-probabilities are returned."""


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    tokens: Int32s
    """Together with the new tokens, at most as many as the model has positions
    (`max_position_embeddings`)."""
    seed: int = 0
    """Token i of sample k depends on no random numbers except those of (seed, k, i)."""
    sample: int = 0
    """The number k of the first requested sample."""
    num_generated: int = 0
    """How many of the last `tokens` were generated earlier. The samples continue after them, with
    the random draws, stop rules and `max_tokens` of a sample that was never interrupted."""


class Datum(msgspec.Struct, frozen=True, omit_defaults=True):
    """One training sample. Every array has the length T of `tokens`, or T · `num_targets`."""

    tokens: Int32s
    """At most as many as the model has positions (`max_position_embeddings`)."""
    targets: Int32s
    """The tokens that each position predicts: (T · num_targets,), position by position."""
    weights: Float32s | None = None
    """One weight per target."""
    logprobs: Float32s | None = None
    """Log-probabilities with which the targets were sampled, for all losses but `cross_entropy`."""
    advantages: Float32s | None = None
    """How much better each target was than expected, for all losses but `cross_entropy`. Targets
    with 0, such as those of a prompt, do not count."""
    num_targets: int = 1
    """Targets per position. More than one is supported only by `forward` and `cross_entropy`, for
    example for the likeliest tokens of a teacher, with its probabilities as weights."""
    staleness: int | None = None
    """How many versions the policy has published after the one that sampled the targets. It only
    adds metrics to the result of `forward_backward`."""


class AdamParams(msgspec.Struct, frozen=True, omit_defaults=True):
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm to which gradients are clipped; 0: no clipping."""


class NamedWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weights of the tenant that an operation reads instead of its deployment's own: a version or a
    checkpoint. They must be of the same model, or of an adapter on the same base."""

    policy: str
    """The deployment that published the version or saved the checkpoint."""
    version: int = 0
    """The `seq` of the `publish_weights`; 0: the weights are a checkpoint's."""
    job: str = ""
    """The policy's job; empty: the operation's job."""
    checkpoint: str = ""
    """The name of a checkpoint. The operation fails with NOT_FOUND if the checkpoint no longer
    exists when it runs."""


class Generate(Message, frozen=True):
    """Reading. Sample `num_samples` continuations of each prompt."""

    prompts: list[Prompt]
    sampling: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    """Whether the result also has the log-probabilities of the prompt tokens."""
    prompt_top_logprobs: int = 0
    """Number of likeliest tokens per prompt position whose log-probabilities are returned; needs
    `prompt_logprobs`."""
    stream: bool = False
    """Whether `Progress` carries new tokens while they are sampled. This costs messages and does
    not change any token."""
    weights: NamedWeights | None = None
    """Weights to sample with instead of the deployment's own, which do not change. Adapter weights
    need a deployment with an adapter and, for the backend `sampler`, `max_adapters`. Other weights
    need a deployment without an adapter."""


class Forward(Message, frozen=True):
    """Reading. Compute the log-probabilities of each datum's targets."""

    batch: list[Datum]
    weights: NamedWeights | None = None
    """The weights to use; see `Generate`."""


class Loss(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"


class ForwardBackward(Message, frozen=True):
    """Mutating. Add the gradients of a loss. Gradients accumulate until `optim_step`."""

    batch: list[Datum]
    loss: Loss
    clip_low: float = 0.8
    clip_high: float = 1.2
    logprobs: bool = False
    """Whether the result also has the log-probabilities of the targets, as that of `forward`
    does, computed with the weights of the gradients. This costs a forward pass and changes no
    gradient."""
    beta: float = 0.05
    """How strongly `dro` keeps the policy close to the sampler's."""
    entropy: bool = False
    """Whether the result also has `entropy:sum`, of the distributions that the counted targets are
    predicted from. This costs a pass over their logits."""


class OptimStep(Message, frozen=True):
    """Mutating. Make one AdamW step with the accumulated gradients, then zero them.

    If a `forward_backward` since the last step did not complete, the step fails and the gradients
    are zeroed, because a step with part of the batch is rarely intended. `allow_partial` makes the
    step anyway.
    """

    adam: AdamParams
    allow_partial: bool = False


class SaveState(Message, frozen=True):
    """Reading. Write a checkpoint under the tenant's root.

    A checkpoint with a `controller_blob` becomes the job's latest: `session.attach` returns it, and
    the job falls back to it if its state is lost.
    """

    name: str
    controller_blob: bytes = b""
    """The controller's own state, at most 1 MiB."""
    checkpoints: dict[str, str] = {}
    """Other deployment of the job → the name of its checkpoint that belongs to this one."""
    keep: int = 0
    """Number of this deployment's checkpoints to retain once this one is durable, including this
    one. Only checkpoints saved with a `keep` count, and older ones among them are deleted unless
    they may still be needed. 0: later saves never delete this checkpoint."""
    ttl_s: float = 0.0
    """How long to keep the checkpoint, in seconds once it is durable; 0: until it is deleted. The
    job's latest checkpoint, and the checkpoints that belong to it, stay longer."""
    overwrite: bool = False
    """Whether to replace a checkpoint of the same name. Otherwise the operation is refused if the
    name exists."""


class DeleteCheckpoint(Message, frozen=True):
    """Reading. Remove a checkpoint of this deployment.

    The operation is refused if the job may fall back to the checkpoint. Deployments that have
    loaded the checkpoint keep its files until they no longer need them.
    """

    name: str


class LoadState(Message, frozen=True):
    """Mutating. Replace the whole state with a checkpoint of the tenant."""

    name: str
    source: str = ""
    """The `<job>/<deployment>` that saved the checkpoint, with the same model; empty: this
    deployment."""
    optimizer: bool = True
    """Whether to also load gradients and optimizer state, if the checkpoint has them. Otherwise
    they start from their initial values."""


class PublishWeights(Message, frozen=True):
    """Mutating. Take an immutable weights version, named by this deployment and this `seq`."""

    ttl_s: float = 0.0
    """Seconds for which operations can still name the version in their `weights` after newer ones
    are published. The time counts from the publish, and again from the end of each operation that
    named the version. 0: it cannot be named then. The version always stays while such an operation
    is open."""
    allow_nonfinite: bool = False
    """Whether to publish weights of which some are NaN or infinite. Otherwise they are refused."""


class SyncWeights(Message, frozen=True):
    """Mutating. Replace this deployment's weights with a version of the same job.

    A trainable deployment drops its gradients and resets its optimizer.
    """

    policy: str
    version: int
    """The `seq` of the `publish_weights`."""
    keeps_kv: bool = False
    """Whether cancelled samples continue with the KV cache that the old weights computed, where the
    deployment's `prefix_cache` still holds it. Otherwise it is recomputed with the new weights."""


Args = (
    Generate
    | Forward
    | ForwardBackward
    | OptimStep
    | SaveState
    | DeleteCheckpoint
    | LoadState
    | PublishWeights
    | SyncWeights
)


def kind_of(args: Args) -> str:
    """Return the operation's kind as in subjects, spans and traces, such as `forward_backward`."""
    return snake_case(type(args).__name__)


class After(msgspec.Struct, frozen=True):
    """An operation of the same job that must complete first."""

    deployment: str
    seq: int


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The message that a controller publishes on `pl.v1.op.<tenant>.<job>.<deployment>.<seq>`."""

    id: str
    """Unique id chosen by the client. It distinguishes a resent operation from one of another
    session."""
    session: int
    args: Args
    after: list[After] = []
    timeout_s: float = 0.0
    """Seconds after queueing at which an operation without a permit ends EXPIRED; 0: never."""


class Sequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One continuation: tokens (T,) int32 and logprobs (T,) float32, including the stop token."""

    tokens: Int32s
    logprobs: Float32s
    stop_reason: str
    """`stop`, `length`, or `partial`. A `partial` sequence was ended by a cancel that keeps partial
    samples, and can be continued; see `Prompt.num_generated`."""
    top_tokens: Int32s = []
    """The `top_logprobs` likeliest tokens of each position, likeliest first, position by position:
    (T · top_logprobs,)."""
    top_logprobs: Float32s = []
    """The log-probabilities of the `top_tokens`."""


class GenerateResult(Message, frozen=True):
    sequences: list[list[Sequence]]
    """[prompt][sample]"""
    prompt_logprobs: list[Float32s] = []
    """One (T,) array per prompt, if requested. The first token's value is 0."""
    prompt_top_tokens: list[Int32s] = []
    """One (T · K,) array per prompt, if the K = `prompt_top_logprobs` likeliest tokens per position
    were requested, likeliest first. At the first position, which has no context, they are 0."""
    prompt_top_logprobs: list[Float32s] = []
    """The log-probabilities of the `prompt_top_tokens`; 0 at the first position."""
    metrics: dict[str, float] = {}
    """Set by the backend `sampler` for deployments with a `prefix_cache`. `prefilled_tokens:sum`:
    prompt tokens that the model processed before the first new one. `reused_tokens:sum`: prompt
    tokens found in the cache."""


class ForwardResult(Message, frozen=True):
    logprobs: list[Float32s]
    """One (T · num_targets,) array per datum."""


class ForwardBackwardResult(Message, frozen=True):
    metrics: dict[str, float]
    """`loss:sum` and `num_tokens:sum` (positions with a nonzero weight or advantage). Every loss
    but `cross_entropy` adds sums and maxima over these positions. With lp and q, the learner's and
    the sampler's log-probability of the target, and r = exp(lp − q): `gap_abs:sum` and `gap:max` of
    |lp − q|, `kl_k1:sum` of −log r, `kl_k3:sum` of r − 1 − log r, `clipped:sum` (positions where
    `ppo` or `cispo` used a bound in place of r), `ratio:max` of r. `staleness:sum` and
    `staleness:max` if a datum has its staleness, `entropy:sum` if requested."""
    logprobs: list[Float32s] = []
    """One (T · num_targets,) array per datum, if requested."""


class OptimStepResult(Message, frozen=True):
    metrics: dict[str, float]
    """`grad_norm:mean`, before clipping."""
    nonfinite_weights: list[str] = []
    """Names of tensors that hold NaN or infinity after the step, at most 16 of them."""


class SaveStateResult(Message, frozen=True):
    path: str
    """Path under the tenant's root: `<job>/<deployment>/<name>`."""
    weights_sha256: str
    """Digest over (name, dtype, shape, little-endian bytes) of every weight, sorted by name."""
    checkpoints: dict[str, str] = {}
    """Deployment → checkpoint, including its own, if the operation had a controller blob."""


class DeleteCheckpointResult(Message, frozen=True):
    num_bytes: int
    """Total size of the removed files; 0: the checkpoint no longer existed."""


class LoadStateResult(Message, frozen=True):
    weights_sha256: str


class PublishWeightsResult(Message, frozen=True):
    version: int
    digest: str
    num_bytes: int


class SyncWeightsResult(Message, frozen=True):
    version: int
    digest: str


Result = (
    GenerateResult
    | ForwardResult
    | ForwardBackwardResult
    | OptimStepResult
    | SaveStateResult
    | DeleteCheckpointResult
    | LoadStateResult
    | PublishWeightsResult
    | SyncWeightsResult
)


def result_kind(result: Result) -> str:
    """Return the kind of the operation that has such a result."""
    return snake_case(type(result).__name__).removesuffix("_result")


def checkpoints_of(completion: Completion) -> dict[str, str]:
    """Return the job's new latest checkpoint if this completed a `save_state` with a controller
    blob, otherwise an empty dict."""
    result = completion.result
    return result.checkpoints if isinstance(result, SaveStateResult) else {}


class Outcome(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class DrawnTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """T new tokens of one sample, which start at `offset` in its `Sequence` of the result.

    The same tokens may arrive more than once: an operation that runs again after a loss restarts at
    offset 0. Some may not arrive at all. `contract.streaming` assembles one sequence from them.
    """

    prompt: int
    """Index of the prompt in the operation."""
    sample: int
    """Index of the sample among those of its prompt in the result."""
    offset: int
    """Number of tokens of the `Sequence` before these."""
    tokens: Int32s
    logprobs: Float32s
    top_tokens: Int32s = []
    """See `Sequence`: (T · top_logprobs,)."""
    top_logprobs: Float32s = []


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """WPG leader → controller, on `pl.v1.out.<key>.progress`: the progress of a long operation.

    It is not stored, and nothing is decided on it. It has the content type of the operation.
    """

    key: OperationKey
    num_done: int
    num_total: int
    """Upper bound of the operation's tokens. It may end with fewer."""
    drawn: list[DrawnTokens] = []
    """New tokens, for a `generate` with `stream`. The tokens of each sample are in order."""
    weights_seq: int = 0
    """The `seq` of the deployment's last mutating operation before this one, which made the weights
    that sampled the tokens."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The single outcome of an operation, on `pl.v1.done.…`. The first one stored wins."""

    id: str
    outcome: Outcome
    result: Result | None = None
    error: ErrorInfo | None = None
