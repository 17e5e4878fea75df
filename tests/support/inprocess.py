"""A job whose backends run right here: the oracle that the mesh's results are compared with.

It offers the calls of `phaseloom.client`'s jobs and deployments, so that one controller program
runs on both. Operations run one after the other in one thread, in the order they were made: an
operation names only earlier ones in `after`, so that this order is one that the contract allows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.operations import (
    AdamParams,
    Datum,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    LoadStateResult,
    Loss,
    OptimStep,
    OptimStepResult,
    Prompt,
    PublishWeightsResult,
    SamplingParams,
    SaveStateResult,
    SyncWeightsResult,
)
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec
from phaseloom.common.contract.state_layout import Role
from phaseloom.worker.backends import backend_factory
from phaseloom.worker.backends.base import Backend
from phaseloom.worker.state.copying import clear
from phaseloom.worker.state.heap import Heap
from tests.support.looker import Looker
from tests.support.saved import load, save

R_co = TypeVar("R_co", covariant=True)
VersionId = tuple[str, int]
"""(policy, seq of the publish)"""


@dataclass(frozen=True)
class Handle(Generic[R_co]):
    """A submitted operation: await it for its result, or name it in another's `after`."""

    deployment: str
    seq: int
    future: Future[Any] = field(repr=False)

    def __await__(self) -> Generator[Any, None, R_co]:
        result: R_co = yield from asyncio.wrap_future(self.future).__await__()
        return result


@dataclass(frozen=True)
class _Version:
    weights: bytes
    digest: str


class _Versions:
    """Weights versions: the newest of a policy is kept, and all that are held or to be synced."""

    def __init__(self) -> None:
        self._cuts: dict[VersionId, _Version] = {}
        self._queued: Counter[VersionId] = Counter()
        self._held: dict[str, VersionId] = {}

    def add(self, version: VersionId, cut: _Version) -> None:
        kept = {*self._queued.keys(), *self._held.values()}
        self._cuts = {
            other: self._cuts[other]
            for other in self._cuts
            if other[0] != version[0] or other in kept
        }
        self._cuts[version] = cut

    def queue_sync(self, version: VersionId) -> None:
        self._queued[version] += 1

    def sync(self, version: VersionId, deployment: str) -> _Version:
        self._queued -= Counter([version])
        self._held[deployment] = version
        return self._cuts[version]


def _use_one_torch_thread() -> None:
    """As every device of the mesh does: results depend on the number of threads, bit for bit."""
    torch.set_num_threads(1)


