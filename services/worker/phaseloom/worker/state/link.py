"""A connection to the state manager that survives restarts of the daemon.

When a connection ends, the link connects again to the restarted daemon, which has inherited the
state of its predecessor. Pending calls wait and are sent again, since all calls are idempotent.
Invariant: `closed` completes if and only if no connection will follow; then every call fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from phaseloom.common.contract.errors import Code, InternalError, PhaseloomError, ResourceError
from phaseloom.common.contract.state_rank import StateMessage
from phaseloom.common.process import lifecycle
from phaseloom.common.transport.framing import Handler, Peer, close_fds

log = logging.getLogger(__name__)

RECONNECT_S = 30.0
"""Seconds allowed for a restart of the state manager, including its handover."""
_PAUSE_S = 0.05

Kind = TypeVar("Kind")
Greeting = Callable[[Peer[StateMessage]], Awaitable[None]]
"""A coroutine that introduces the client on a new connection. Raises: the error in the answer."""


def _future() -> asyncio.Future[_Connection]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Connection:
    """One connection, and a future for its successor."""

    peer: Peer[StateMessage]
    following: asyncio.Future[_Connection] = field(default_factory=_future)


class StateLink:
    """A reconnecting connection. Call `connect` first, then `call`, and finally `close`."""

    def __init__(
        self,
        path: str | Path,
        greet: Greeting,
        handler: Handler[StateMessage] | None,
        reconnect_s: float,
    ) -> None:
        self._path = path
        self._greet = greet
        self._handler = handler
        self._reconnect_s = reconnect_s
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Completes with the reason when the state manager is permanently gone. It never fails."""
        self._connection: _Connection
        self._keeper: asyncio.Task[None]

    async def connect(self) -> None:
        """Connect for the first time.

        Raises: ResourceError: nobody listens on the socket. CallerError: PERMISSION_DENIED.
        """
        self._connection = _Connection(await self._connected())
        self._keeper = asyncio.create_task(self._keep())

    async def call(
        self, body: StateMessage, fds: Sequence[int] = ()
    ) -> tuple[StateMessage, list[int]]:
        """Call the state manager; send the call again after a restart.

        Raises: the error in the answer. ResourceError: the state manager is permanently gone.
        """
        connection = self._connection
        while True:
            try:
                return await connection.peer.call(body, fds)
            except ResourceError:
                if not connection.peer.closed.done():
                    raise
            connection = await asyncio.shield(connection.following)

    async def ask(self, body: StateMessage, kind: type[Kind]) -> Kind:
        """Return the answer to a call that brings no descriptors. Raises: the errors of `call`."""
        answer, fds = await self.call(body)
        close_fds(fds)
        return expect(answer, kind)

    async def close(self) -> None:
        """Disconnect after running handlers have finished."""
        await lifecycle.end([self._keeper])
        await self._connection.peer.close()
        self._end(self._connection, "closed by this end")

    def _end(self, connection: _Connection, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        if not connection.following.done():
            connection.following.set_exception(
                ResourceError(
                    f"the state manager is gone: {reason}", remedy="wait until it has restarted"
                )
            )
            # Mark the exception as retrieved, because there may be no waiter.
            connection.following.exception()

    async def _keep(self) -> None:
        while True:
            connection = self._connection
            reason = await asyncio.shield(connection.peer.closed)
            log.warning("the state manager's connection ended: %s", reason)
            # Finish the old connection's orders before anything is sent on the new one.
            await connection.peer.finish()
            try:
                async with asyncio.timeout(self._reconnect_s):
                    peer = await self._reconnected()
            except TimeoutError:
                self._end(connection, f"{reason}; did not return within {self._reconnect_s:.0f} s")
                return
            except PhaseloomError as error:
                self._end(connection, f"{reason}; {error}")
                return
            log.info("connected to the state manager again")
            self._connection = _Connection(peer)
            connection.following.set_result(self._connection)

    async def _reconnected(self) -> Peer[StateMessage]:
        """Connect again. Raises: PhaseloomError: the state manager refuses this client."""
        while True:
            try:
                return await self._connected()
            except ConnectionLost:
                await asyncio.sleep(_PAUSE_S)

    async def _connected(self) -> Peer[StateMessage]:
        try:
            peer: Peer[StateMessage] = await Peer.connect(self._path, StateMessage, self._handler)
        except ResourceError as error:
            raise ConnectionLost(error.info.message) from error
        try:
            await self._greet(peer)
        except BaseException as error:
            is_for_later = isinstance(error, PhaseloomError) and (
                # Its agent has not reconnected yet, or one end is short of open files.
                error.info.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
                or (isinstance(error, ResourceError) and peer.closed.done())
            )
            await peer.close()
            if is_for_later:
                raise ConnectionLost(str(error)) from error
            raise
        return peer


class ConnectionLost(ResourceError):
    """The connection cannot be used at the moment: nobody listens, it ended, or it was refused for
    now."""


def expect(answer: StateMessage, kind: type[Kind]) -> Kind:
    if not isinstance(answer, kind):
        raise InternalError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer


async def ask(peer: Peer[StateMessage], body: StateMessage, kind: type[Kind]) -> Kind:
    """Call on one connection. Raises: the error in the answer; ConnectionLost."""
    answer, fds = await peer.call(body)
    close_fds(fds)
    return expect(answer, kind)
