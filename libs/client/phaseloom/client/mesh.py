"""A controller's connection to the mesh, used to submit jobs and attach to them.

One task group, owned by `connect`, runs every background task. Leaving the `connect` block ends all
of them, and operations that are still open end as ABORTED.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
from opentelemetry import trace

from phaseloom.client import hooks, phases
from phaseloom.client.arguments import check_type, checked
from phaseloom.client.contact import Contact
from phaseloom.client.hooks import Hooks, PhaseBegan, PhaseEnded
from phaseloom.client.job import Deployment, Job
from phaseloom.client.operations import OperationHandle, Outbox
from phaseloom.client.phases import Phase
from phaseloom.client.trackers import Log
from phaseloom.common.contract import api
from phaseloom.common.contract.checks import check_labels, check_report
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.contract.ids import JobKey, check_name
from phaseloom.common.contract.operations import Completion
from phaseloom.common.contract.specs import Cycle, DeploymentSpec, Durability, JobSpec
from phaseloom.common.contract.streams import PREFIX
from phaseloom.common.observability import telemetry
from phaseloom.common.process import config
from phaseloom.common.transport import connection
from phaseloom.common.transport.localrun import (
    LATEST,
    RUNS,
    choose_tenant,
    newest_run,
    read_credentials,
)
from phaseloom.common.transport.natsclient import MeshClient, hand_over
from phaseloom.common.transport.natsserver import CREDENTIALS
from phaseloom.common.transport.services import call_api

log = logging.getLogger(__name__)

T = TypeVar("T")

_CREDENTIALS = (
    "the arguments of `connect`, or PHASELOOM_TENANT and PHASELOOM_PASSWORD (`phaseloom up` prints "
    "those of its tenants)"
)
_BEATS_PER_LEASE = 3
_BEAT_RETRY_S = 1.0
_CONNECTION_CHECK_S = 1.0
_PING_S = 2.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 0.5
_FIRST_NOTICE_AFTER_S = 3.0
"""How long a submitted job waits for placement before the log mentions it."""
_NOTICE_EVERY_S = 60.0
_MAX_PENDING_REPORTS = 64
"""Maximum number of reports waiting for an unreachable mesh. Further ones are dropped."""
_READY, _STOPPED = "ready", "stopped"


class ClientConfig(msgspec.Struct, frozen=True):
    """How a controller reaches the mesh, from the environment variables PHASELOOM_<FIELD>."""

    url: str = ""
    """`nats://host:port`."""
    tenant: str = ""
    """The tenant, which is also the NATS user."""
    password: str = ""


class MeshJob(Job):
    """A session of a job on the mesh. Background heartbeats keep it alive until it ends."""

    def __init__(
        self, mesh: Mesh, name: str, attached: api.Attached, outbox: Outbox, key: JobKey
    ) -> None:
        super().__init__(
            name,
            attached.session,
            {
                d.name: Deployment(key, d.name, attached.session, d.next_seq, outbox)
                for d in attached.status.deployments
            },
        )
        self.checkpoint: api.Checkpoint | None = attached.checkpoint
        """The job's latest checkpoint with a controller blob, as of the start of this session."""
        self.run = attached.status.run
        """The job's present run: its start in UTC. Curves and records belong to a run."""
        self._key = key
        self._mesh = mesh
        self._outbox = outbox
        self._phases: Counter[str] = Counter()
        """Number of open phases per pool."""
        self._declared: set[str] = set()
        """Pools on which the mesh believes a phase is open."""
        self._declaring = asyncio.Lock()
        self._reported = -1
        self._logs: list[Log] = []

    @property
    def is_closed(self) -> bool:
        """Whether this session is over: a newer session started, the job ended, or the mesh was
        unreachable for too long. `Mesh.attach` starts a new session."""
        return self._outbox.is_closed

    async def status(self) -> api.JobStatus:
        return await self._mesh.status(self.name)

    @checked
    def report(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Report named values of the job. The console draws a curve for each name.

        The call returns at once. If a report fails, it is logged and dropped, so training neither
        waits nor fails.

        Args:   values: 1 to 32 finite numbers by name, such as `{"reward": 0.4, "loss": 1.2}`.
                step: the training step of the values; None: one more than the last reported step.
        Raises: CallerError: a value is not finite, a name is invalid, or there are too many values.
        """
        step = self._reported + 1 if step is None else step
        check_report(self.name, step, values)
        self._reported = step
        numbers = {name: float(value) for name, value in values.items()}
        self._mesh.report(api.JobReport(self.name, step, numbers, self.run))
        for record in self._logs:
            try:
                record(step, numbers)
            except Exception:
                log.warning("a tracker failed at step %d of %s", step, self.name, exc_info=True)

    @checked
    def report_to(self, record: Log) -> None:
        """Call `record(step, values)` with every later report too. `tracker` returns such functions
        for TensorBoard, wandb and trackio."""
        self._logs.append(record)

    @checked
    async def explain(self, operation: OperationHandle[object]) -> api.Explanation:
        """Explain why an operation of this job waits, and predict when it starts."""
        return await operation.explain()

    @checked
    async def outcome(self, deployment: str, seq: int) -> Completion:
        """Wait for the outcome of an operation of this job, even one that an earlier session
        submitted.

        The arrays of the completion are packed.

        Raises: CallerError: NOT_FOUND: no operation has this number.
        """
        request = api.ResultRequest(self.name, deployment, str(seq))
        pause_s = _FIRST_PAUSE_S
        while (reply := await self._mesh.result(request)).completion is None:
            if reply.stored_id is None:
                raise CallerError(
                    f"{self.name}.{deployment} has no operation {seq}",
                    code=Code.NOT_FOUND,
                    field="seq",
                    remedy="check the number; the mesh also forgets operations after a while",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return reply.completion

    @checked
    async def finish(self, *, failed: bool = False, cancelled: bool = False) -> None:
        """End the job. Its models are dropped and its checkpoints stay. Open operations end as
        ABORTED.

        If another exception is on its way when this is called, as in a `finally`, an error of this
        call is logged and does not replace it.

        Args:   failed: whether the program gives up.
                cancelled: whether a person ends the job before its time.
        """
        cause = sys.exception()
        self._outbox.expect_end()
        try:
            await self._mesh.finish(self.name, failed=failed, cancelled=cancelled)
        except PhaseloomError as error:
            if cause is None:
                raise
            log.warning("job %s was not ended: %s", self.name, error)
            return
        self._outbox.end(ResourceError(f"job {self.name} is finished", code=Code.ABORTED))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: object
    ) -> None:
        """End the job, as failed after an exception.

        An interrupted program (Ctrl-C, a cancelled task) leaves the job, and so does one whose
        session is over already: another controller may have the job now.
        """
        is_failure = kind is not None and not (
            isinstance(cause, SystemExit) and cause.code in (None, 0)
        )
        if isinstance(cause, (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)):
            log.warning(
                "job %s was left as it is: attach to it to resume, or run `phaseloom cancel %s`",
                self.name,
                self._key,
            )
        elif not self._outbox.is_ending:
            await self.finish(failed=is_failure)

    async def drain(self) -> None:
        """Wait until every stored operation of the job has ended, then end the job.

        The mesh refuses new operations meanwhile. Call `stored` on the handles of recent operations
        first, so that none of them is refused.
        """
        await self._mesh.drain(self.name)
        await self._outbox.settle()
        self._outbox.end(ResourceError(f"job {self.name} is drained", code=Code.ABORTED))

    @checked
    async def create_deployment(self, spec: DeploymentSpec) -> Deployment:
        """Add a deployment to this job and wait until it is ready.

        If the deployment cannot start, the job continues. The name becomes free once the failed
        deployment is deleted.

        Raises: CallerError: ALREADY_EXISTS, or the spec is invalid. PhaseloomError: the reason why
                the deployment cannot start.
        """
        status = await self._mesh.create_deployment(api.CreateDeployment(self.name, spec))
        created = Deployment(self._key, spec.name, self.session, status.next_seq, self._outbox)
        self._deployments[spec.name] = created
        return created

    @checked
    async def delete_deployment(self, name: str) -> None:
        """Drop a deployment of this job. Its open operations end as ABORTED.

        Await the operations that matter first, and submit no further ones, since they are refused.
        Weights versions of the deployment that other deployments use are kept.
        """
        await self._mesh.delete_deployment(api.DeploymentRequest(self.name, name))
        self._deployments.pop(name, None)

    def runtime_hook(self, hook: hooks.H) -> hooks.H:
        """Call a function with this job's progress, outcomes and phases. Usable as a decorator."""
        self._outbox.hooks.add(hook)
        return hook

    # --- phases ---------------------------------------------------------------------------------

    @checked
    def phase(self, pool: str) -> Phase:
        """A phase of this job on a pool: a context manager and a decorator of async functions."""
        return Phase(pool, self)

    @checked
    async def begin_phase(self, pool: str) -> None:
        """Begin a phase on a pool. Phases on one pool may overlap; the mesh sees their union.

        Raises: CallerError: the pool's name is invalid. ResourceError: ABORTED: the session is
                over.
        """
        check_name(pool, "pool")
        self._phases[pool] += 1
        try:
            await self._declare(pool)
        except BaseException:
            self._phases[pool] -= 1
            raise
        if self._phases[pool] == 1:
            self._outbox.hooks.emit(PhaseBegan(self._key, pool))

    @checked
    async def end_phase(self, pool: str) -> None:
        self._phases[pool] -= 1
        if not self._phases[pool]:
            self._outbox.hooks.emit(PhaseEnded(self._key, pool))
        try:
            await self._declare(pool)
        except PhaseloomError as error:
            # Raising here would hide an error of the phase's body. The mesh closes the phase later.
            log.warning("the end of phase %s of %s was not declared: %s", pool, self.name, error)

    async def _declare(self, pool: str) -> None:
        """Declare to the mesh whether a phase is open on a pool, if that has changed.

        Declarations reach the mesh in the order of the calls.
        """
        async with self._declaring:
            # Read the count under the lock: it may have changed while an earlier call was sent.
            is_open = self._phases[pool] > 0
            if is_open == (pool in self._declared):
                return
            request = api.PhaseRequest(self.name, self.session, pool, is_open)
            try:
                await self._mesh.declare_phase(request)
            except ResourceError as error:
                if error.info.code is not Code.UNAVAILABLE:
                    raise
                log.warning("phase %s of %s was not declared: %s", pool, self.name, error)
            else:
                self._declared ^= {pool}


class CheckpointArchive:
    """A checkpoint as a tar file with one directory, or one of its files. Iterate over it, once, to
    read its bytes."""

    def __init__(self, num_bytes: int, read: Callable[[int], Awaitable[bytes]]) -> None:
        self.num_bytes = num_bytes
        self._read = read

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the file in parts of at most 1 MiB.

        Raises: PhaseloomError: the remaining parts cannot be read.
        """
        offset = 0
        while offset < self.num_bytes:
            part = await self._read(offset)
            offset += len(part)
            yield part


class Mesh:
    """A tenant's connection to the mesh, from `connect`."""

    def __init__(
        self, client: MeshClient, tenant: str, group: asyncio.TaskGroup, answer_timeout_s: float
    ) -> None:
        self._client = client
        self._tenant = tenant
        self._group = group
        self._answer_timeout_s = answer_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._outboxes: list[Outbox] = []
        self._num_reports = 0
        self._contact = Contact(answer_timeout_s)

    @checked
    async def submit_job(
        self,
        name: str,
        deployments: Iterable[DeploymentSpec],
        *,
        slo: float = 0.0,
        cycle: Cycle | None = None,
        duration_s: float = 0.0,
        may_wait: bool | Literal["pool"] = True,
        durability: Durability = Durability.NODE,
        exclusive: bool = False,
        config: Mapping[str, Any] | None = None,
        tags: Collection[str] = (),
        checkpoints: Collection[str] = (),
    ) -> MeshJob:
        """Submit a job and attach to it once all its deployments are ready.

        The call waits until the scheduler can place the job. Cancelling the call leaves the job
        submitted: `attach` to it later, or `finish` it.

        Args:   slo: slowdown, relative to running alone, that the job tolerates; 0: best effort.
                cycle: the cycle that the job repeats, if known. Otherwise the mesh profiles it.
                duration_s: how long the job would run alone; 0: unknown.
                may_wait: whether to wait for a placement. False: fail if there is none now. A pool
                    without any node so far is refused if other pools exist, unless this is
                    `"pool"`.
                durability: what the job's seals survive: the death of every process (`host`), a
                    restart of their node (`node`), or its loss (`remote`).
                exclusive: whether to keep operations of other jobs off a space-shared device while
                    one of this job's operations runs there.
                config: this program's own settings, which the run keeps for people: at most 16 KiB
                    as JSON.
                tags: at most 16 words by which people find the run.
                checkpoints: names that this program will save checkpoints under. If an earlier run
                    of this job has saved one of them, the job is refused now, and not at its end.
        Raises: CallerError: ALREADY_EXISTS: the job runs, or a checkpoint exists. NOT_FOUND: there
                is no such pool. The spec is invalid. ResourceError: RESOURCE_EXHAUSTED: the job
                cannot be placed. PhaseloomError: the reason why the job failed.
        """
        check_name(name, "name")
        check_labels(config or {}, tags)
        specs = list(deployments)
        for i, deployment in enumerate(specs):
            check_type(deployment, DeploymentSpec, f"deployments[{i}]")
        spec = JobSpec(
            slo,
            specs,
            cycle,
            duration_s,
            may_wait,
            durability,
            exclusive,
            dict(config or {}),
            [*tags],
        )
        if checkpoints:
            await self._check_free(name, checkpoints)
        await self._create("job.submit", api.SubmitJob(name, spec))

        next_notice_s = time.monotonic() + _FIRST_NOTICE_AFTER_S

        def is_active(status: api.JobStatus) -> bool:
            nonlocal next_notice_s
            if status.has_ended:
                raise _end_reason(status)
            if status.error is not None and time.monotonic() > next_notice_s:
                next_notice_s = time.monotonic() + _NOTICE_EVERY_S
                log.warning("%s.%s: %s", self._tenant, name, to_exception(status.error))
            return status.state == "active"

        await self._poll_until(name, is_active)
        return await self._attach(name, may_be_new=True)

    async def _check_free(self, job: str, names: Collection[str]) -> None:
        """Check that a job has no checkpoint of these names yet.

        Raises: CallerError: ALREADY_EXISTS.
        """
        for saved in (await self.list_checkpoints(job)).checkpoints:
            if saved.name in names:
                key = f"{self._tenant}.{job}.{saved.deployment}.{saved.name}"
                raise CallerError(
                    f"job {job} has a checkpoint {saved.name!r} of {saved.deployment} already",
                    code=Code.ALREADY_EXISTS,
                    field="checkpoints",
                    remedy="choose another name for the job or the checkpoint, or delete this one: "
                    f"`phaseloom checkpoint delete {key}`",
                )

    @checked
    async def attach(self, name: str, *, numbered: Collection[str] = ()) -> MeshJob:
        """Open a new session of a running job. Every older session of the job ends.

        Args:   numbered: deployments whose operations are numbered by clients of this program
                    (`Deployment.submit`), which resubmit lost operations. If any are given, the
                    newest session is resumed instead: its stored operations stay valid, and missing
                    numbers stay free. The caller must make sure that no other program uses the
                    session.
        Raises: CallerError: NOT_FOUND: there is no such job. FAILED_PRECONDITION: it has ended.
        """
        check_name(name, "name")
        return await self._attach(name, may_be_new=False, numbered=numbered)

    @checked
    async def status(self, name: str) -> api.JobStatus:
        return await self._call("job.status", api.JobRequest(name), api.JobStatus)

    @checked
    async def result(self, request: api.ResultRequest) -> api.ResultReply:
        return await self._call("result.get", request, api.ResultReply)

    @checked
    async def finish(self, name: str, *, failed: bool = False, cancelled: bool = False) -> None:
        request = api.JobRequest(name, failed, cancelled=cancelled)
        await self._call("job.finish", request, api.JobStatus)

    @checked
    async def drain(self, name: str) -> None:
        """Let a job end once its open operations have ended, and wait until it has."""
        await self._call("job.drain", api.JobRequest(name), api.JobStatus)
        await self._poll_until(name, lambda status: status.has_ended)

    @checked
    def report(self, report: api.JobReport) -> None:
        """Send a report in the background, unless too many reports are in flight."""
        if self._num_reports >= _MAX_PENDING_REPORTS:
            log.warning(
                "dropping report %d of %s: %d reports are already in flight",
                report.step,
                report.job,
                self._num_reports,
            )
            return
        self._num_reports += 1
        self._start(self._send_report(report))

    async def _send_report(self, report: api.JobReport) -> None:
        try:
            await call_api(self._client, self._tenant, "job.report", report, api.Reported)
        except PhaseloomError as error:
            log.warning("dropping report %d of %s: %s", report.step, report.job, error)
        finally:
            self._num_reports -= 1

    @checked
    async def create_deployment(self, request: api.CreateDeployment) -> api.DeploymentStatus:
        """Add a deployment to a job and wait until it is ready (see
        `MeshJob.create_deployment`)."""
        await self._create("deployment.create", request)

        def ready_status(status: api.JobStatus) -> api.DeploymentStatus:
            if status.has_ended:
                raise _end_reason(status)
            matches = [d for d in status.deployments if d.name == request.spec.name]
            if not matches or matches[0].state == _STOPPED:
                raise _end_reason(msgspec.structs.replace(status, deployments=matches))
            return matches[0]

        return ready_status(
            await self._poll_until(request.job, lambda status: ready_status(status).state == _READY)
        )

    @checked
    async def delete_deployment(self, request: api.DeploymentRequest) -> None:
        await self._call("deployment.delete", request, api.JobStatus)

    async def _poll_until(
        self, name: str, is_met: Callable[[api.JobStatus], bool]
    ) -> api.JobStatus:
        pause_s = _FIRST_PAUSE_S
        while not is_met(status := await self.status(name)):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return status

    # --- checkpoints ----------------------------------------------------------------------------

    @checked
    async def list_checkpoints(self, job: str = "", deployment: str = "") -> api.CheckpointList:
        """List this tenant's checkpoints, newest last, including those of jobs that have ended.

        Args:   job, deployment: list only the checkpoints of this job or deployment; empty: all.
        """
        request = api.ListCheckpoints(job, deployment)
        return await self._call("checkpoint.list", request, api.CheckpointList)

    @checked
    async def show_checkpoint(self, job: str, deployment: str, name: str) -> api.SavedCheckpoint:
        """Describe a checkpoint and its files. Raises: CallerError: NOT_FOUND."""
        request = api.CheckpointRequest(job, deployment, name)
        return await self._call("checkpoint.show", request, api.SavedCheckpoint)

    @checked
    async def expire_checkpoint(
        self, job: str, deployment: str, name: str, ttl_s: float
    ) -> api.SavedCheckpoint:
        """Keep a checkpoint for `ttl_s` seconds from now; 0: until it is deleted.

        Raises: CallerError: NOT_FOUND.
        """
        request = api.ExpireCheckpoint(job, deployment, name, ttl_s)
        return await self._call("checkpoint.expire", request, api.SavedCheckpoint)

    @checked
    async def delete_checkpoint(self, job: str, deployment: str, name: str) -> int:
        """Remove a checkpoint. Deployments that have loaded it keep its files until they no longer
        need them.

        Returns: the size of its files in bytes; 0: an earlier attempt of this call removed it.
        Raises:  CallerError: NOT_FOUND. FAILED_PRECONDITION: its job may fall back to it.
        """
        request = api.CheckpointRequest(job, deployment, name)
        may_be_done = False

        async def attempt() -> int:
            nonlocal may_be_done
            try:
                deleted = await call_api(
                    self._client, self._tenant, "checkpoint.delete", request, api.CheckpointDeleted
                )
            except CallerError as error:
                # An unanswered attempt has already deleted it.
                if may_be_done and error.info.code is Code.NOT_FOUND:
                    return 0
                raise
            except ResourceError:
                may_be_done = True
                raise
            return deleted.num_bytes

        return await self._retry(attempt)

    @checked
    async def archive_checkpoint(
        self, job: str, deployment: str, name: str, file: str = ""
    ) -> CheckpointArchive:
        """Open a checkpoint as a tar file, or one of its files as it is. Later changes to the
        checkpoint do not affect the archive.

        Args:   file: name of the file, as `show_checkpoint` lists it. Empty: all files, as a tar.
        Raises: CallerError: NOT_FOUND. ResourceError: too many archives are open.
        """
        request = api.ArchiveCheckpoint(job, deployment, name, file)
        opened = await self._call("checkpoint.archive", request, api.OpenedArchive)

        async def read(offset: int) -> bytes:
            part = api.ReadArchive(opened.archive, offset)
            return (await self._call("checkpoint.read", part, api.ArchivePart)).content

        return CheckpointArchive(opened.num_bytes, read)

    @checked
    async def declare_phase(self, request: api.PhaseRequest) -> None:
        """Send a phase hint to the mesh. It is not retried, since a late hint is worthless."""
        await call_api(self._client, self._tenant, "phase.declare", request, api.JobStatus)

    async def watch_connection(self) -> None:
        """Report a lost connection to the NATS server, until cancelled.

        Requests would learn of it later, from their timeouts.
        """
        while True:
            await asyncio.sleep(_CONNECTION_CHECK_S)
            begun_s = time.monotonic()
            if not await self._client.is_answering(_PING_S):
                self._contact.silent("no answer from its NATS server", begun_s)

    def reconnected(self) -> None:
        self._contact.answered()
        for outbox in self._outboxes:
            outbox.reconnected()

    def close(self) -> None:
        """End every session of this connection and all background tasks."""
        for outbox in self._outboxes:
            outbox.end(ResourceError("the connection was closed", code=Code.ABORTED))
        for task in self._tasks:
            task.cancel()

    async def _create(self, call: str, request: api.SubmitJob | api.CreateDeployment) -> None:
        """Make a call that creates something, and retry while nobody answers.

        ALREADY_EXISTS after an unanswered attempt is a success: that attempt created it.
        """
        may_be_done = False

        async def attempt() -> None:
            nonlocal may_be_done
            try:
                await call_api(self._client, self._tenant, call, request, api.JobStatus)
            except CallerError as error:
                if not (may_be_done and error.info.code is Code.ALREADY_EXISTS):
                    raise
            except ResourceError:
                may_be_done = True
                raise

        await self._retry(attempt)

    async def _attach(
        self, name: str, *, may_be_new: bool, numbered: Collection[str] = ()
    ) -> MeshJob:
        key = JobKey(self._tenant, name)
        session_hooks = Hooks(hooks.DECLARED.get())
        outbox = Outbox(self._client, key, self._start, self._answer_timeout_s, session_hooks)
        outbox.contact = self._contact
        # Subscribe before publishing any operation, so that no completion is missed.
        subscription = await self._client.subscribe(f"{PREFIX}.out.{key}.>")
        hand_over(subscription, outbox.on_completion)
        request = api.JobRequest(name, numbered=[*numbered])

        async def attempt() -> api.Attached:
            try:
                return await call_api(
                    self._client, self._tenant, "session.attach", request, api.Attached
                )
            except CallerError as error:
                if may_be_new and error.info.code is Code.NOT_FOUND:
                    # Routers learn of a new job shortly after the scheduler does.
                    raise ResourceError(error.info.message) from error
                raise

        try:
            attached = await self._retry(attempt)
        except BaseException:
            await subscription.unsubscribe()
            raise
        self._outboxes.append(outbox)
        self._start(outbox.watch())
        self._start(self._keep_session(api.Heartbeat(name, attached.session), outbox))
        job = MeshJob(self, name, attached, outbox, key)
        phases.CURRENT.set(job)
        return job

    async def _keep_session(self, beat: api.Heartbeat, outbox: Outbox) -> None:
        """Send heartbeats until the session ends. Without them the job loses its devices.

        Cancelling this task does not reliably end it; see `Outbox.watch`.
        """
        pause_s = 0.0
        while not await outbox.closed(within_s=pause_s):
            begun_s = time.monotonic()
            try:
                reply = await call_api(
                    self._client, self._tenant, "session.heartbeat", beat, api.Beat
                )
                # Several heartbeats per lease, so that a lost one does not end the session.
                pause_s = reply.within_s / _BEATS_PER_LEASE
                self._contact.answered()
            except PhaseloomError as error:
                if error.info.code is Code.FAILED_PRECONDITION:  # the job is over
                    await outbox.settle()
                if error.info.code in (Code.ABORTED, Code.FAILED_PRECONDITION):
                    return outbox.end(error)
                log.info("a heartbeat of job %s failed: %s", beat.job, error)
                if error.info.code is Code.UNAVAILABLE:
                    self._contact.silent(error.info.message, begun_s)
                pause_s = _BEAT_RETRY_S

    async def _call(self, call: str, request: object, answer: type[T]) -> T:
        return await self._retry(
            lambda: call_api(self._client, self._tenant, call, request, answer)
        )

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while nobody answers it, for example while a service restarts."""
        deadline = time.monotonic() + self._answer_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            begun_s = time.monotonic()
            try:
                answer = await attempt()
            except ResourceError as error:
                is_over = time.monotonic() + pause_s > deadline
                if error.info.code is not Code.UNAVAILABLE or is_over:
                    raise
                self._contact.silent(error.info.message, begun_s)
            except CallerError:
                self._contact.answered()
                raise
            else:
                self._contact.answered()
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@asynccontextmanager
@checked
async def connect(
    url: str | None = None,
    tenant: str | None = None,
    password: str | None = None,
    *,
    answer_timeout_s: float = 60.0,
) -> AsyncIterator[Mesh]:
    """Connect as a tenant. Omitted arguments come from PHASELOOM_URL, _TENANT and _PASSWORD, or
    else from the mesh of `phaseloom up` in the current directory (`runs/latest`).

    Args:   answer_timeout_s: fail calls and open operations once the mesh has not answered for this
                long.
    Raises: CallerError: an argument is missing. PERMISSION_DENIED: the tenant or the password is
            wrong. ResourceError: no connection could be made.
    """
    settings, sources = _settings(url, tenant, password)
    if not answer_timeout_s > 0:
        raise CallerError(
            f"answer_timeout_s must be greater than 0, got {answer_timeout_s}",
            field="answer_timeout_s",
            remedy="pass the seconds to wait for an answer, such as 60",
        )
    stop_telemetry = _start_telemetry(settings.tenant)
    mesh: Mesh | None = None

    async def reconnected() -> None:
        if mesh is not None:
            mesh.reconnected()

    client = await connection.connect(
        settings.url,
        f"controller-{settings.tenant}",
        settings.tenant,
        settings.password,
        inbox_prefix=f"_INBOX_{settings.tenant}",
        on_reconnect=reconnected,
        credentials_from=_CREDENTIALS,
        url_from=sources["url"],
    )
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            mesh = Mesh(client, settings.tenant, group, answer_timeout_s)
            watching = group.create_task(mesh.watch_connection())
            try:
                yield mesh
            except BaseException as error:
                failure = error
                raise
            finally:
                watching.cancel()
                mesh.close()
    except BaseExceptionGroup:
        # Raise the controller's own error instead of the group that wraps it.
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure from None
        raise
    finally:
        await connection.close_client(client)
        stop_telemetry()


def _settings(
    url: str | None, tenant: str | None, password: str | None
) -> tuple[ClientConfig, dict[str, str]]:
    """Return the settings of a connection, and the argument or variable that each one comes from.

    Raises: CallerError: one is missing or empty, or the tenant's name is invalid.
    """
    arguments = {"url": url, "tenant": tenant, "password": password}
    passed = {name: value for name, value in arguments.items() if value is not None}
    settings = msgspec.structs.replace(config.load(ClientConfig, ""), **passed)
    sources = {
        name: name if name in passed else f"{config.PREFIX}{name.upper()}" for name in arguments
    }
    has_address = settings.url or settings.password or {"url", "password"} & passed.keys()
    if not has_address and (run_dir := _local_run()) is not None:
        settings = _settings_of_run(run_dir, settings.tenant, sources["tenant"])
        sources = dict.fromkeys(arguments, str(run_dir / CREDENTIALS))
    for name, source in sources.items():
        if not getattr(settings, name):
            raise CallerError(
                f"{source} is missing or empty",
                field=source,
                remedy=f"pass {name}= or set {config.PREFIX}{name.upper()}; in the directory of "
                "`phaseloom up`, neither is needed",
            )
    check_name(settings.tenant, sources["tenant"])
    return settings, sources


def _local_run() -> Path | None:
    """Return the directory of the newest run under the current directory."""
    latest = RUNS / LATEST
    return latest if (latest / CREDENTIALS).is_file() else newest_run()


def _settings_of_run(run_dir: Path, tenant: str, field: str) -> ClientConfig:
    remedy = "pass url=, tenant= and password=, or start the mesh again with `phaseloom up`"
    credentials = read_credentials(run_dir, remedy)
    name = choose_tenant(credentials, tenant, run_dir, field)
    return ClientConfig(credentials.url, name, credentials.tenants[name])


def _start_telemetry(tenant: str) -> Callable[[], None]:
    """Start exporting spans if that is configured and this process does not do it yet.

    Returns: a function that stops the export.
    """
    settings = config.load(telemetry.TelemetryConfig, "telemetry")
    is_configured = bool(settings.spans_dir or settings.otlp_endpoint)
    if not is_configured or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return lambda: None
    return telemetry.setup(f"controller-{tenant}", settings)


def _end_reason(status: api.JobStatus) -> PhaseloomError:
    errors = [status.error, *(d.error for d in status.deployments)]
    for error in errors:
        if error is not None:
            return to_exception(error)
    return ResourceError(f"job {status.job} is {status.state}", code=Code.ABORTED)