class Job:
    """Builds a deployment on a heap of its own for each spec; close it, or use it in `with`.

    Args: root: where `save_state` writes; without one it is refused.
    """

    def __init__(self, spec: JobSpec, root: Path | None = None) -> None:
        self._root = root
        self.versions = _Versions()
        self._thread = ThreadPoolExecutor(1, "inprocess", initializer=_use_one_torch_thread)
        self._deployments = {
            d.name: self._thread.submit(Deployment, self, d).result() for d in spec.deployments
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what was submitted, then end the backends, last built first."""
        self._thread.shutdown(wait=True)
        for deployment in reversed(self._deployments.values()):
            deployment.backend.close()

    def deployment(self, name: str) -> Deployment:
        return self._deployments[name]

    def _submit(self, run: Callable[[], object], after: Iterable[Handle[object]]) -> Future[Any]:
        needed = [handle.future for handle in after]

        def checked() -> object:
            if any(future.exception() for future in needed):
                raise CallerError(
                    "an operation that this one comes after has failed",
                    code=Code.FAILED_PRECONDITION,
                    field="after",
                )
            return run()

        return self._thread.submit(checked)


class Deployment:
    """One backend and its heap. Every call returns at once; the next `seq` is its own."""

    def __init__(self, job: Job, spec: DeploymentSpec) -> None:
        factory = backend_factory(spec.backend)
        self.name = spec.name
        self.heap = Heap(factory.plan(spec).heap_bytes)
        self.backend: Backend = factory(spec, self.heap)
        weights = [slot for slot in self.backend.slots if slot.role is Role.WEIGHT]
        self._weights = slice(0, max(slot.offset + slot.num_bytes for slot in weights))
        self._job = job
        self._seq = 0

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams,
        num_samples: int = 1,
        *,
        after: Iterable[Handle[object]] = (),
    ) -> Handle[GenerateResult]:
        args = Generate(list(prompts), sampling, num_samples)

        def run() -> GenerateResult:
            self.backend.check_generate(args)
            watch = Looker()
            self.backend.generate([args], watch)
            result = watch.results[0]
            assert result is not None
            return result

        return self._do("generate", run, after)

    def forward(
        self, batch: Iterable[Datum], *, after: Iterable[Handle[object]] = ()
    ) -> Handle[ForwardResult]:
        args = Forward(list(batch))

        def run() -> ForwardResult:
            self.backend.check_forward(args)
            return self.backend.forward(args)

        return self._do("forward", run, after)

    def forward_backward(
        self,
        batch: Iterable[Datum],
        loss: Loss | str,
        *,
        clip_low: float = 0.8,
        clip_high: float = 1.2,
        after: Iterable[Handle[object]] = (),
    ) -> Handle[ForwardBackwardResult]:
        args = ForwardBackward(list(batch), Loss(loss), clip_low, clip_high)

        def run() -> ForwardBackwardResult:
            self.backend.check_forward_backward(args)
            return self.backend.forward_backward(args)

        return self._do("forward_backward", run, after)

    def optim_step(
        self, adam: AdamParams, *, after: Iterable[Handle[object]] = ()
    ) -> Handle[OptimStepResult]:
        return self._do("optim_step", lambda: self.backend.optim_step(OptimStep(adam)), after)

    def publish_weights(
        self, *, after: Iterable[Handle[object]] = ()
    ) -> Handle[PublishWeightsResult]:
        seq = self._seq + 1

        def run() -> PublishWeightsResult:
            weights = bytes(self.heap.buffer[self._weights])
            digest = self.backend.weights_sha256()
            self._job.versions.add((self.name, seq), _Version(weights, digest))
            return PublishWeightsResult(seq, digest, len(weights))

        return self._do("publish_weights", run, after)

    def sync_weights(
        self, published: Handle[PublishWeightsResult], *, after: Iterable[Handle[object]] = ()
    ) -> Handle[SyncWeightsResult]:
        """Bring the weights that a `publish_weights` of this job cuts; comes after it."""

        self._job.versions.queue_sync((published.deployment, published.seq))

        def run() -> SyncWeightsResult:
            cut = self._job.versions.sync((published.deployment, published.seq), self.name)
            self.heap.buffer[self._weights] = cut.weights
            clear(self.heap.buffer[self._weights.stop :])
            self.backend.weights_changed()
            return SyncWeightsResult(published.seq, cut.digest)

        return self._do("sync_weights", run, (*after, published))

    def save_state(
        self, name: str, after: Iterable[Handle[object]] = ()
    ) -> Handle[SaveStateResult]:
        def run() -> SaveStateResult:
            directory = self._directory(name)
            directory.mkdir(parents=True)
            return SaveStateResult(str(directory), save(self.backend, self.heap, directory))

        return self._do("save_state", run, after)

    def load_state(
        self, name: str, after: Iterable[Handle[object]] = ()
    ) -> Handle[LoadStateResult]:
        def run() -> LoadStateResult:
            load(self.backend, self.heap, self._directory(name))
            return LoadStateResult(self.backend.weights_sha256())

        return self._do("load_state", run, after)

    def _directory(self, name: str) -> Path:
        if self._job._root is None:
            raise CallerError("this job has no root to save under", code=Code.FAILED_PRECONDITION)
        return self._job._root / self.name / name

    def _do(
        self, kind: str, run: Callable[[], R_co], after: Iterable[Handle[object]]
    ) -> Handle[R_co]:
        if kind not in self.backend.kinds:
            raise CallerError(f"deployment {self.name!r} does not do {kind}", field="args.type")
        self._seq += 1
        return Handle(self.name, self._seq, self._job._submit(run, after))
