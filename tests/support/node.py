"""One node of the mesh with its real processes, and a test in the scheduler's place.

The state manager, the agent and its ranks run as they do in the mesh, on a real bus. The test
publishes operations as a controller does, gives commands as the scheduler does, and reads outcomes
and the decision log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nats.aio.msg import Msg

from phaseloom.cli.certs import make_certificates
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.processes import ChildSpec, child_specs
from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import content_type_of, decode
from phaseloom.common.contract.commands import (
    CancelOperation,
    Command,
    OpenActivation,
    Permit,
    SealState,
    StartWpg,
    StopWpg,
)
from phaseloom.common.contract.errors import to_exception
from phaseloom.common.contract.events import (
    ActivationOpened,
    ActivationRefused,
    Event,
    NodeUp,
    OperationFinished,
    SealCommitted,
    StateSnapshotTaken,
    WpgLost,
    WpgStarted,
)
from phaseloom.common.contract.ids import DeploymentKey, NodeId, OperationKey
from phaseloom.common.contract.operations import (
    AdamParams,
    Args,
    Completion,
    Datum,
    ForwardBackward,
    Loss,
    Operation,
    OptimStep,
    Progress,
    kind_of,
)
from phaseloom.common.contract.specs import CommandId, DeploymentSpec, Layout, ModelSpec
from phaseloom.common.process import config as configuration
from phaseloom.common.process.lifecycle import DIE_WITH_PARENT
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import EmbeddedServer
from tests.support.directories import short_directory
from tests.support.jobs import Log
from tests.support.processes import child_pids, until_gone
from tests.support.tinymodel import VOCAB, config
from tests.support.warm import program_pid

NODE = NodeId("n0")
TENANT = "acme"
_SECRET = "for tests only"
_PATIENCE_S = 120.0
_GONE_S = 60.0

E = TypeVar("E")


def model_spec(**changes: Any) -> ModelSpec:
    return ModelSpec(config(**changes), init_seed=7)


def policy_spec(
    name: str = "policy", layout: Layout | None = None, **changes: Any
) -> DeploymentSpec:
    """Args: changes: of the model's config."""
    model = model_spec(**changes)
    layout = layout or Layout()
    return DeploymentSpec(name, "train", "fsdp", model, trainable=True, layout=layout)


def sampler_spec(positions: int = 64, **changes: Any) -> DeploymentSpec:
    model = model_spec(max_position_embeddings=positions)
    return DeploymentSpec("sampler", "rollout", "sampler", model, **changes)


def lesson(shift: int = 0, rows: int = 4) -> ForwardBackward:
    """A batch to learn from; another `shift` is another batch."""
    data = []
    for row in range(rows):
        tokens = [(row + shift + i * (row + 2)) % VOCAB for i in range(6)]
        data.append(Datum(tokens[:-1], tokens[1:], weights=[1.0] * 5))
    return ForwardBackward(data, Loss.CROSS_ENTROPY)


def exploding() -> ForwardBackward:
    """Its loss is no finite number, which shows only when it is computed."""
    data = [Datum([1, 2], [2, 3], logprobs=[-1e30, -1e30], advantages=[1.0, 1.0])]
    return ForwardBackward(data, Loss.IMPORTANCE_SAMPLING)


STEP = OptimStep(AdamParams(1e-2))


