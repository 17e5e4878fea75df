"""A whole mesh on this machine: the NATS server and every service as supervised child processes.

    async with Mesh(MeshConfig(), Path("runs/mine")) as mesh:
        await mesh.ready()

A child that ends is restarted with exponential back-off, a warning and a notice. A child that hangs
is replaced after a while; a router or gateway that hangs leaves the rotation at once. Leaving the
block stops everything in bounded time: first the agents, then the services that they report to, and
last the NATS server. If this process is killed instead, the kernel kills its children (see
`diewithparent`), and ranks end with their agent.

The run directory contains `logs/<service>.log`, `spans/`, `nats/` (the server's store),
`credentials.json` and `certificates/` (readable to their owner only), `settings.json`, `mesh.json`
(url, pids, metrics), and the nodes' disks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.cli.certs import make_certificates
from phaseloom.cli.child import STABLE_AFTER_S, Child, Ended, pause_s
from phaseloom.cli.hanging import HUNG_AFTER_S, TICK_S, UNMEASURED_S, Silence, close_connections
from phaseloom.cli.meshconfig import SETTINGS, MeshConfig, servers_of
from phaseloom.cli.models import register
from phaseloom.cli.processes import Listener, child_specs, console_url, with_metrics
from phaseloom.cli.readiness import Readiness
from phaseloom.cli.rundir import locked
from phaseloom.cli.storecheck import (
    MARKS,
    StoreMarks,
    check_store,
    check_when_up,
    end_sessions,
    newest_mark,
    set_aside,
)
from phaseloom.common.contract.errors import Code, ResourceError
from phaseloom.common.process import config as configuration
from phaseloom.common.process.files import replace_file
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.common.transport import framing
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.connection import close_client, connect
from phaseloom.common.transport.leases import delete_dead_lease, node_lease_key
from phaseloom.common.transport.natsclient import MeshClient
from phaseloom.common.transport.natsserver import (
    Credentials,
    EmbeddedEnsemble,
    EmbeddedServer,
)
from phaseloom.common.transport.retry import until_done

log = logging.getLogger(__name__)

NATS = "nats"
_STOP_TIMEOUT_S = 12.0
"""Longer than the time after which a stopping service forces its own exit."""
_READY_TIMEOUT_S = 60.0
_REPLICATED = ("router", "gateway")
"""Services whose replicas share the work. One that hangs must not get a share of it."""
_REPLACED = "silent for {:.1f} s although it could run; killed and started again"
_PROBE_S = 1.0
"""How often a NATS server must answer."""
_ROOM_PAUSE_S = 0.5
_NOTICE_TRIES = 6
_LONGEST_WRITE_PAUSE_S = 60.0
_FULL_BYTES = 2**20
"""A disk with less free space than this counts as full."""
_ROOM_BYTES = 2**26
"""A full disk counts as usable again once it has this much free space."""


class _Inherited(msgspec.Struct, frozen=True):
    """Variables that services of a mesh inherit, and that the supervisor uses too."""

    gateway_host: str = "127.0.0.1"


class Mesh:
    """A mesh that runs while this context manager is entered. Each instance runs once."""

    def __init__(
        self,
        config: MeshConfig,
        run_dir: Path,
        *,
        accepts_loss: bool = False,
        servers: EmbeddedServer | EmbeddedEnsemble | None = None,
    ) -> None:
        """
        Args: run_dir: created if it does not exist; the mesh locks it while it runs.
              accepts_loss: whether to continue with a store that has lost its newest messages; jobs
                  then fall back to their checkpoints.
              servers: the NATS servers, which this mesh starts and stops; None: those of
                  `servers_of`.
        """
        config.check()
        self.config = config
        self.run_dir = run_dir.absolute()
        self._accepts_loss = accepts_loss
        self.servers = servers or servers_of(
            config,
            self.run_dir / NATS,
            config.tenants,
            credentials_file=self.run_dir / "credentials.json",
        )
        self.metrics_ports: dict[str, int] = {}
        """Service → port of its metrics, at `http://127.0.0.1:<port>/metrics`. Empty unless
        `config.metrics` is set."""
        self._agents = {f"worker-{node.name}": node.name for node in config.nodes}
        """Process name of an agent → its node."""
        self._children: list[Child] = []
        self._stack = AsyncExitStack()
        self._supervising: asyncio.Task[None] | None = None
        self._bus: Bus | None = None
        self._marks: StoreMarks | None = None
        self._write_failures: dict[str, str] = {}
        """NATS server → why it could not write. It takes the notice only after its restart."""
        self._is_paused = False
        """Whether all services are silent at once."""
        self._begins_at = 1
        """Sequence number of the first decision log entry of this mesh."""

    @property
    def url(self) -> str:
        return self.servers.credentials.url

    @property
    def credentials(self) -> Credentials:
        return self.servers.credentials

    def console_url(self, tenant: str = "") -> str:
        """Return the console's URL, with the key of a tenant, or of the operator by default."""
        credentials = self.credentials
        password = credentials.tenants[tenant] if tenant else credentials.password
        return console_url(self.config.console_port, password)

    async def __aenter__(self) -> Mesh:
        async with AsyncExitStack() as stack:
            for name in ("logs", "spans", "nodes"):
                (self.run_dir / name).mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(self.run_dir))
            settings = msgspec.json.format(msgspec.json.encode(self.config))
            replace_file(self.run_dir / SETTINGS, settings)
            sockets = socket_directory(self.run_dir, [node.name for node in self.config.nodes])
            stack.callback(shutil.rmtree, sockets, ignore_errors=True)
            names = [node.name for node in self.config.nodes]
            await asyncio.to_thread(make_certificates, self.run_dir / "certificates", names)
            await stack.enter_async_context(self.servers)
            self._bus = await Bus.open(self.credentials.bus, "supervisor")
            stack.push_async_callback(self._bus.close)
            self._marks = await self._check_store(self._bus)
            # Earlier runs in this directory have entries too, which also report nodes as up.
            self._begins_at = await until_done(self._bus.log.end, "the log's end") + 1
            await self._register_models(self._bus)
            host = configuration.load(_Inherited, "").gateway_host
            listener = Listener(host, self.config.gateway_port)
            stack.callback(listener.close)
            specs = child_specs(
                self.config,
                self.run_dir,
                sockets,
                self.credentials,
                secrets.token_urlsafe(24),
                listener=listener,
            )
            if self.config.metrics:
                specs, self.metrics_ports = with_metrics(specs)
            self._children = [
                Child(
                    spec,
                    self.run_dir / "logs" / f"{spec.name}.log",
                    self._write_state,
                    self._report_restart,
                )
                for spec in specs
            ]
            self._supervising = asyncio.create_task(self._supervise())
            stack.push_async_callback(self._stop)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _check_store(self, bus: Bus) -> StoreMarks:
        """Check the store before the services start, and return the marks of its streams.

        Raises: ResourceError: DATA_LOSS: the store has lost something. With `accepts_loss`, only if
                    the store cannot be used at all.
        """
        try:
            marks = StoreMarks(self.run_dir / MARKS)
            await check_when_up(bus, marks, newest_mark(self.run_dir / "nodes"))
        except ResourceError as error:
            if not self._accepts_loss:
                raise
            log.warning("continuing despite lost data: %s", error)
            await until_done(partial(check_store, bus), "check the store")
            set_aside(self.run_dir)
            await end_sessions(bus)
            marks = StoreMarks(self.run_dir / MARKS)
            await marks.check(bus)
        return marks

    async def _register_models(self, bus: Bus) -> None:
        """Register the models that the settings name.

        Raises: CallerError: a directory is not a model directory.
        """
        for name, directory in self.config.models.items():
            model = await asyncio.to_thread(read_model, name, Path(directory))
            await register(bus, model, replaces=True)

    async def wait(self) -> None:
        """Wait while the mesh runs. Raises the error that ended its supervision, if any."""
        assert self._supervising is not None
        await asyncio.shield(self._supervising)

    async def ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Wait until all nodes are in the decision log and all services answer.

        The services are the scheduler, a router, the gateway and the console.

        Raises: ResourceError: the timeout has passed; the message says what is missing.
        """
        assert self._bus is not None
        readiness = Readiness(self._bus, self.config, self.credentials, self._begins_at)
        try:
            async with asyncio.timeout(timeout_s):
                await readiness.wait()
        except TimeoutError:
            missing = ", ".join(sorted(readiness.missing))
            raise ResourceError(
                f"the mesh is not up after {timeout_s:.0f} s: no answer from {missing}",
                code=Code.DEADLINE_EXCEEDED,
                remedy=f"see the logs in {self.run_dir / 'logs'}",
            ) from None

    def pids(self, service: str = "") -> list[int]:
        """Return the ids of the processes with a name, or of all processes.

        Args: service: a service (`router`), one replica (`router-0`), or a NATS server (`nats`, or
                  `nats-1` to `nats-3`). Empty: all processes.
        """
        child_pids = [
            child.process.pid
            for child in self._children
            if child.process is not None and _is_named(child.spec.name, service)
        ]
        return child_pids + [
            server.pid
            for name, server in self.servers.members.items()
            if server.is_running and _is_named(name, service)
        ]

    def kill(self, service: str, number: int = signal.SIGKILL) -> list[int]:
        """Send a signal to the processes of a service, to simulate a crash or an operator."""
        pids = self.pids(service)
        for pid in pids:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)
        return pids

    def lose(self, node: str) -> None:
        """Kill the processes of a node and do not restart them, as if the machine had failed."""
        for child in self._children:
            if child.spec.name in (f"worker-{node}", f"statemgr-{node}"):
                child.kill()

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            servers = [
                group.create_task(self._supervise_server(name, server), name=name)
                for name, server in self.servers.members.items()
            ]
            marks = group.create_task(self._keep_marks(), name="marks")
            rooms = [
                group.create_task(watch(name, server), name=f"{watch.__name__} {name}")
                for name, server in self.servers.members.items()
                for watch in (self._watch_disk, self._watch_writes, self._watch_server)
            ]
            hanging = group.create_task(self._watch_hung(), name="hung services")
            async with asyncio.TaskGroup() as children:
                for child in self._children:
                    children.create_task(child.run(), name=child.spec.name)
            # All children have stopped, so the tasks that watch the servers must end too.
            for keeping in (*servers, *rooms, hanging):
                keeping.cancel()
            marks.cancel()

    async def _keep_marks(self) -> None:
        """Keep the marks of streams up to date.

        An error ends the mesh: a restarted server has lost messages.
        """
        assert self._bus is not None
        assert self._marks is not None
        await self._marks.keep(self._bus)

    async def _watch_hung(self) -> None:
        """Take services that hang out of the rotation, and replace those that do not wake."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
            children = [child for child in self._children if not child.is_stopping]
            before_s = [child.pulse.silence.seconds for child in children]
            shortages = [child.pulse.status for child in children]
            for child in children:
                child.pulse.tick(elapsed_s)
            for child, shortage in zip(children, shortages, strict=True):
                await self._report_shortage(child, shortage)
            silences = [c.pulse.silence for c in children if c.pulse.silence.pid]
            # Nothing hangs if the whole mesh is silent, for example during `phaseloom backup`.
            self._is_paused = all(silence.seconds >= UNMEASURED_S for silence in silences)
            for child, child_before_s in zip(children, before_s, strict=True):
                if self._is_paused:
                    child.pulse.silence.hold(child_before_s)
                await self._handle_silence(child, child_before_s)

    async def _report_shortage(self, child: Child, before: str) -> None:
        """Report that a service has begun or ceased to be short of something."""
        if bool(before) == bool(child.pulse.status):
            return
        event = "no longer short" if before else "short"
        log.warning("%s is %s: %s", child.spec.name, event, before or child.pulse.status)
        await self._notice(event, before or child.pulse.status, child.spec.name)

    async def _handle_silence(self, child: Child, before_s: float) -> None:
        name, silent_s = child.spec.name, child.pulse.silence.seconds
        limit_s = self.config.replace_hung_s
        if silent_s < HUNG_AFTER_S:
            if before_s >= HUNG_AFTER_S:
                log.warning("%s has resumed", name)
                await self._notice("resumed", f"it had been silent for {before_s:.1f} s", name)
            return
        if before_s < HUNG_AFTER_S:
            reason = f"silent for {silent_s:.1f} s although it could run; it is replaced "
            after = f"after {limit_s:g} s unless it resumes"
            if self._has_replica(child):
                try:
                    await asyncio.to_thread(close_connections, child.pulse.silence.pid)
                except OSError as error:
                    # Only its end takes it out of the rotation.
                    after = f"now, because its connections cannot be closed: {error.strerror}"
                    limit_s = silent_s
            log.warning("%s hangs: %s%s", name, reason, after)
            await self._notice("hung", reason + after, name)
        if silent_s >= limit_s:
            log.warning("replacing %s: it hangs", name)
            child.pulse.restart()  # replace it once
            child.send(signal.SIGKILL)
            await self._notice("replaced", _REPLACED.format(silent_s), name)

    def _has_replica(self, child: Child) -> bool:
        """Return whether another replica runs that can take over the work of one that hangs."""
        service = child.spec.name.partition("-")[0]
        return service in _REPLICATED and any(
            _is_named(other.spec.name, service) and other.pulse.silence.seconds < HUNG_AFTER_S
            for other in self._children
        )

    async def _watch_server(self, name: str, server: EmbeddedServer) -> None:
        """Kill a NATS server that hangs, so that it is restarted; until cancelled."""
        credentials = server.credentials
        connecting = partial(
            connect,
            credentials.url,
            f"supervisor of {name}",
            credentials.user,
            credentials.password,
        )
        client = await until_done(connecting, f"watch {name}")
        silence, reason = Silence(), ""
        try:
            while True:
                start_s = time.monotonic()
                # A server that has ended is the subject of `_supervise_server`.
                if not client.is_connected or await _answers(client) or self._is_paused:
                    silence.end()
                    silence.pid = server.pid if server.is_running else 0
                    await asyncio.sleep(_PROBE_S)
                else:
                    silence.add(time.monotonic() - start_s)
                if silence.seconds >= self.config.replace_hung_s and server.is_running:
                    reason = _REPLACED.format(silence.seconds)
                    log.warning("replacing %s: it hangs", name)
                    silence.end()
                    silence.pid = 0
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(server.pid, signal.SIGKILL)
                elif reason and client.is_connected and not silence.seconds:
                    await self._notice("replaced", reason, name)
                    reason = ""
        finally:
            await close_client(client)

    async def _supervise_server(self, name: str, server: EmbeddedServer) -> None:
        """Restart a NATS server whenever it ends, until cancelled. Clients reconnect by
        themselves."""
        failures = 0
        while True:
            started_s = time.monotonic()
            ended = Ended(await server.wait(), time.monotonic() - started_s)
            await server.stop()
            failures = 1 if ended.after_s >= STABLE_AFTER_S else failures + 1
            log.warning("%s ended: %s; restarting it", name, ended)
            while True:
                await asyncio.sleep(pause_s(failures))
                try:
                    await server.start()
                    break
                except (ResourceError, OSError) as error:
                    failures += 1
                    log.warning("%s does not start: %s", name, error)
            self._write_state()
            await self._report_restart(name, str(ended))
            if failure := self._write_failures.pop(name, ""):
                await self._notice("writes_failed", failure, name)

    async def _watch_disk(self, name: str, server: EmbeddedServer) -> None:
        """Report when the disk of a server's store is full, and restart the server once it has
        space.

        A server that failed to write refuses all messages until its restart, even with free space.
        """
        is_full = False
        while True:
            await asyncio.sleep(_ROOM_PAUSE_S)
            try:
                free = shutil.disk_usage(server.store).free
            except OSError:
                continue  # the server reports the problem itself; it must not end the mesh
            if not is_full and free < _FULL_BYTES:
                is_full = True
                full = ResourceError(
                    f"the disk with the store of {name} is full: {free} bytes are free",
                    code=Code.RESOURCE_EXHAUSTED,
                    remedy=f"free space on the disk of {server.store}; {name} then resumes by "
                    "itself",
                )
                log.error("%s", full)
                await self._notice("disk_full", str(full), name)
            elif is_full and free >= _ROOM_BYTES:
                is_full = False
                log.warning("the disk of %s has space again; restarting it", name)
                _terminate(server)

    async def _watch_writes(self, name: str, server: EmbeddedServer) -> None:
        """Restart a server that can no longer write a stream, such as after it was short of open
        files. It would refuse that stream's messages for good."""
        pause_s = _ROOM_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                failed = server.failed_writes()
                is_full = shutil.disk_usage(server.store).free < _ROOM_BYTES
            except OSError:
                continue  # such as this process's own lack of open files
            if not failed or is_full:  # `_watch_disk` restarts it once the disk has space
                pause_s = _ROOM_PAUSE_S
                continue
            error = ResourceError(
                f"{name} cannot write a stream: {failed[-1]}",
                code=Code.RESOURCE_EXHAUSTED,
                remedy="it is restarted; if this repeats, raise the limit of open files (ulimit "
                f"-n), or see {server.store.parent / 'nats.log'}",
            )
            log.error("%s", error)
            self._write_failures[name] = str(error)
            _terminate(server)
            # If the shortage lasts, more restarts do not help.
            pause_s = min(2 * pause_s, _LONGEST_WRITE_PAUSE_S)

    async def _stop(self) -> None:
        """Stop the agents first, so that ranks end and permits are returned, then all other
        children."""
        assert self._supervising is not None
        agents = [c for c in self._children if _is_named(c.spec.name, "worker")]
        remaining = [c for c in self._children if c not in agents]
        # Agents still report to the scheduler and their state managers while they stop.
        for stage in (agents, remaining):
            if not self._supervising.done():
                await asyncio.gather(*(child.stop(_STOP_TIMEOUT_S) for child in stage))
        if self._bus is not None and self._marks is not None:
            with suppress(NatsError, NatsTimeoutError, OSError):
                await self._marks.check(self._bus)
        await self._supervising

    async def _report_restart(self, name: str, reason: str) -> None:
        log.warning("%s ended: %s", name, reason)
        await self._notice("restarted", reason, name)
        if name in self._agents:
            assert self._bus is not None
            try:
                # The ranks have ended with the agent, so the next agent need not wait for the old
                # lease.
                await delete_dead_lease(self._bus, node_lease_key(self._agents[name]))
            except (NatsError, NatsTimeoutError) as error:
                log.warning("the lease of %s stays until it expires: %r", name, error)

    async def _notice(self, event: str, reason: str, subject: str) -> None:
        assert self._bus is not None
        for number in range(_NOTICE_TRIES):
            try:
                await self._bus.notice("supervisor", event, reason, subject)
            # The server may be the subject of the notice, and has just been restarted.
            except (NatsError, NatsTimeoutError) as error:
                level = logging.WARNING if number == _NOTICE_TRIES - 1 else logging.DEBUG
                log.log(level, "the notice could not be published: %r", error)
                await asyncio.sleep(_ROOM_PAUSE_S)
            else:
                return

    def _write_state(self) -> None:
        pids = {c.spec.name: c.process.pid for c in self._children if c.process}
        for name, server in self.servers.members.items():
            if server.is_running:  # a child may restart while the server is down
                pids[name] = server.pid
        state = {
            "url": self.url,
            "pid": os.getpid(),
            "pids": pids,
            "metrics": {
                name: f"http://127.0.0.1:{port}/metrics"
                for name, port in self.metrics_ports.items()
            },
        }
        content = msgspec.json.format(msgspec.json.encode(state)) + b"\n"
        try:
            replace_file(self.run_dir / "mesh.json", content, 0o644)
        except OSError as error:  # the disk is full; the mesh continues
            log.warning("mesh.json of %s could not be updated: %s", self.run_dir, error.strerror)


def socket_directory(run_dir: Path, nodes: Iterable[str]) -> Path:
    """Create a directory for the Unix sockets of the nodes.

    It is inside the run directory, so that nothing remains elsewhere even after SIGKILL. If that
    makes a path too long (sockets allow 107 bytes), it is in the system's temporary directory
    instead.
    """
    longest = max(len(f"agent-{node}.sock".encode()) for node in nodes)
    inside_run = run_dir / "s"
    if len(os.fsencode(inside_run)) + 1 + longest <= framing.MAX_PATH_BYTES:
        inside_run.mkdir(parents=True, exist_ok=True)
        return inside_run
    return Path(tempfile.mkdtemp(prefix="phaseloom-"))


async def _answers(client: MeshClient) -> bool:
    """Return whether the server that a client is connected to answers within a tick."""
    try:
        await client.ask_server("$SYS.REQ.USER.INFO", b"", TICK_S)
    except (NatsError, NatsTimeoutError):
        return False
    return True


def _terminate(server: EmbeddedServer) -> None:
    if server.is_running:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(server.pid, signal.SIGTERM)


def _is_named(name: str, service: str) -> bool:
    return not service or name == service or name.startswith(f"{service}-")
