"""A job and its deployments, as a controller uses them."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from phaseloom.client.arguments import check_type, checked
from phaseloom.client.batches import pack_prompt, split_batch, split_prompts
from phaseloom.client.operations import OperationHandle, OperationPart, Outbox
from phaseloom.client.rollouts import Rollout, Rollouts
from phaseloom.client.streams import GenerateHandle
from phaseloom.common.contract import operations as ops
from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.errors import CallerError, Code, InternalError
from phaseloom.common.contract.ids import JobKey, OperationKey, parse_operation_key
from phaseloom.common.contract.kinds import KINDS

R = TypeVar("R", bound=ops.Result)
Dependencies = Iterable["OperationHandle[object] | ops.After"]
Weights = OperationHandle[ops.PublishWeightsResult] | ops.NamedWeights
_PUBLISH = ops.kind_of(ops.PublishWeights())


class Deployment:
    """One model of a job. Each call reserves the next `seq` and returns a handle at once.

    Calls do not wait. Submit operations in the order in which they must take effect, and await the
    handles whose results you need. `after` lists operations of the job's other deployments that
    must finish first. An operation with a `timeout_s` fails with DEADLINE_EXCEEDED if it gets no
    permit within that time.
    """

    def __init__(self, job: JobKey, name: str, session: int, next_seq: int, outbox: Outbox) -> None:
        self.name = name
        self._job = job
        self._session = session
        self._next_seq = next_seq
        self._outbox = outbox
        self._rollouts = Rollouts(self.generate, outbox.start)
        self._versions: list[int] = []
        """The versions that this session has published, in order."""

    @property
    def version(self) -> int:
        """The weights version that an operation submitted now would use: the `seq` of its publish.
        0: this session has not synced the weights."""
        return self._rollouts.version

    @checked
    def staleness(self, version: int) -> int:
        """Return how many versions this session has published after `version`, for
        `Datum.staleness`."""
        return len(self._versions) - bisect_right(self._versions, version)

    @property
    def next_seq(self) -> int:
        """The number of the next operation, unless the caller assigns its own with `submit`."""
        return self._next_seq

    @checked
    def generate(
        self,
        prompts: Iterable[ops.Prompt],
        sampling: ops.SamplingParams,
        num_samples: int = 1,
        *,
        prompt_logprobs: bool = False,
        prompt_top_logprobs: int = 0,
        stream: bool = False,
        weights: Weights | None = None,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> GenerateHandle:
        """Sample continuations of each prompt.

        Args:   sampling: how to sample and when to stop. Stop token ids always work; `stop_strings`
                    need a registered model or a deployment with `token_texts`.
                prompt_logprobs: also return the log-probabilities of the prompt tokens.
                prompt_top_logprobs: number of likeliest tokens to return at each prompt position,
                    in addition to the prompt's own token.
                stream: deliver tokens through the handle's `stream()` while they are sampled.
                weights: weights to sample with instead of the deployment's own: the handle of a
                    `publish_weights` of this tenant (await it first if it belongs to another job),
                    or the name of a version or checkpoint. Adapter weights need a deployment with
                    an adapter and `max_adapters`.
        """
        named, after = self._resolve_weights(weights, after)
        parts = split_prompts(
            prompts,
            sampling,
            num_samples,
            prompt_logprobs=prompt_logprobs,
            prompt_top_logprobs=prompt_top_logprobs,
        )
        submitted = self._submit_parts(
            [
                ops.Generate(
                    part, sampling, num_samples, prompt_logprobs, prompt_top_logprobs, stream, named
                )
                for part in parts
            ],
            after,
            timeout_s,
        )
        return GenerateHandle(
            submitted,
            [len(part) for part in parts],
            lambda results: merge_results(results, ops.GenerateResult),
            self._outbox,
        )

    @checked
    def rollout(
        self,
        prompts: Iterable[ops.Prompt],
        sampling: ops.SamplingParams,
        num_samples: int = 1,
    ) -> Rollout:
        """Sample continuations like `generate`, without delaying `update_weights`.

        If an update arrives during the rollout, its samples continue with the new weights from
        their next token. The result lists which version sampled which tokens. The switch depends on
        timing, so two runs of such a rollout may differ.
        """
        packed = [pack_prompt(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        return self._rollouts.begin(packed, sampling, num_samples)

    @checked
    async def update_weights(
        self, published: OperationHandle[ops.PublishWeightsResult], *, keeps_kv: bool = False
    ) -> ops.SyncWeightsResult:
        """Sync a version as soon as it is published.

        Rollouts continue until the sync, and with the new weights after it. Operations submitted
        with `generate` finish first, with the old weights.

        Args:   keeps_kv: see `sync_weights`.
        Raises: PhaseloomError: the version cannot be published or synced.
        """
        await published
        # Submit the sync first: the continuations of interrupted rollouts must be ordered after it.
        synced = self.sync_weights(published, keeps_kv=keeps_kv)
        await self._rollouts.interrupt()
        return await synced

    @checked
    def forward(
        self,
        batch: Iterable[ops.Datum],
        *,
        weights: Weights | None = None,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.ForwardResult]:
        """Compute the log-probabilities of each sample's targets.

        Args:   weights: see `generate`.
        """
        named, after = self._resolve_weights(weights, after)
        parts = split_batch(batch)
        return self._submit(
            [ops.Forward(part, named) for part in parts], after, ops.ForwardResult, timeout_s
        )

    def _resolve_weights(
        self, weights: Weights | None, after: Dependencies
    ) -> tuple[ops.NamedWeights | None, Dependencies]:
        """Return the name of the weights to read, and `after` extended by the operation that
        publishes them."""
        if weights is None or isinstance(weights, ops.NamedWeights):
            return weights, after
        _check_publishes(weights, "weights")
        named, job = weights.ref, weights.job
        if job == self._job.job:
            return ops.NamedWeights(named.deployment, named.seq), [named, *after]
        return ops.NamedWeights(named.deployment, named.seq, job), after

    @checked
    def forward_backward(
        self,
        batch: Iterable[ops.Datum],
        loss: ops.Loss | str,
        *,
        clip_low: float = 0.8,
        clip_high: float = 1.2,
        beta: float = 0.05,
        logprobs: bool = False,
        entropy: bool = False,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.ForwardBackwardResult]:
        """Add the gradients of a loss over the batch. The result has the loss's metrics.

        Args:   clip_low, clip_high: parameters of the losses `ppo` and `cispo`.
                beta: parameter of the loss `dro`.
                logprobs: also return the log-probabilities of the targets, as `forward` does.
                entropy: also return the metric `entropy:sum`.
        """
        if loss not in list(ops.Loss):
            raise CallerError(
                f"unknown loss {loss!r}", field="loss", remedy=f"use one of {', '.join(ops.Loss)}"
            )
        kind = ops.Loss(loss)
        parts = split_batch(batch)
        return self._submit(
            [
                ops.ForwardBackward(part, kind, clip_low, clip_high, logprobs, beta, entropy)
                for part in parts
            ],
            after,
            ops.ForwardBackwardResult,
            timeout_s,
        )

    @checked
    def optim_step(
        self,
        adam: ops.AdamParams,
        *,
        allow_partial: bool = False,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.OptimStepResult]:
        """Make one AdamW step with the accumulated gradients. The result has the step's metrics.

        Args:   allow_partial: step even if a `forward_backward` since the last step has failed.
        """
        args = ops.OptimStep(adam, allow_partial)
        return self._submit([args], after, ops.OptimStepResult, timeout_s)

    @checked
    def publish_weights(
        self,
        *,
        ttl_s: float = 0.0,
        allow_nonfinite: bool = False,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.PublishWeightsResult]:
        """Take an immutable version of the weights, which other deployments can sync.

        Args:   ttl_s: how long operations can still name the version as their `weights` after newer
                ones are published. The time counts from now, and again from the end of each
                operation that named the version.
                allow_nonfinite: publish even if weights are NaN or infinite.
        """
        args = ops.PublishWeights(ttl_s, allow_nonfinite)
        published = self._submit([args], after, ops.PublishWeightsResult, timeout_s)
        self._versions.append(published.ref.seq)
        return published

    @checked
    def sync_weights(
        self,
        published: OperationHandle[ops.PublishWeightsResult],
        *,
        keeps_kv: bool = False,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.SyncWeightsResult]:
        """Replace the weights with a published version, as soon as it is published.

        Args:   keeps_kv: whether interrupted samples keep their KV cache, computed with the old
                weights, instead of recomputing it. Needs a deployment with a `prefix_cache`.
        """
        _check_publishes(published, "published")
        if published.job != self._job.job:
            raise CallerError(
                f"{published.key} belongs to another job",
                field="published",
                remedy="sync a version of this job; `generate` and `forward` can read versions of "
                "other jobs through `weights`",
            )
        source = published.ref
        args = ops.SyncWeights(source.deployment, source.seq, keeps_kv)
        self._rollouts.version = source.seq
        return self._submit([args], [source, *after], ops.SyncWeightsResult, timeout_s)

    @checked
    def save_state(
        self,
        name: str,
        *,
        controller_blob: bytes = b"",
        checkpoints: Mapping[str, str] | None = None,
        keep: int = 0,
        ttl_s: float = 0.0,
        overwrite: bool = False,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.SaveStateResult]:
        """Write a checkpoint under the tenant's root while later operations run.

        Args:   controller_blob: this program's own state, at most 1 MiB. A checkpoint with a blob
                    becomes the job's latest, which `attach` returns to the next controller.
                checkpoints: the checkpoints of the job's other deployments that belong to this one,
                    as deployment → name. Save those first and list their handles in `after`.
                keep: number of this deployment's checkpoints to retain once this one is durable,
                    including this one. Only checkpoints saved with a `keep` count, and older ones
                    among them are deleted. A checkpoint that the job may fall back to is never
                    deleted. 0: later saves never delete this checkpoint.
                ttl_s: how long to keep the checkpoint once it is durable. It stays longer while the
                    job may fall back to it. 0: until it is deleted.
                overwrite: whether to replace a checkpoint of the same name. The job must not be
                    able to fall back to that checkpoint.
        """
        args = ops.SaveState(name, controller_blob, dict(checkpoints or {}), keep, ttl_s, overwrite)
        return self._submit([args], after, ops.SaveStateResult, timeout_s)

    @checked
    def delete_checkpoint(
        self, name: str, *, after: Dependencies = (), timeout_s: float = 0.0
    ) -> OperationHandle[ops.DeleteCheckpointResult]:
        """Remove a checkpoint of this deployment. Await its `save_state` first.

        The operation is refused if the job may fall back to the checkpoint, that is, for the latest
        two with a controller blob. Deployments that have loaded the checkpoint keep its files until
        they no longer need them. `Mesh.delete_checkpoint` does the same outside the order of
        operations, even after the job has ended.
        """
        args = ops.DeleteCheckpoint(name)
        return self._submit([args], after, ops.DeleteCheckpointResult, timeout_s)

    @checked
    def load_state(
        self,
        name: str,
        *,
        source: str = "",
        optimizer: bool = True,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[ops.LoadStateResult]:
        """Replace the whole state with a checkpoint.

        Args:   source: the `<job>/<deployment>` of this tenant that saved the checkpoint; empty:
                    this deployment. It must have the same model, but may have another layout or
                    backend.
                optimizer: whether to load the optimizer's state too. Otherwise the optimizer starts
                    from its initial state.
        """
        self._rollouts.version = 0
        args = ops.LoadState(name, source, optimizer)
        return self._submit([args], after, ops.LoadStateResult, timeout_s)

    @checked
    def submit(
        self,
        seq: int,
        id: str,
        args: ops.Args | list[ops.Args],
        *,
        after: Dependencies = (),
        timeout_s: float = 0.0,
    ) -> OperationHandle[Any]:
        """Submit an operation under a number that the caller chose.

        Operations run in the order of their numbers, not in the order of submission. A number that
        is never submitted blocks all later ones. Submitting the same operation again, in a later
        session of the job, gives the same outcome. The arrays of the result are packed; `int32s`
        and `float32s` unpack them.

        Args:   id: unique name of the operation; reuse it only to submit the same operation again.
                args: the arguments. A list has the parts of one batch (`split_batch`); they use
                    the numbers from `seq` on, and their results are merged.
        Raises: CallerError: the number is below 1 or has too many digits, or a part is too large
                for one message. No number is used then.
        """
        refs = self._refs(after)
        parts = args if isinstance(args, list) else [args]
        messages = []
        for index, part_args in enumerate(parts):
            key = parse_operation_key(f"{self._job}.{self.name}.{seq + index}")
            part_id = f"{id}.{index}" if index else id
            payload = encode(ops.Operation(part_id, self._session, part_args, refs, timeout_s))
            messages.append((key, part_id, ops.kind_of(part_args), payload))
        self._outbox.check_room(*(len(payload) for *_, payload in messages))
        # Automatic numbers continue above the caller's.
        self._next_seq = max(self._next_seq, seq + len(parts))
        submitted = [OperationPart(*message) for message in messages]
        for part in submitted:
            self._outbox.submit(part)
        return OperationHandle(submitted, merge_packed, self._outbox)

    def _refs(self, after: Dependencies) -> list[ops.After]:
        refs: list[ops.After] = []
        for i, dependency in enumerate(after):
            check_type(dependency, OperationHandle | ops.After, f"after[{i}]")
            if isinstance(dependency, ops.After):
                refs.append(dependency)
                continue
            if dependency.job != self._job.job:
                # An `After` carries no job, so here it would name an operation of this job.
                raise CallerError(
                    f"{dependency.key} belongs to another job",
                    field=f"after[{i}]",
                    remedy="await it before this call",
                )
            refs += dependency.refs
        return refs

    def _submit(
        self,
        parts: list[ops.Args],
        after: Dependencies,
        result: type[R],
        timeout_s: float,
    ) -> OperationHandle[R]:
        submitted = self._submit_parts(parts, after, timeout_s)
        return OperationHandle(
            submitted, lambda results: merge_results(results, result), self._outbox
        )

    def _submit_parts(
        self, parts: list[ops.Args], after: Dependencies, timeout_s: float
    ) -> list[OperationPart]:
        refs = self._refs(after)
        messages = []
        for args in parts:
            id = uuid.uuid4().hex
            payload = encode(ops.Operation(id, self._session, args, refs, timeout_s))
            messages.append((id, ops.kind_of(args), payload))
        # Check the room for all parts before any of them reserves a `seq`.
        self._outbox.check_room(*(len(payload) for _, _, payload in messages))
        submitted = []
        for id, kind, payload in messages:
            key = OperationKey(self._job.tenant, self._job.job, self.name, str(self._next_seq))
            self._next_seq += 1
            part = OperationPart(key, id, kind, payload)
            self._outbox.submit(part)
            submitted.append(part)
        return submitted


class Job:
    """One session of a job, from `Mesh.submit_job` or `Mesh.attach`."""

    def __init__(self, name: str, session: int, deployments: dict[str, Deployment]) -> None:
        self.name = name
        self.session = session
        self._deployments = deployments

    @checked
    def deployment(self, name: str) -> Deployment:
        """Return the deployment with this name.

        Raises: CallerError: the job has no such deployment.
        """
        try:
            return self._deployments[name]
        except KeyError:
            raise CallerError(
                f"job {self.name} has no deployment {name!r}",
                code=Code.NOT_FOUND,
                field="name",
                remedy=f"use one of {', '.join(sorted(self._deployments))}",
            ) from None


def _check_publishes(handle: OperationHandle[Any], field: str) -> None:
    if handle.kind != _PUBLISH:
        raise CallerError(
            f"expected the handle of a {_PUBLISH}, got {handle.key}, a {handle.kind}",
            field=field,
            remedy=f"pass the handle that `{_PUBLISH}` returned",
        )


def merge_results(parts: list[ops.Result], expected: type[R]) -> R:
    """Combine the results of an operation's parts, given in order.

    Raises: InternalError: a part has a result of another kind.
    """
    matching: list[R] = [part for part in parts if isinstance(part, expected)]
    if len(matching) != len(parts):
        names = ", ".join(type(part).__name__ for part in parts)
        raise InternalError(f"expected results of type {expected.__name__}, got {names}")
    combined: R = KINDS[ops.result_kind(matching[0])].as_lists(merge_packed([*matching]))
    return combined


def merge_packed(parts: list[Any]) -> Any:
    """Combine the results of an operation's parts, given in order, without unpacking arrays."""
    if len(parts) == 1:
        return parts[0]
    kind = KINDS[ops.result_kind(parts[0])]
    assert kind.merge is not None, f"{kind.name} is never split"
    return kind.merge(parts)
