"""A tenant's models as jobs of the mesh: trained models, and samplers of fixed weights.

A trained model is a job with the deployment `policy`, and `sampler` if it trains all weights.
Models that train adapters on one base share one sampler, which belongs to the tenant. The SDK
numbers the calls of a model from 1, and the mesh numbers the operations of `policy` the same way.
Order, retries and results after a restart are therefore the mesh's, not the gateway's.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from phaseloom.client import (
    Adapter,
    CallerError,
    CheckpointArchive,
    Code,
    Deployment,
    DeploymentSpec,
    GenerateHandle,
    Mesh,
    MeshJob,
    ModelSpec,
    NamedWeights,
    OperationHandle,
    Prompt,
    PublishWeightsResult,
    ResourceError,
    SamplingParams,
    outcome_of,
)
from phaseloom.common.contract.api import SavedCheckpoint
from phaseloom.common.contract.errors import ErrorInfo, to_exception
from phaseloom.common.contract.modelconfig import context_tokens
from phaseloom.common.contract.specs import Batching, RegisteredModel

_T = TypeVar("_T", "TrainedModel", "VersionedSampler", "SharedSampler")

POLICY = "policy"
SAMPLER = "sampler"


class Version(NamedTuple):
    """Weights to sample from: a checkpoint."""

    name: str
    source: str = ""
    """The `<job>/<deployment>` that saved the checkpoint. Empty: the sampler itself."""
    sha256: str = ""
    """Digest of the weights, if another checkpoint may replace this one under its name."""


BASE = Version("base")
"""The weights that a base's sampler starts with."""
_SAMPLER_JOBS = re.compile(r"(base|adapters)-[0-9a-f]{16}-[0-9]+\Z")
LEAST_ROOM = 32
"""Minimum rank that a shared sampler has room for: the SDK's default rank."""


@dataclass(frozen=True)
class Backends:
    """The backends of a gateway's deployments, and their memory."""

    train: str = "fsdp"
    rollout: str = "sampler"
    train_pool: str = "train"
    rollout_pool: str = "rollout"
    scratch_bytes: int = 0
    """Bytes of device memory for vLLM's KV cache, in each sampler."""
    max_adapters: int = 8
    """Adapters that a shared sampler keeps on its device."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters can be trained and sampled."""
        return self.train in {"fsdp", "megatron"} and self.rollout in {"sampler", "vllm"}

    def policy(self, model: ModelSpec) -> DeploymentSpec:
        return DeploymentSpec(POLICY, self.train_pool, self.train, model, trainable=True)

    def sampler(self, model: ModelSpec) -> DeploymentSpec:
        return DeploymentSpec(
            SAMPLER,
            self.rollout_pool,
            self.rollout,
            model,
            batching=Batching.SHARED,
            scratch_bytes=self.scratch_bytes,
        )

    def shared_sampler(self, model: ModelSpec) -> DeploymentSpec:
        return replace(self.sampler(model), max_adapters=self.max_adapters)


def context_of(base: RegisteredModel) -> int:
    """Return the maximum sequence length from a model's configuration."""
    context = context_tokens(base.config)
    if context is None:
        raise CallerError(
            f"the config of {base.name!r} does not say how long a sequence may be",
            code=Code.FAILED_PRECONDITION,
            field="model",
            remedy="register it with max_position_embeddings",
        )
    return context


@dataclass(frozen=True)
class Draw:
    """A sampling request without its weights. The fields are the arguments of `generate`."""

    prompt: Prompt
    sampling: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0
    stream: bool = False

    def by(self, deployment: Deployment, weights: NamedWeights | None = None) -> GenerateHandle:
        """Submit the `generate` to a deployment. Args: weights: used instead of the deployment's
        own."""
        return deployment.generate(
            [self.prompt],
            self.sampling,
            self.num_samples,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            stream=self.stream,
            weights=weights,
        )


class VersionedSampler:
    """A sampler that loads the weights that the next request needs.

    Its checkpoints are the versions. Requests for the loaded weights run in one batch. Another
    version is loaded once earlier requests have ended.
    """

    def __init__(self, job: MeshJob) -> None:
        self.job = job
        self._deployment: Deployment = job.deployment(SAMPLER)
        self._holds: Version | None = None
        """The version that the sampler has loaded, or None if unknown."""
        self._lock = asyncio.Lock()

    async def generate(self, version: Version, draw: Draw) -> GenerateHandle:
        """Submit a `generate` with a version's weights.

        Raises: CallerError: NOT_FOUND: the version is gone.
        """
        async with self._lock:
            if self._holds != version:
                self._holds = None
                loaded = self._deployment.load_state(
                    version.name, source=version.source, optimizer=False
                )
                await outcome_of(loaded)
                self._holds = version
            return draw.by(self._deployment)

    async def take(
        self,
        published: OperationHandle[PublishWeightsResult],
        version: str,
        keep: int,
        ttl_s: float = 0.0,
    ) -> None:
        """Sync published weights and save them as a version.

        Args: keep, ttl_s: as in `save_state`.
        """
        await outcome_of(published)
        async with self._lock:
            self._holds = None
            await outcome_of(self._deployment.sync_weights(published))
            self._holds = Version(version)
            saved = self._deployment.save_state(version, keep=keep, ttl_s=ttl_s)
        await outcome_of(saved)

    async def keep(self, version: str) -> None:
        """Save the sampler's initial weights as a version."""
        async with self._lock:
            await outcome_of(self._deployment.save_state(version))
            self._holds = Version(version)


