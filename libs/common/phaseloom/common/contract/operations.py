"""Operations and their outcomes: the narrow API between a controller and a model.

Operation:  controller → OPS → router; its payload is read by the WPG leader
Completion: WPG leader, or scheduler (for operations that never ran) → DONE, republished to the
            controller
Progress:   WPG leader → controller, not stored

Shapes: T tokens of one sample. Losses follow one rule: position i predicts `targets[i]`, and every
loss is a plain sum over positions. With lp the learner's log-probability of the target, q the
`logprobs` given (of the sampler), A `advantages`, w `weights`, r = exp(lp − q):
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
from phaseloom.common.contract.codec import Message, snake
from phaseloom.common.contract.errors import ErrorInfo
from phaseloom.common.contract.ids import OperationKey


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rules by which tokens are drawn and a sample ends; names and meanings are vLLM's.

    At each position, in this order: bad words are left out, penalties change the logits, the
    temperature divides them, min-p, top-k and top-p leave tokens out, and one of the rest is drawn.
    The log-probabilities in the result are the model's own, before all of this.
    """

    max_tokens: int
    """The most new tokens of a sample, those of the prompt's `num_generated` included."""
    temperature: float = 1.0
    """The temperature; 0: the likeliest token is taken."""
    stop_token_ids: list[int] = []
    """Tokens that end a sample, beside the end-of-sequence tokens of the model's config."""
    stop_strings: list[str] = []
    """Stop once the text of the new tokens holds one of these; needs a registered model, or
    the `token_texts` of the model."""
    ignore_eos: bool = False
    top_k: int = 0
    """Draw from this many of the likeliest tokens, and those as likely as the last; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this share of the probability together."""
    min_p: float = 0.0
    """Draw from the tokens that have at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt or the sample, multiplies the negative
    ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the sample has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the sample has the token."""
    bad_words: list[list[int]] = []
    """Runs of tokens that a sample never completes."""
    top_logprobs: int = 0
    """The number of likeliest tokens at each position whose log-probabilities are answered."""


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    tokens: Int32s
    """With the new ones at most as many as the model has positions (`max_position_embeddings`)."""
    seed: int = 0
    """Sample k of this prompt draws its token i from (seed, k, i) and nothing else."""
    sample: int = 0
    """The number k of the first sample that is asked for."""
    num_generated: int = 0
    """The number of the last `tokens` that come from an earlier answer. The samples continue after
    them, with the draws, the stops and the `max_tokens` of a sample that was never interrupted."""


class Datum(msgspec.Struct, frozen=True, omit_defaults=True):
    """One training sample; every array has the length T of `tokens`, or T · `num_targets`."""

    tokens: Int32s
    """At most as many as the model has positions (`max_position_embeddings`)."""
    targets: Int32s
    """The tokens that each position predicts: (T · num_targets,), position after position."""
    weights: Float32s | None = None
    """One weight for each target."""
    logprobs: Float32s | None = None
    """Log-probabilities that the targets were drawn with, for all losses but `cross_entropy`."""
    advantages: Float32s | None = None
    """How much better each target was than expected, for all losses but `cross_entropy`; 0: it
    counts nothing, as those of a prompt."""
    num_targets: int = 1
    """Targets of each position. Several, as the likeliest tokens of a teacher whose probabilities
    are the weights, are for `forward` and `cross_entropy` only."""


class AdamParams(msgspec.Struct, frozen=True, omit_defaults=True):
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """The norm to which gradients are clipped; 0: they are not clipped."""


class NamedWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Weights of the tenant that an operation reads with in place of its deployment's own: a
    version, or a checkpoint. They are of the same model, or of an adapter on the same base."""

    policy: str
    """The deployment that published the version, or saved the checkpoint."""
    version: int = 0
    """The `seq` of the `publish_weights`; 0: a checkpoint is named."""
    job: str = ""
    """The policy's job; empty: the operation's job."""
    checkpoint: str = ""
    """The name of a checkpoint; NOT_FOUND where the checkpoint is gone when the operation runs."""


class Generate(Message, frozen=True):
    """Reading. Samples `num_samples` continuations of each prompt."""

    prompts: list[Prompt]
    sampling: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    """Whether the result has the prompts' own log-probabilities, too."""
    prompt_top_logprobs: int = 0
    """The number of likeliest tokens at each position of the prompts whose log-probabilities are
    answered; needs `prompt_logprobs`."""
    stream: bool = False
    """Whether `Progress` carries new tokens while they are drawn. It costs messages, and changes no
    token."""
    weights: NamedWeights | None = None
    """The weights to draw with, in place of the deployment's own, which stay as they are. Those of
    an adapter need a deployment with an adapter and, where it is a sampler, `max_adapters`; others
    one without an adapter."""


