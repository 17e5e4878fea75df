"""The connection of a controller to the mesh: submit jobs, attach to them.

Every background task lives in one task group that `connect` owns: leaving its block ends them all,
and whatever is still open then ends as ABORTED.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from nats.aio.client import Client
from opentelemetry import trace

from phaseloom.client.job import Deployment, Job
from phaseloom.client.operations import Outbox
from phaseloom.common import bus, config, telemetry
from phaseloom.common.api import call_api
from phaseloom.common.errors import (
    CallerError,
    Code,
    PhaseloomError,
    ResourceError,
    to_exception,
)
from phaseloom.common.ids import JobKey, check_name
from phaseloom.common.messages import (
    Attached,
    DeploymentSpec,
    JobRequest,
    JobSpec,
    JobStatus,
    SubmitJob,
)
from phaseloom.common.streams import PREFIX

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 0.5
_ENDED = frozenset({"done", "failed", "rejected"})


class ClientConfig(msgspec.Struct, frozen=True):
    """Where a controller finds the mesh: PHASELOOM_<FIELD>."""

    url: str = ""
    """`nats://host:port`."""
    tenant: str = ""
    """Also the user name."""
    password: str = ""


class MeshJob(Job):
    """A job whose end can be told."""

    def __init__(
        self, mesh: Mesh, name: str, attached: Attached, outbox: Outbox, key: JobKey
    ) -> None:
        super().__init__(
            name,
            attached.session,
            {
                d.name: Deployment(key, d.name, attached.session, d.next_seq, outbox)
                for d in attached.status.deployments
            },
        )
        self._mesh = mesh
        self._outbox = outbox

    async def status(self) -> JobStatus:
        return await self._mesh.status(self.name)

    async def finish(self, *, failed: bool = False) -> None:
        """End the job: its models are dropped, checkpoints stay. Open operations end ABORTED."""
        await self._mesh.finish(self.name, failed=failed)
        self._outbox.end(ResourceError(f"job {self.name} is finished", code=Code.ABORTED))


class Mesh:
    """A tenant's connection. Get it from `connect`."""

    def __init__(
        self, client: Client, tenant: str, group: asyncio.TaskGroup, patience_s: float
    ) -> None:
        self._client = client
        self._tenant = tenant
        self._group = group
        self._patience_s = patience_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._outboxes: list[Outbox] = []

    async def submit_job(
        self, name: str, deployments: Iterable[DeploymentSpec], *, slo: float = 0.0
    ) -> MeshJob:
        """Submit a job and attach to it when all its deployments are ready.

        Waits as long as the scheduler has no place for it. Who gives up waiting leaves the job
        submitted: `attach` to it later, or `finish` it.

        Raises: CallerError: ALREADY_EXISTS, or the spec is wrong; PhaseloomError: why it failed.
        """
        check_name(name, "name")
        await self._submit(SubmitJob(name, JobSpec(slo=slo, deployments=list(deployments))))
        pause_s = _FIRST_PAUSE_S
        while (status := await self.status(name)).state != "active":
            if status.state in _ENDED:
                raise _why_ended(status)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return await self._attach(name, may_be_new=True)

    async def attach(self, name: str) -> MeshJob:
        """Open a new session of a job that runs; every older session of it ends.

        Raises: CallerError: NOT_FOUND; FAILED_PRECONDITION: it has ended.
        """
        check_name(name, "name")
        return await self._attach(name, may_be_new=False)

    async def status(self, name: str) -> JobStatus:
        status: JobStatus = await self._call("job.status", JobRequest(name), JobStatus)
        return status

    async def finish(self, name: str, *, failed: bool = False) -> None:
        await self._call("job.finish", JobRequest(name, failed), JobStatus)

    def reconnected(self) -> None:
        for outbox in self._outboxes:
            outbox.reconnected()

    def close(self) -> None:
        """End every session of this connection and all background tasks."""
        for outbox in self._outboxes:
            outbox.end(ResourceError("the connection was closed", code=Code.ABORTED))
        for task in self._tasks:
            task.cancel()

    async def _submit(self, request: SubmitJob) -> None:
        """Once: where an answer is lost, the job that then exists already is this one."""
        was_lost = False

        async def attempt() -> None:
            nonlocal was_lost
            try:
                await call_api(self._client, self._tenant, "job.submit", request, JobStatus)
            except CallerError as error:
                if not (was_lost and error.info.code is Code.ALREADY_EXISTS):
                    raise
            except ResourceError:
                was_lost = True
                raise

        await self._with_patience(attempt)

    async def _attach(self, name: str, *, may_be_new: bool) -> MeshJob:
        key = JobKey(self._tenant, name)
        outbox = Outbox(self._client, key, self._start, self._patience_s)
        # Before any operation is published, so that no completion can be missed.
        subscription = await self._client.subscribe(
            f"{PREFIX}.out.{key}.>", cb=outbox.on_completion
        )
        request = JobRequest(name)

        async def attempt() -> Attached:
            try:
                attached: Attached = await call_api(
                    self._client, self._tenant, "session.attach", request, Attached
                )
            except CallerError as error:
                if may_be_new and error.info.code is Code.NOT_FOUND:
                    # The routers' view of jobs follows the scheduler's by a moment.
                    raise ResourceError(error.info.message) from error
                raise
            return attached

        try:
            attached = await self._with_patience(attempt)
        except BaseException:
            await subscription.unsubscribe()
            raise
        self._outboxes.append(outbox)
        self._start(outbox.watch())
        return MeshJob(self, name, attached, outbox, key)

    async def _call(self, call: str, request: object, answer: Any) -> Any:
        return await self._with_patience(
            lambda: call_api(self._client, self._tenant, call, request, answer)
        )

    async def _with_patience(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Again while nobody answers: services restart."""
        deadline = time.monotonic() + self._patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except ResourceError as error:
                is_over = time.monotonic() + pause_s > deadline
                if error.info.code is not Code.UNAVAILABLE or is_over:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@asynccontextmanager
async def connect(
    url: str | None = None,
    tenant: str | None = None,
    password: str | None = None,
    *,
    patience_s: float = 60.0,
) -> AsyncIterator[Mesh]:
    """Connect as a tenant; what is not given comes from PHASELOOM_URL, _TENANT and _PASSWORD.

    Args:   patience_s: how long the mesh may give no answer before calls and open operations fail.
    Raises: CallerError: not told where or who. ResourceError: no connection.
    """
    settings = _settings(url, tenant, password)
    stop_telemetry = _start_telemetry(settings.tenant)
    mesh: Mesh | None = None

    async def reconnected() -> None:
        if mesh is not None:
            mesh.reconnected()

    client = await bus.connect(
        settings.url,
        f"controller-{settings.tenant}",
        settings.tenant,
        settings.password,
        inbox_prefix=f"_INBOX_{settings.tenant}",
        on_reconnect=reconnected,
    )
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            mesh = Mesh(client, settings.tenant, group, patience_s)
            try:
                yield mesh
            except BaseException as error:
                failure = error
                raise
            finally:
                mesh.close()
    except BaseExceptionGroup:
        # A controller sees its own error, not a group around it.
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure from None
        raise
    finally:
        await bus.close_client(client)
        stop_telemetry()


def _settings(url: str | None, tenant: str | None, password: str | None) -> ClientConfig:
    given = {"url": url, "tenant": tenant, "password": password}
    settings = msgspec.structs.replace(
        config.load(ClientConfig, ""), **{k: v for k, v in given.items() if v is not None}
    )
    for name in given:
        if not getattr(settings, name):
            raise CallerError(
                f"the mesh's {name} is not known",
                field=name,
                remedy=f"pass {name}= or set PHASELOOM_{name.upper()}",
            )
    check_name(settings.tenant, "tenant")
    return settings


def _start_telemetry(tenant: str) -> Callable[[], None]:
    """Spans of this process where they are configured and nobody set them up; returns the end."""
    settings = config.load(telemetry.TelemetryConfig, "telemetry")
    is_wanted = bool(settings.spans_dir or settings.otlp_endpoint)
    if not is_wanted or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return lambda: None
    return telemetry.setup(f"controller-{tenant}", settings)


def _why_ended(status: JobStatus) -> PhaseloomError:
    errors = [status.error, *(d.error for d in status.deployments)]
    for error in errors:
        if error is not None:
            return to_exception(error)
    return ResourceError(f"job {status.job} is {status.state}", code=Code.ABORTED)