class SharedSampler:
    """A sampler for all adapters of a tenant on one base, several in one batch."""

    def __init__(self, job: MeshJob) -> None:
        self.job = job
        self._deployment: Deployment = job.deployment(SAMPLER)

    async def generate(self, version: Version, draw: Draw) -> GenerateHandle:
        """Submit a `generate` with a version's weights."""
        job, _, deployment = version.source.partition("/")
        named = NamedWeights(deployment, job=job, checkpoint=version.name)
        return draw.by(self._deployment, named)


class TrainedModel:
    """A trained model, with this gateway's session of its job."""

    def __init__(self, job: MeshJob, adapter: Adapter | None) -> None:
        self.job = job
        self.policy: Deployment = job.deployment(POLICY)
        self.sampler = VersionedSampler(job) if adapter is None else None
        """The model's own sampler. None: it uses the tenant's shared sampler."""


class Models:
    """A tenant's models whose jobs this gateway has attached to."""

    def __init__(self, mesh: Mesh, backends: Backends) -> None:
        self._mesh = mesh
        self._backends = backends
        self._trained: dict[str, asyncio.Task[TrainedModel]] = {}
        self._bases: dict[str, asyncio.Task[VersionedSampler]] = {}
        self._shared: dict[str, asyncio.Task[SharedSampler]] = {}

    @property
    def has_adapters(self) -> bool:
        return self._backends.has_adapters

    async def train(self, job: str, base: str, adapter: Adapter | None) -> TrainedModel:
        """Create a model, or return the one that an earlier identical call created.

        Raises: PhaseloomError: the job was refused or failed to start.
        """

        async def make() -> TrainedModel:
            model = ModelSpec(registered=base, adapter=adapter)
            specs = [self._backends.policy(model)]
            if adapter is None:
                specs.append(self._backends.sampler(model))
            try:
                model_job = await self._submitted(job, specs)
            except CallerError as error:
                if error.info.code is not Code.ALREADY_EXISTS:
                    raise
                # An earlier gateway has started to create it.
                model_job = await self._mesh.attach(job, numbered=[POLICY])
            return TrainedModel(model_job, adapter)

        return await _once(self._trained, job, make)

    async def trained(self, job: str, adapter: Adapter | None) -> TrainedModel:
        """Return a model that this gateway or an earlier one created.

        Raises: PhaseloomError: its job has ended or never existed.
        """

        async def attach() -> TrainedModel:
            return TrainedModel(await self._mesh.attach(job, numbered=[POLICY]), adapter)

        return await _once(self._trained, job, attach)

    async def base_sampler(self, base: RegisteredModel) -> VersionedSampler:
        """Return the tenant's sampler of a base, for whole weights that no trained model's own
        sampler has."""
        name = f"base-{_digest(base)}"

        async def make() -> VersionedSampler:
            model = ModelSpec(registered=base.name)
            job = await self._submit_or_attach(name, [self._backends.sampler(model)])
            sampler = VersionedSampler(job)
            if job.deployment(SAMPLER).next_seq == 1:
                await sampler.keep(BASE.name)
            return sampler

        return await _once(self._bases, name, make)

    async def shared_sampler(self, base: RegisteredModel, adapter: Adapter) -> SharedSampler:
        """Return the tenant's sampler for adapters like this one: the same base and targets, any
        alpha and seed, and any rank up to the next power of two."""
        rank = LEAST_ROOM
        while rank < adapter.rank:
            rank *= 2
        room = Adapter(rank, targets=adapter.targets)
        name = f"adapters-{_digest(base, room)}"

        async def make() -> SharedSampler:
            model = ModelSpec(registered=base.name, adapter=room)
            specs = [self._backends.shared_sampler(model)]
            return SharedSampler(await self._submit_or_attach(name, specs))

        return await _once(self._shared, name, make)

    async def _submitted(self, job: str, specs: list[DeploymentSpec]) -> MeshJob:
        """Submit a job. Raises: PhaseloomError: as `Mesh.submit_job`. CallerError:
        FAILED_PRECONDITION: no node has room for the model, even alone."""
        try:
            return await self._mesh.submit_job(job, specs)
        except ResourceError as error:
            if not is_for_good(error.info):
                raise
            # Clients retry by themselves if there was no room, so a permanent lack needs another
            # code.
            for_good = replace(error.info, code=Code.FAILED_PRECONDITION, field="model")
            raise to_exception(for_good) from error

    async def _submit_or_attach(self, name: str, specs: list[DeploymentSpec]) -> MeshJob:
        """Return the running job with this name, attaching to an existing one or submitting it.

        The name gets a number, increased for each earlier job of that name that has ended.
        """
        for number in itertools.count():
            job = f"{name}-{number}"
            try:
                return await self._submitted(job, specs)
            except CallerError as error:
                if error.info.code is not Code.ALREADY_EXISTS:
                    raise
            try:
                return await self._mesh.attach(job)
            except CallerError as ended:
                if ended.info.code is not Code.FAILED_PRECONDITION:
                    raise
        raise AssertionError("numbers do not end")

    async def sizes(self, job: str = "") -> dict[tuple[str, str], int]:
        """Return the size of each checkpoint in bytes, by (source, name).

        Args:   job: only checkpoints of this job. Empty: of all jobs.
        Raises: PhaseloomError: the mesh does not answer.
        """
        listed = await self._mesh.list_checkpoints(job)
        return {(f"{c.job}/{c.deployment}", c.name): c.num_bytes for c in listed.checkpoints}

    async def native(self) -> list[SavedCheckpoint]:
        """Return the checkpoints of registered models, except those of a gateway's samplers.

        Raises: PhaseloomError: the mesh does not answer.
        """
        listed = await self._mesh.list_checkpoints()
        return [
            saved
            for saved in listed.checkpoints
            if saved.model and _SAMPLER_JOBS.match(saved.job) is None
        ]

    async def checkpoint(self, job: str, deployment: str, name: str) -> SavedCheckpoint:
        """Describe a checkpoint. Raises: CallerError: NOT_FOUND, or a name is invalid."""
        return await self._mesh.show_checkpoint(job, deployment, name)

    async def delete(self, source: str, name: str) -> None:
        """Remove a checkpoint's files, if they still exist.

        Args:   source: the `<job>/<deployment>` that saved it.
        Raises: PhaseloomError: the files could not be removed.
        """
        try:
            await self._mesh.delete_checkpoint(*_saver(source), name)
        except CallerError as error:
            if error.info.code is not Code.NOT_FOUND:
                raise

    async def expire(self, source: str, name: str, ttl_s: float) -> None:
        """Set a checkpoint's time to live, in seconds from now.

        Raises: CallerError: NOT_FOUND, or an invalid time.
        """
        await self._mesh.expire_checkpoint(*_saver(source), name, ttl_s)

    async def archive(self, source: str, name: str, file: str = "") -> CheckpointArchive:
        """Open a checkpoint as a tar file, or one of its files. Raises: CallerError: NOT_FOUND."""
        return await self._mesh.archive_checkpoint(*_saver(source), name, file)

    async def files(self, source: str, name: str) -> list[str]:
        """Return the names of a checkpoint's files that other programs read: not the training
        state, and not the record of the operation. Raises: CallerError: NOT_FOUND."""
        saved = await self._mesh.show_checkpoint(*_saver(source), name)
        return [file for file in saved.files if not is_internal(file)]

    async def finish(self, job: str) -> None:
        """End a model's job. Its checkpoints stay."""
        self._trained.pop(job, None)
        await self._mesh.finish(job)