class Forward(Message, frozen=True):
    """Reading. Log-probabilities of each datum's targets."""

    batch: list[Datum]
    weights: NamedWeights | None = None
    """The weights to read, as in `generate`."""


class Loss(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"


class ForwardBackward(Message, frozen=True):
    """Mutating. Adds the gradients of a loss; they accumulate until `optim_step`."""

    batch: list[Datum]
    loss: Loss
    clip_low: float = 0.8
    clip_high: float = 1.2
    logprobs: bool = False
    """Whether the result has the targets' log-probabilities, too, as that of `forward` has, by the
    weights of the gradients. It costs a forward pass and changes no gradient."""
    beta: float = 0.05
    """The strength with which `dro` keeps the policy near the sampler's."""


class OptimStep(Message, frozen=True):
    """Mutating. One AdamW step on the accumulated gradients, which it then zeroes.

    Where a `forward_backward` since the last step was not completed, the step fails and the
    gradients are zeroed, unless `allow_partial` is set: a step on a part of the batch is rarely
    what was meant.
    """

    adam: AdamParams
    allow_partial: bool = False


class SaveState(Message, frozen=True):
    """Reading. Writes a checkpoint under the tenant's root.

    With a `controller_blob` it becomes the job's last checkpoint: `session.attach` answers with it,
    and the job falls back to it where its state is lost.
    """

    name: str
    controller_blob: bytes = b""
    """The controller's own state, at most 1 MiB."""
    checkpoints: dict[str, str] = {}
    """Other deployment of the job → the name of its checkpoint that belongs to this one."""
    keep: int = 0
    """How many of this deployment's checkpoints that were saved with a `keep` stay once this one is
    durable, this one included; older ones are deleted, except those that may be needed. 0: this
    checkpoint stays, whatever is saved later."""
    ttl_s: float = 0.0
    """How long the checkpoint is kept, in seconds from when it is durable; 0: until it is deleted.
    The job's last checkpoint, and what belongs to it, stays longer."""
    overwrite: bool = False
    """Whether to replace a checkpoint of the same name; otherwise a taken name is refused."""


class DeleteCheckpoint(Message, frozen=True):
    """Reading. Removes a checkpoint of this deployment.

    Refused where the job may fall back to it. Deployments that have loaded it keep its files until
    they need them no more.
    """

    name: str


class LoadState(Message, frozen=True):
    """Mutating. Replaces the whole state by a checkpoint of the tenant."""

    name: str
    source: str = ""
    """The `<job>/<deployment>` that saved it, of the same model; empty: this deployment."""
    optimizer: bool = True
    """Whether to load gradients and the optimizer's state, too, where the checkpoint has them;
    otherwise they start afresh."""


class PublishWeights(Message, frozen=True):
    """Mutating. Cuts an immutable weights version, named by this deployment and this `seq`."""

    ttl_s: float = 0.0
    """Seconds for which the version can still be named in the `weights` of an operation once newer
    ones are published, counted from its publish, and again from the end of each operation that has
    named it. 0: it cannot be named then. While such an operation is open, the version stays in any
    case."""


class SyncWeights(Message, frozen=True):
    """Mutating. Replaces this deployment's weights by a version of the same job.

    Gradients are dropped and the optimizer starts afresh, where it is trainable."""

    policy: str
    version: int
    """The `seq` of the `publish_weights`."""
    keeps_kv: bool = False
    """Whether samples that a cancel has stopped continue with the keys and values of the weights
    before, as far as the deployment's `prefix_cache` has them. Otherwise these are computed anew,
    with the new weights."""


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
    """The operation kind, as in subjects, spans and traces: `forward_backward`, …"""
    return snake(type(args).__name__)


class After(msgspec.Struct, frozen=True):
    """An operation of the same job that must be completed first."""

    deployment: str
    seq: int


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that a controller publishes on `pl.v1.op.<tenant>.<job>.<deployment>.<seq>`."""

    id: str
    """The id that the client chose, unique: it tells a resend from another session's operation."""
    session: int
    args: Args
    after: list[After] = []
    timeout_s: float = 0.0
    """Seconds from queueing after which an operation without a permit ends EXPIRED; 0: it waits."""


class Sequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One continuation. tokens (T,) int32, logprobs (T,) float32, stop token included."""

    tokens: Int32s
    logprobs: Float32s
    stop_reason: str
    """`stop`, `length`, or `partial`: a cancel that keeps partial samples ended it, and it can be
    continued, see `Prompt.num_generated`."""
    top_tokens: Int32s = []
    """The `top_logprobs` likeliest tokens of each position, likeliest first; the positions follow
    one another: (T · top_logprobs,)."""
    top_logprobs: Float32s = []
    """The log-probabilities of the `top_tokens`."""


class GenerateResult(Message, frozen=True):
    sequences: list[list[Sequence]]
    """[prompt][sample]"""
    prompt_logprobs: list[Float32s] = []
    """One (T,) array a prompt, where asked for; the first token's is 0."""
    prompt_top_tokens: list[Int32s] = []
    """One (T · K,) array a prompt, where the K = `prompt_top_logprobs` likeliest tokens at each
    position are asked for, likeliest first. At the first, which nothing precedes, they are 0."""
    prompt_top_logprobs: list[Float32s] = []
    """The log-probabilities of the `prompt_top_tokens`; 0 at the first position."""
    metrics: dict[str, float] = {}
    """Filled by the backend `sampler` where the deployment has a `prefix_cache`.
    `prefilled_tokens:sum`: the tokens of the prompts that the model ran before the first new one.
    `reused_tokens:sum`: those that the cache had."""


class ForwardResult(Message, frozen=True):
    logprobs: list[Float32s]
    """One (T · num_targets,) array a datum."""


class ForwardBackwardResult(Message, frozen=True):
    metrics: dict[str, float]
    """`loss:sum`, `num_tokens:sum` (positions with a nonzero weight or advantage), …"""
    logprobs: list[Float32s] = []
    """One (T · num_targets,) array a datum, where asked for."""


class OptimStepResult(Message, frozen=True):
    metrics: dict[str, float]
    """`grad_norm:mean` before clipping."""


class SaveStateResult(Message, frozen=True):
    path: str
    """Path under the tenant's root: `<job>/<deployment>/<name>`."""
    weights_sha256: str
    """Digest over (name, dtype, shape, little-endian bytes) of every weight, sorted by name."""
    checkpoints: dict[str, str] = {}
    """Deployment → checkpoint, its own included, if the operation carried a controller's blob."""


class DeleteCheckpointResult(Message, frozen=True):
    num_bytes: int
    """The bytes of the files that were removed; 0: there was no such checkpoint any more."""


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
    """The kind of the operation that has such a result."""
    return snake(type(result).__name__).removesuffix("_result")


def checkpoints_of(completion: Completion) -> dict[str, str]:
    """The job's last checkpoint, where this completed a `save_state` with a controller's blob."""
    result = completion.result
    return result.checkpoints if isinstance(result, SaveStateResult) else {}


class Outcome(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class DrawnTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sample, (T,) of them, which its `Sequence` in the result has at `offset`.

    The same tokens may come more than once: an operation that runs again after a loss begins at
    offset 0. Some may not come at all. `contract.streaming` makes one sequence of them.
    """

    prompt: int
    """Place of the prompt in the operation."""
    sample: int
    """Place among the prompt's samples in the result."""
    offset: int
    """The number of tokens of the `Sequence` that come before these."""
    tokens: Int32s
    logprobs: Float32s
    top_tokens: Int32s = []
    """As in `Sequence`: (T · top_logprobs,)."""
    top_logprobs: Float32s = []


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """WPG leader → controller, on `pl.v1.out.<key>.progress`: the progress of a long operation.

    Not stored, and nothing is decided on it. In the content type of the operation.
    """

    key: OperationKey
    num_done: int
    num_total: int
    """The most tokens of the operation, which may end with fewer."""
    drawn: list[DrawnTokens] = []
    """New tokens, where a `generate` asks for a `stream`; those of one sample are in order."""
    weights_seq: int = 0
    """The `seq` of the deployment's last mutating operation before this one, whose weights drew the
    tokens."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one outcome of an operation, on `pl.v1.done.…`; the first that is stored counts."""

    id: str
    outcome: Outcome
    result: Result | None = None
    error: ErrorInfo | None = None
