"""Leases: which processes are alive and which one leads, in the KV bucket `leases`.

A lease is a key with a time to live, acquired and renewed by compare-and-set, so that it has at
most one holder. Its revision (the stream sequence at which it was acquired) only increases, and
fences earlier holders. A holder that cannot renew its lease knows this before anyone else can
acquire it: the holder counts the time to live from before it sent the last renewal, the server from
when it stored it.

KV's own `update` sets no time to live, so leases use `Bus.keys.swap`. An expired key leaves a
marker, which means that the lease is free and whose sequence the next holder must name. If the
answer to an attempt is lost, it may still have been stored: a holder recognises its own value by a
nonce.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.common.contract.errors import Code, ResourceError, session_superseded, to_exception
from phaseloom.common.contract.ids import JobKey
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import Conflict

log = logging.getLogger(__name__)

REVISION_HEADER = "Phaseloom-Lease-Revision"
"""Header of every renewal: the revision at which the lease was acquired."""
_HOLDER_HEADER = "Phaseloom-Lease-Holder"
_RENEWALS_PER_TTL = 3
_MARGIN_SHARE = 0.2
_ATTEMPT_SHARE = 0.2
_RETRY_PAUSE_S = 0.1
_REREAD_AFTER_S = 30.0
"""Maximum time to wait for a lease to become free before reading the key again.

It must be shorter than the lifetime of an expired lease's marker. A waiter that was disconnected
for longer would never see the marker.
"""


def node_lease_key(node: str) -> str:
    """The lease key of a node's agent."""
    return f"node.{node}"


async def nodes_up(bus: Bus) -> list[str]:
    """Return the sorted names of the nodes that are up, that is, whose agents hold a lease."""
    prefix = node_lease_key("")
    keys = await bus.keys.names(Bucket.LEASES)
    return sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))


def scheduler_lease_key() -> str:
    """The lease key of the leading scheduler."""
    return "scheduler"


def gateway_lease_key(tenant: str) -> str:
    """The lease key of the gateway that serves a tenant. Its value is the gateway's URL."""
    return f"gateway.{tenant}"


def session_lease_key(job: JobKey) -> str:
    """The lease key of a job's controller. Its value is the session number."""
    return f"session.{job}"


async def renew_session(bus: Bus, job: JobKey, session: int, ttl_s: float) -> None:
    """Renew the lease of a job's controller for `ttl_s` (whole seconds, rounded up) from now.

    Any replica of the router may renew it, so the lease has no holder. Only a newer session
    replaces an older one.

    Raises: ResourceError: ABORTED: a newer session has sent a heartbeat. nats errors: the renewal
            was not stored.
    """
    key = session_lease_key(job)
    while True:
        current = await bus.keys.get_raw(Bucket.LEASES, key)
        newest = 0 if current is None or current.is_gone else int(current.payload)
        if newest > session:
            raise to_exception(session_superseded(session, newest))
        expected = current.sequence if current else 0
        try:
            await bus.keys.swap(
                Bucket.LEASES, key, str(session).encode(), expected, _whole_seconds(ttl_s)
            )
        except Conflict:
            continue
        return


def _whole_seconds(ttl_s: float) -> float:
    return float(max(1, math.ceil(ttl_s)))


class LeaseLost(ResourceError):
    """Another holder has the lease, or could acquire it before it is renewed. Stop acting on it
    now."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """One holder's attempt to acquire one key."""

    bus: Bus
    key: str
    value: bytes
    ttl_s: float
    nonce: str

    async def try_acquire(self) -> int | None:
        """Try once to acquire the lease. Returns: its revision; None: another process holds it."""
        current = await self.bus.keys.get_raw(Bucket.LEASES, self.key)
        if current is not None and not current.is_gone and not self.is_own(current.headers):
            return None
        try:
            # Write again even if an earlier attempt of ours was stored and its answer lost: its
            # remaining time to live is unknown.
            return await self.write(current.sequence if current else 0)
        except Conflict:
            return None

    async def write(self, expected: int, revision: int | None = None) -> int:
        headers = {_HOLDER_HEADER: self.nonce}
        if revision is not None:
            headers[REVISION_HEADER] = str(revision)
        return await self.bus.keys.swap(
            Bucket.LEASES, self.key, self.value, expected, self.ttl_s, headers=headers
        )

    def is_own(self, headers: dict[str, str]) -> bool:
        return headers.get(_HOLDER_HEADER) == self.nonce