class TestNode:
    """See `running_node`."""

    __test__ = False

    def __init__(
        self,
        server: EmbeddedServer,
        bus: Bus,
        log: Log,
        specs: list[ChildSpec],
        directory: Path,
    ) -> None:
        self.server = server
        self.bus = bus
        self.log = log
        self.revision = 0
        self.checkpoint_root = directory / "checkpoints"
        self._specs = {spec.module.split(".")[1]: spec for spec in specs}
        self.directory = directory
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._num_commands = 0
        self._num_tests = 0
        self._started: dict[DeploymentKey, int] = {}

    # --- processes ------------------------------------------------------------------------------

    async def start(self, service: str) -> None:
        """`statemgr` or `worker`."""
        spec = self._specs[service]
        with (self.directory / f"{service}.log").open("ab") as output:
            self._processes[service] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                spec.module,
                env={
                    **configuration.inherited(),
                    **spec.environment,
                    DIE_WITH_PARENT: str(os.getpid()),
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if service == "worker":
            up = await self._event(NodeUp, lambda e: e.revision > self.revision)
            self.revision = up.revision

    async def kill(self, service: str) -> list[int]:
        """kill -9; the processes that it leaves behind."""
        process = self._processes.pop(service)
        children = child_pids(program_pid(process.pid))
        os.kill(program_pid(process.pid), signal.SIGKILL)
        await process.wait()
        return children

    async def stop(self) -> None:
        for service in ("worker", "statemgr"):
            process = self._processes.pop(service, None)
            if process is not None:
                process.terminate()
                await asyncio.wait_for(process.wait(), _GONE_S)

    @contextmanager
    def frozen(self, service: str) -> Iterator[None]:
        """Its process stands still meanwhile."""
        os.kill(program_pid(self._processes[service].pid), signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(program_pid(self._processes[service].pid), signal.SIGCONT)

    def rank_pids(self, deployment: DeploymentKey) -> list[int]:
        """Of its newest life, rank 0 first or not: as their log tells."""
        service = f'"worker:{deployment}"'
        lines = (self.directory / "worker.log").read_text().splitlines()
        starts = [
            line.partition("rank of incarnation ")[2].rstrip('"}').split(" starts, pid ")
            for line in lines
            if service in line and "starts, pid" in line
        ]
        newest = max(int(incarnation) for incarnation, _ in starts)
        return [int(pid) for incarnation, pid in starts if int(incarnation) == newest]

    async def kill_rank(self, deployment: DeploymentKey, rank: int = 0) -> None:
        """kill -9; returns when all ranks of that life are gone."""
        pids = self.rank_pids(deployment)
        os.kill(pids[rank], signal.SIGKILL)
        await until_gone(pids, _GONE_S)

    # --- the controller's side ------------------------------------------------------------------

    async def put(self, deployment: DeploymentKey, slot: int | str, args: Args) -> OperationKey:
        """Publish an operation; nobody runs it yet."""
        key = OperationKey(*_names(deployment), str(slot))
        await self.bus.publish(streams.op_subject(key), Operation(f"id-{key}", 1, args))
        return key

    async def put_again(self, deployment: DeploymentKey, slot: int | str) -> OperationKey:
        """One that is there already."""
        key = OperationKey(*_names(deployment), str(slot))
        assert await self.bus.stored.get(streams.ops_stream(TENANT), streams.op_subject(key))
        return key

    async def outcome(self, key: OperationKey) -> Completion:
        """The stored one, once the operation has finished."""
        await self.finished(key)
        return await self.stored_outcome(key)

    async def forget_outcome(self, key: OperationKey) -> None:
        """As if it had never been stored."""
        await self.bus.stored.delete(streams.DONE, streams.done_subject(key))

    async def stored_outcome(self, key: OperationKey) -> Completion:
        """Once there is one."""
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                stored = await self.bus.stored.get(streams.DONE, streams.done_subject(key))
                if stored is not None:
                    break
                await asyncio.sleep(0.01)
        done: Completion = decode(stored.payload, Completion, content_type_of(stored.headers))
        return done

    @asynccontextmanager
    async def progress(self, key: OperationKey) -> AsyncIterator[asyncio.Queue[Progress]]:
        """What is told of an operation's progress from now on."""
        told: asyncio.Queue[Progress] = asyncio.Queue()

        async def take(message: Msg) -> None:
            told.put_nowait(decode(message.data, Progress, content_type_of(message.headers)))

        subscription = await self.bus.client.subscribe(streams.progress_subject(key), cb=take)
        await self.bus.client.flush()
        yield told
        await subscription.unsubscribe()

    # --- the scheduler's side -------------------------------------------------------------------

    async def command(self, type_: Any, **fields: Any) -> Command:
        """Give this life of the node a command; its id is fresh."""
        self._num_commands += 1
        id = CommandId(self.revision, self._num_commands)
        command: Command = type_(id=id, node=NODE, revision=self.revision, **fields)
        await self.bus.publish(streams.permit_subject(NODE), command, msg_id=str(id))
        return command

    async def start_wpg(
        self,
        spec: DeploymentSpec,
        *,
        job: str = "job",
        incarnation: int = 1,
        devices: list[int] | None = None,
        **fields: Any,
    ) -> tuple[DeploymentKey, WpgStarted]:
        """Start a deployment and open its activation, under the incarnation as epoch."""
        key = DeploymentKey(TENANT, f"t{self._num_tests}-{job}", spec.name)
        self._started[key] = incarnation
        fields = {"seal_seq": 0, **fields}
        await self.command(
            StartWpg,
            deployment=key,
            incarnation=incarnation,
            spec=spec,
            devices=devices or [0],
            **fields,
        )
        event = await self._event(
            WpgStarted | WpgLost,
            lambda e: e.deployment == key and e.incarnation == incarnation,
        )
        if isinstance(event, WpgLost):
            raise to_exception(event.error)
        await self.open(key, incarnation)
        return key, event

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[TestNode]:
        """For one test: its jobs have names of their own, and end with it."""
        self._num_tests += 1
        yield self
        for key, incarnation in self._started.items():
            await self.command(StopWpg, deployment=key, incarnation=incarnation, forget=True)
        for key, incarnation in self._started.items():
            await self.lost(key, incarnation)
        self._started.clear()

    def lives_lost(self, deployment: DeploymentKey) -> list[WpgLost]:
        events = self.log.events
        return [e for e in events if isinstance(e, WpgLost) and e.deployment == deployment]

    async def lost(self, deployment: DeploymentKey, incarnation: int = 1) -> WpgLost:
        lost: WpgLost = await self._event(
            WpgLost, lambda e: e.deployment == deployment and e.incarnation == incarnation
        )
        return lost

    async def open(
        self,
        deployment: DeploymentKey,
        incarnation: int,
        displaces: list[DeploymentKey] | None = None,
        epoch: int = 0,
    ) -> ActivationOpened:
        epoch = epoch or incarnation
        await self.command(
            OpenActivation,
            deployment=deployment,
            incarnation=incarnation,
            epoch=epoch,
            displaces=displaces or [],
        )
        return await self.opened(deployment, epoch)

    async def opened(self, deployment: DeploymentKey, epoch: int) -> ActivationOpened:
        event = await self._event(
            ActivationOpened | ActivationRefused,
            lambda e: e.deployment == deployment and e.epoch == epoch,
        )
        assert isinstance(event, ActivationOpened), event.error
        return event

    async def permit(
        self, key: OperationKey, args: Args, prev: int = 0, incarnation: int = 1, **fields: Any
    ) -> Command:
        """Leave to run it, in the activation that is named like the incarnation."""
        fields = {"epoch": incarnation, **fields}
        return await self.command(
            Permit,
            operation=key,
            operation_id=f"id-{key}",
            kind=kind_of(args),
            incarnation=incarnation,
            prev=prev,
            **fields,
        )

    async def run(
        self, deployment: DeploymentKey, slot: int | str, args: Args, prev: int = 0, **fields: Any
    ) -> Completion:
        """Publish, permit, and wait for the outcome."""
        key = await self.put(deployment, slot, args)
        await self.permit(key, args, prev, **fields)
        return await self.outcome(key)

    async def cancel(self, key: OperationKey, incarnation: int = 1) -> None:
        await self.command(CancelOperation, operation=key, incarnation=incarnation)

    async def seal(self, deployment: DeploymentKey, seq: int, incarnation: int = 1) -> None:
        await self.command(
            SealState, deployment=deployment, incarnation=incarnation, seq=seq, versions=[]
        )
        await self._event(SealCommitted, lambda e: e.deployment == deployment and e.seq == seq)

    async def snapshot_taken(self, key: OperationKey, incarnation: int = 1) -> StateSnapshotTaken:
        """Once what it saves is apart from the devices."""
        taken: StateSnapshotTaken = await self._event(
            StateSnapshotTaken, lambda e: e.key == key and e.incarnation == incarnation
        )
        return taken

    async def finished(self, key: OperationKey, incarnation: int = 0) -> OperationFinished:
        """What the decision log says of it, of any life where none is named."""
        finished: OperationFinished = await self._event(
            OperationFinished, lambda e: e.key == key and incarnation in {0, e.incarnation}
        )
        return finished

    def all_finished(self, key: OperationKey) -> list[OperationFinished]:
        return [e for e in self.log.events if isinstance(e, OperationFinished) and e.key == key]

    async def _event(self, kind: Any, is_meant: Any) -> Any:
        def matches(event: Event) -> bool:
            return isinstance(event, kind) and bool(is_meant(event))

        return await self.log.until(matches)


def _names(deployment: DeploymentKey) -> tuple[str, str, str]:
    return deployment.tenant, deployment.job, deployment.deployment


@asynccontextmanager
async def running_node(
    num_devices: int = 1,
    host_memory_bytes: int = 2**30,
    lease_ttl_s: float = 6.0,
    nvme_bytes: int = 2**30,
    peer_timeout_s: float = 10.0,
) -> AsyncIterator[TestNode]:
    """A node and a bus of its own."""
    node = NodeConfig(
        str(NODE), "train", [64 * 2**20] * num_devices, host_memory_bytes=host_memory_bytes
    )
    environment = {
        f"{configuration.PREFIX}WORKER_LEASE_TTL_S": str(lease_ttl_s),
        f"{configuration.PREFIX}STATEMGR_NVME_BYTES": str(nvme_bytes),
        f"{configuration.PREFIX}STATEMGR_PEER_TIMEOUT_S": str(peer_timeout_s),
    }
    with short_directory() as directory:
        async with EmbeddedServer(directory / "nats", [TENANT], fsync=False) as server:
            bus = await Bus.open(server.credentials.bus, "test")
            try:
                await bus.provision_tenant(TENANT, 64 * 2**20)
                async with _running(server, bus, directory, node, environment) as running:
                    yield running
            finally:
                await bus.close()


@asynccontextmanager
async def _running(
    server: EmbeddedServer,
    bus: Bus,
    directory: Path,
    node: NodeConfig,
    environment: dict[str, str],
) -> AsyncIterator[TestNode]:
    mesh = MeshConfig(nodes=[node], tenants=[TENANT])
    await asyncio.to_thread(make_certificates, directory / "certificates", [NODE])
    specs = child_specs(mesh, directory, directory, server.credentials, _SECRET)
    mine = [
        replace(spec, environment={**spec.environment, **environment})
        for spec in specs
        if spec.name in {f"statemgr-{NODE}", f"worker-{NODE}"}
    ]
    log = Log()
    following = asyncio.create_task(log.follow(bus))
    running = TestNode(server, bus, log, mine, directory)
    try:
        await running.start("statemgr")
        await running.start("worker")
        yield running
        await running.stop()
    finally:
        following.cancel()
        await asyncio.wait([following])
