"""Waits until a mesh is up: its nodes are in the decision log, and its services answer."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field

from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.cli.meshconfig import MeshConfig
from phaseloom.cli.processes import api_key, console_key
from phaseloom.common.contract import streams
from phaseloom.common.contract.api import JobRequest, ResultRequest
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, encode
from phaseloom.common.contract.events import NodeLost, NodeUp
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import Credentials

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 1.0
_ANSWER_PAUSE_S = 0.02
_HEAD_BYTES = 64
_ANY_CALL = "/api/v1/get_server_capabilities"
"""A gateway call that every tenant may make."""


@dataclass(slots=True)
class Readiness:
    """Tracks the nodes and services that must answer before a mesh counts as up."""

    bus: Bus
    config: MeshConfig
    credentials: Credentials
    begins_at: int
    """Sequence number of the first decision log entry of this mesh, after those of earlier runs."""
    missing: set[str] = field(init=False)
    """Names that have not answered yet, such as `node train-0` or `scheduler`."""

    def __post_init__(self) -> None:
        self.missing = self._nodes() | {"scheduler", "router"}
        self.missing |= {"gateway"} if self.config.gateway_port else set()
        self.missing |= {"console"} if self.config.console_port else set()

    async def wait(self) -> None:
        """Wait until all nodes are in the decision log and all services answer.

        The services are the scheduler, a router, the gateway and the console.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wait_for_nodes())
            for service, call, request in (
                ("scheduler", "job.status", JobRequest("none")),
                ("router", "result.get", ResultRequest("none", "none", "1")),
            ):
                group.create_task(self._wait_for_answer(call, encode(request), service))
            if self.config.gateway_port:
                group.create_task(self._wait_for_gateway())
            if self.config.console_port:
                group.create_task(self._wait_for_console())

    def _nodes(self) -> set[str]:
        return {f"node {node.name}" for node in self.config.nodes}

    async def _wait_for_nodes(self) -> None:
        expected = self._nodes()
        # Entries before `begins_at` are of earlier runs, whose nodes may have been up.
        async with aclosing(self.bus.log.read(self.begins_at)) as entries:
            async for entry in entries:
                if isinstance(entry.event, NodeUp):
                    self.missing.discard(f"node {entry.event.node}")
                elif isinstance(entry.event, NodeLost):
                    # A node may be lost again while the mesh waits for the others.
                    self.missing.update(expected & {f"node {entry.event.node}"})
                if not self.missing & expected:
                    return

    async def _wait_for_answer(self, call: str, request: bytes, service: str) -> None:
        """Wait until a service answers the call.

        An error counts as an answer, since the request names a job that does not exist.
        """
        subject = streams.api_subject(self.config.tenants[0], call)
        headers = {CONTENT_TYPE: MSGPACK}
        while True:
            try:
                await self.bus.client.request(
                    subject, request, timeout=_ANSWER_TIMEOUT_S, headers=headers
                )
            except (NoRespondersError, NatsTimeoutError):
                await asyncio.sleep(_ANSWER_PAUSE_S)
            else:
                self.missing.discard(service)
                return

    async def _wait_for_gateway(self) -> None:
        """Wait until the gateway serves a tenant.

        An open port is not enough: another program may listen there, and a killed gateway of this
        run may still hold the tenant's lease.
        """
        key = api_key(self.credentials.tenants[self.config.tenants[0]])
        await self._wait_for_page(
            "gateway", self.config.gateway_port, _ANY_CALL, f"X-API-Key: {key}"
        )

    async def _wait_for_console(self) -> None:
        """Wait until the console accepts its key. Another program at the port would refuse it."""
        bearer = f"Authorization: Bearer {console_key(self.credentials.password)}"
        await self._wait_for_page("console", self.config.console_port, "/api/me", bearer)

    async def _wait_for_page(self, service: str, port: int, path: str, header: str) -> None:
        """Wait until a service answers with status 200 to a request with this header."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    if await _status_of(port, path, header) == "200":
                        self.missing.discard(service)
                        return
            except (OSError, TimeoutError) as error:
                log.debug("%s does not answer yet: %r", service, error)
            await asyncio.sleep(_ANSWER_PAUSE_S)


async def _status_of(port: int, path: str, header: str) -> str:
    """Return the HTTP status of a GET on this machine, or other text if the answer is not HTTP.

    Raises: OSError: nothing listens at the port, or the connection is closed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n{header}\r\n\r\n".encode())
        head = await reader.read(_HEAD_BYTES)
    finally:
        writer.close()
    return head.decode(errors="replace").partition(" ")[2][:3]