class Lease:
    """A held lease. Get it from `Lease.acquire` and run `keep` as long as it is needed."""

    def __init__(self, claim: _Claim, revision: int, held_since_s: float) -> None:
        self.key = claim.key
        self.revision = revision
        """The stream sequence at which the lease was acquired.

        It increases with every new holder. Renewals do not change it.
        """
        self._claim = claim
        self._last = revision
        self._held_since_s = held_since_s

    @classmethod
    async def acquire(cls, bus: Bus, key: str, value: bytes, ttl_s: float) -> Lease:
        """Wait until the lease is free, and acquire it.

        Args:   value: the name of the holder, for people.
                ttl_s: time to live, rounded up to whole seconds, the server's resolution.
        """
        claim = _Claim(bus, key, value, _whole_seconds(ttl_s), secrets.token_hex(8))
        while True:
            # Measured before the request: the lease may expire this long after it was sent.
            began_s = time.monotonic()
            try:
                revision = await claim.try_acquire()
                if revision is not None:
                    return cls(claim, revision, began_s)
                await _until_free(bus, key)
            except (NatsError, NatsTimeoutError) as error:
                log.warning("lease %s: %r; trying again", key, error)
                await asyncio.sleep(_RETRY_PAUSE_S)

    @property
    def expires_in_s(self) -> float:
        """Seconds from now during which no other process can hold the lease."""
        return self._held_since_s + self._claim.ttl_s - time.monotonic()

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises: LeaseLost: another holder has the lease, or it could not be renewed. In the latter
                case, a fifth of its time to live remains for stopping.
        """
        while True:
            await asyncio.sleep(self._claim.ttl_s / _RENEWALS_PER_TTL)
            try:
                async with asyncio.timeout(self.expires_in_s - self._claim.ttl_s * _MARGIN_SHARE):
                    await self._renew()
            except TimeoutError:
                raise self._lost("it could not be renewed in time") from None

    async def release(self) -> None:
        """Release the lease at once. Harmless if another process already holds it."""
        try:
            await self._claim.bus.keys.delete(Bucket.LEASES, self.key, self._last)
        except Conflict:
            log.info("lease %s already had another holder when it was released", self.key)

    async def _renew(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                # If the server dies, an attempt is never answered. Leave time for another one.
                async with asyncio.timeout(self._claim.ttl_s * _ATTEMPT_SHARE):
                    self._last = await self._claim.write(self._last, self.revision)
            except Conflict:
                await self._adopt_lost_answer()
            except (NatsError, NatsTimeoutError, TimeoutError) as error:
                log.warning("cannot renew lease %s yet: %r", self.key, error)
                await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                self._held_since_s = began_s
                return

    async def _adopt_lost_answer(self) -> None:
        """After a conflict, continue from our own renewal if only its answer was lost.

        Raises: LeaseLost: the conflict is with another holder, or the lease has expired.
        """
        current = await self._claim.bus.keys.get_raw(Bucket.LEASES, self.key)
        if current is None or current.is_gone or not self._claim.is_own(current.headers):
            raise self._lost("another holder took it, or it expired")
        self._last = current.sequence

    def _lost(self, reason: str) -> LeaseLost:
        return LeaseLost(f"lease {self.key} is lost: {reason}", code=Code.ABORTED)


async def delete_dead_lease(bus: Bus, key: str) -> None:
    """Delete the lease of a dead process, so that nobody waits for it to expire.

    Raises: nats errors: the deletion was not stored.
    """
    current = await bus.keys.get(Bucket.LEASES, key)
    if current is not None:
        with suppress(Conflict):
            await bus.keys.delete(Bucket.LEASES, key, current.sequence)


async def _until_free(bus: Bus, key: str) -> None:
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(_REREAD_AFTER_S),
            aclosing(bus.keys.watch(Bucket.LEASES, key)) as changes,
        ):
            async for change in changes:
                if change.stored is None:
                    return
