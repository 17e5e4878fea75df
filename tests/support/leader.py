"""The far side of the mesh for tests of the near side: job API and WPG leader in one.

It speaks the contract on the real bus (decision log in, DONE out) and computes answers that tell a
test what it was asked. Operations run as they come; `hold` keeps them back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import nats.errors

from phaseloom.common.contract import streams
from phaseloom.common.contract.api import (
    DeploymentStatus,
    Explanation,
    JobRequest,
    JobStatus,
    OperationRequest,
    PhaseRequest,
    SubmitJob,
)
from phaseloom.common.contract.arrays import int32s, length, pack_float32s, pack_int32s
from phaseloom.common.contract.codec import content_type_of, decode, encode
from phaseloom.common.contract.errors import CallerError, Code, ResourceError
from phaseloom.common.contract.events import QueuedOperation
from phaseloom.common.contract.ids import JobKey, OperationKey
from phaseloom.common.contract.operations import (
    Args,
    Completion,
    DeleteCheckpoint,
    DeleteCheckpointResult,
    Forward,
    ForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    Generate,
    GenerateResult,
    LoadState,
    LoadStateResult,
    Operation,
    OptimStep,
    OptimStepResult,
    Outcome,
    PublishWeights,
    PublishWeightsResult,
    Result,
    SaveState,
    SaveStateResult,
    Sequence,
    SyncWeights,
    SyncWeightsResult,
)
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.link import AlreadyStored
from phaseloom.common.transport.services import serve_api


@dataclass
class Leader:
    bus: Bus
    arrived: list[QueuedOperation] = field(default_factory=list)
    """In the order of the decision log."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    phases: list[PhaseRequest] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    """Operations that end CANCELLED where they have not run yet."""
    num_completed: int = 0
    """Of `arrived`: the first so many have their outcome."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Leader]:
        self.go.set()
        service = await serve_api(
            self.bus,
            "scheduler",
            {
                "job.submit": (SubmitJob, self._submit),
                "job.status": (JobRequest, self._status),
                "job.finish": (JobRequest, self._finish),
                "phase.declare": (PhaseRequest, self._declare),
                "operation.cancel": (OperationRequest, self._cancel),
                "operation.explain": (OperationRequest, self._explain),
            },
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._follow())
            yield self
            await lifecycle.end([task])
        await service.stop()

    def hold(self) -> None:
        self.go.clear()

    async def _follow(self) -> None:
        async with aclosing(self.bus.log.read()) as entries:
            async for entry in entries:
                if isinstance(entry.event, QueuedOperation):
                    self.arrived.append(entry.event)
                    await self.go.wait()
                    await self._complete(entry.event)
                    self.num_completed += 1

    async def _complete(self, queued: QueuedOperation) -> None:
        while True:
            try:
                return await self._try_complete(queued)
            except AlreadyStored:
                return
            except (ResourceError, nats.errors.Error):
                # The server restarts: again, as a leader would after redelivery of its permit.
                await asyncio.sleep(0.05)

    async def _try_complete(self, queued: QueuedOperation) -> None:
        if queued.error is not None:
            completion = Completion(queued.id, Outcome.FAILED, error=queued.error)
        elif str(queued.key) in self.cancelled:
            completion = Completion(queued.id, Outcome.CANCELLED)
        else:
            result = _answer(queued.key, await self._args(queued.key))
            completion = Completion(queued.id, Outcome.COMPLETED, result)
        await self.bus.publish(streams.done_subject(queued.key), completion)

    async def _args(self, key: OperationKey) -> Args:
        stored = await self.bus.stored.get(streams.ops_stream(key.tenant), streams.op_subject(key))
        assert stored is not None
        operation: Operation = decode(stored.payload, Operation, content_type_of(stored.headers))
        return operation.args

    async def _submit(self, tenant: str, request: SubmitJob) -> JobStatus:
        if request.job in self.jobs:
            raise CallerError("the job exists", code=Code.ALREADY_EXISTS, field="job")
        deployments = [
            DeploymentStatus(d.name, d.pool, "node0", "ready", 1, 1)
            for d in request.spec.deployments
        ]
        status = JobStatus(request.job, "active", deployments)
        self.jobs[request.job] = status
        await self.bus.keys.put(Bucket.VIEW, str(JobKey(tenant, request.job)), encode(status))
        return JobStatus(request.job, "submitted")

    async def _status(self, tenant: str, request: JobRequest) -> JobStatus:
        return self.jobs[request.job]

    async def _finish(self, tenant: str, request: JobRequest) -> JobStatus:
        state = "failed" if request.failed else "done"
        self.jobs[request.job] = JobStatus(request.job, state)
        return self.jobs[request.job]

    async def _declare(self, tenant: str, request: PhaseRequest) -> JobStatus:
        self.phases.append(request)
        return self.jobs[request.job]

    async def _cancel(self, tenant: str, request: OperationRequest) -> Explanation:
        answer = await self._explain(tenant, request)
        if any(queued.key == answer.key for queued in self.arrived[: self.num_completed]):
            raise CallerError("it has ended", code=Code.FAILED_PRECONDITION, field="slot")
        self.cancelled.add(str(answer.key))
        return answer

    async def _explain(self, tenant: str, request: OperationRequest) -> Explanation:
        key = OperationKey(tenant, request.job, request.deployment, request.slot)
        if not any(queued.key == key for queued in self.arrived):
            raise CallerError("it has not arrived", code=Code.NOT_FOUND)
        return Explanation(key, "optim_step", "queued", ["the test"], place=1)


def _answer(key: OperationKey, args: Args) -> Result:  # noqa: PLR0911 - one a kind
    """Says back what was asked; arrays packed, as backends send them."""
    seq = key.seq or 0
    match args:
        case Generate():
            return GenerateResult(
                [
                    [_echo(int32s(p.tokens), sample) for sample in range(args.num_samples)]
                    for p in args.prompts
                ]
            )
        case Forward():
            return ForwardResult([pack_float32s([-0.5] * length(d.targets)) for d in args.batch])
        case ForwardBackward():
            tokens = sum(length(datum.tokens) for datum in args.batch)
            return ForwardBackwardResult({"loss:sum": 1.0, "num_tokens:sum": float(tokens)})
        case OptimStep():
            return OptimStepResult({"grad_norm:mean": args.adam.learning_rate})
        case DeleteCheckpoint():
            return DeleteCheckpointResult(len(args.name))
        case PublishWeights():
            return PublishWeightsResult(seq, "digest", 1)
        case SyncWeights():
            return SyncWeightsResult(args.version, "digest")
        case SaveState():
            return SaveStateResult(f"{key.job}/{key.deployment}/{args.name}", "0" * 64)
        case LoadState():
            return LoadStateResult("0" * 64)


def _echo(tokens: list[int], sample: int) -> Sequence:
    again = [*tokens, sample]
    return Sequence(pack_int32s(again), pack_float32s([-0.25] * len(again)), "length")