def is_internal(file: str) -> bool:
    """Return whether only the mesh reads this file of a checkpoint."""
    is_training_state = file.startswith("training") and ".safetensors" in file
    return is_training_state or file == "operation.json"


def _saver(source: str) -> tuple[str, str]:
    job, _, deployment = source.partition("/")
    return job, deployment


def _digest(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


def is_for_good(error: ErrorInfo) -> bool:
    """Return whether a job that found no room would not fit on empty nodes either.

    If the error has numbers, they decide. An error without numbers that names a field is about the
    job's spec, which no node could hold. Otherwise room may become available, as on the disk of the
    NATS server.
    """
    if error.code is not Code.RESOURCE_EXHAUSTED:
        return False
    needed, budget = (error.details.get(name) for name in ("needed_bytes", "budget_bytes"))
    if needed is None or budget is None:
        return bool(error.field)
    return int(needed) > int(budget)


async def _once(
    tasks: dict[str, asyncio.Task[_T]], key: str, make: Callable[[], Coroutine[Any, Any, _T]]
) -> _T:
    """Return the result of `make`, which runs once for all concurrent callers.

    It runs again after a failure, and once the session of the result's job is over.
    """
    job_task = tasks.get(key)
    is_gone = job_task is None or (
        job_task.done() and (job_task.exception() is not None or job_task.result().job.is_closed)
    )
    if is_gone:
        tasks[key] = asyncio.create_task(make())
    return await asyncio.shield(tasks[key])
