"""A connection to the state manager that outlives the daemon's process.

When the connection ends it is made again: the daemon is restarted, and the state of the daemon
before is handed over to it. Calls under way wait for that and are asked again, since all of them
are idempotent. Invariant: `closed` is done exactly when there will be no connection any more; every
call fails then.
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
"""The most seconds that a restart of the state manager may take, its handover included."""
_PAUSE_S = 0.05

Kind = TypeVar("Kind")
Greeting = Callable[[Peer[StateMessage]], Awaitable[None]]
"""A coroutine that introduces the client on a new connection. Raises: the error that the answer
brings."""


def _future() -> asyncio.Future[_Connection]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Connection:
    """One connection, and a future for the one after it."""

    peer: Peer[StateMessage]
    following: asyncio.Future[_Connection] = field(default_factory=_future)


class StateLink:
    """A connection that is made again when it ends: call `connect`, then `call`, and `close` at the
    end."""

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
        """Done when the state manager is gone for good; its result says why. It never fails."""
        self._connection: _Connection
        self._keeper: asyncio.Task[None]

    async def connect(self) -> None:
        """Connect for the first time.

        Raises: ResourceError: nobody listens. CallerError: PERMISSION_DENIED.
        """
        self._connection = _Connection(await self._connected())
        self._keeper = asyncio.create_task(self._keep())

    async def call(
        self, body: StateMessage, fds: Sequence[int] = ()
    ) -> tuple[StateMessage, list[int]]:
        """Call the state manager, across restarts of it.

        Raises: the error that the answer brings. ResourceError: the state manager is gone for good.
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
        """The answer to a call that brings no descriptors. Raises: as `call`."""
        answer, fds = await self.call(body)
        close_fds(fds)
        return expect(answer, kind)

    async def close(self) -> None:
        """Leave; handlers at work end first."""
        await lifecycle.end([self._keeper])
        await self._connection.peer.close()
        self._end(self._connection, "closed by this end")

    def _end(self, connection: _Connection, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        if not connection.following.done():
            connection.following.set_exception(
                ResourceError(f"the state manager is gone: {reason}", remedy="it is restarted")
            )
            # Nobody may be waiting for it.
            connection.following.exception()

    async def _keep(self) -> None:
        while True:
            connection = self._connection
            reason = await asyncio.shield(connection.peer.closed)
            log.warning("the state manager's connection ended: %s", reason)
            # Orders of the old connection are done before anything is said on the new one.
            await connection.peer.finish()
            try:
                async with asyncio.timeout(self._reconnect_s):
                    peer = await self._reconnected()
            except TimeoutError:
                self._end(connection, f"{reason}; not back within {self._reconnect_s:.0f} s")
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
                error.info.code is Code.UNAVAILABLE  # its agent has not come back yet
                or (isinstance(error, ResourceError) and peer.closed.done())
            )
            await peer.close()
            if is_for_later:
                raise ConnectionLost(str(error)) from error
            raise
        return peer


class ConnectionLost(ResourceError):
    """The connection cannot be used now: nobody listens, or it ended, or was refused for now."""


def expect(answer: StateMessage, kind: type[Kind]) -> Kind:
    if not isinstance(answer, kind):
        raise InternalError(f"expected {kind.__name__}, got {type(answer).__name__}")
    return answer


async def ask(peer: Peer[StateMessage], body: StateMessage, kind: type[Kind]) -> Kind:
    """Ask on one connection. Raises: the error that the answer brings; ConnectionLost."""
    answer, fds = await peer.call(body)
    close_fds(fds)
    return expect(answer, kind)
