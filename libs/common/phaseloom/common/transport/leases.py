"""Leases: who is alive and who leads, in the KV bucket `leases`.

A lease is a key with a time to live, taken and renewed by compare-and-set, so that there is one
holder at most. Its revision (the stream sequence at which it was taken) only grows, and fences the
holders from one another. A holder that cannot renew its lease knows so before anyone else can take
it: the holder counts from before its last renewal was sent, the server from when it was stored.

KV's own `update` sets no time to live, hence `Bus.keys.swap`. An expired key leaves a marker, which
reads as free and whose sequence the next holder must name. An attempt whose answer was lost may
have been stored: a holder recognises its own by a nonce.
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
"""Header of every renewal: the revision with which the lease was taken."""
_HOLDER_HEADER = "Phaseloom-Lease-Holder"
_RENEWALS_PER_TTL = 3
_MARGIN_SHARE = 0.2
_ATTEMPT_SHARE = 0.2
_RETRY_PAUSE_S = 0.1
_LOOK_AGAIN_S = 30.0
"""Longest wait for a lease to become free before the key is read again.

It is less than the time for which the marker of an expired lease is kept: somebody who was cut off
for longer than that would never hear of it.
"""


def node_lease_key(node: str) -> str:
    """The key under which a node's agent holds its lease."""
    return f"node.{node}"


async def nodes_up(bus: Bus) -> list[str]:
    """The names of the nodes that are up, sorted: those whose agents hold a lease."""
    prefix = node_lease_key("")
    keys = await bus.keys.names(Bucket.LEASES)
    return sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))


def scheduler_lease_key() -> str:
    """The key under which the scheduler that leads is known."""
    return "scheduler"


def gateway_lease_key(tenant: str) -> str:
    """The key under which the gateway that serves a tenant is known; the value is its URL."""
    return f"gateway.{tenant}"


def session_lease_key(job: JobKey) -> str:
    """The key under which a job's controller is known to live; the value is its session number."""
    return f"session.{job}"


async def renew_session(bus: Bus, job: JobKey, session: int, ttl_s: float) -> None:
    """Renew the lease of a job's controller: it lasts `ttl_s` (whole seconds, rounded up) from now.

    Any replica of the router may renew it, so the lease has no holder, and only a newer session
    displaces another.

    Raises: ResourceError: ABORTED: a newer session has sent a heartbeat.
            nats errors: the renewal is not stored.
    """
    key = session_lease_key(job)
    while True:
        current = await bus.keys.get_raw(Bucket.LEASES, key)
        alive = 0 if current is None or current.is_gone else int(current.payload)
        if alive > session:
            raise to_exception(session_superseded(session, alive))
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
    """The lease is another holder's, or could be before it is renewed: stop acting on it now."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """One holder's bid for one key."""

    bus: Bus
    key: str
    value: bytes
    ttl_s: float
    nonce: str

    async def try_take(self) -> int | None:
        """Try once to take the lease; returns its revision, or None while another holds it."""
        current = await self.bus.keys.get_raw(Bucket.LEASES, self.key)
        if current is not None and not current.is_gone and not self.is_own(current.headers):
            return None
        try:
            # Also where it is our own of an attempt whose answer was lost: only what is stored now
            # is known to last.
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
    """A held lease. Take it with `Lease.acquire`, run `keep` for as long as it is needed."""

    def __init__(self, claim: _Claim, revision: int, held_since_s: float) -> None:
        self.key = claim.key
        self.revision = revision
        """The stream sequence at which the lease was taken.

        It grows with every new holder; renewals do not change it.
        """
        self._claim = claim
        self._last = revision
        self._held_since_s = held_since_s

    @classmethod
    async def acquire(cls, bus: Bus, key: str, value: bytes, ttl_s: float) -> Lease:
        """Wait until the lease is free, and take it.

        Args: value: the name of the holder, for people.
              ttl_s: time to live; rounded up to whole seconds, the server's resolution.
        """
        claim = _Claim(bus, key, value, _whole_seconds(ttl_s), secrets.token_hex(8))
        while True:
            began_s = time.monotonic()
            try:
                revision = await claim.try_take()
                if revision is not None:
                    return cls(claim, revision, began_s)
                await _until_free(bus, key)
            except (NatsError, NatsTimeoutError) as error:
                log.warning("lease %s: %r; trying again", key, error)
                await asyncio.sleep(_RETRY_PAUSE_S)

    @property
    def expires_in_s(self) -> float:
        """Seconds from now for which nobody else can hold the lease."""
        return self._held_since_s + self._claim.ttl_s - time.monotonic()

    async def keep(self) -> None:
        """Renew the lease until cancelled.

        Raises: LeaseLost: the lease is another's, or could not be renewed. In the latter case a
                fifth of its time to live remains, to stop in.
        """
        while True:
            await asyncio.sleep(self._claim.ttl_s / _RENEWALS_PER_TTL)
            try:
                async with asyncio.timeout(self.expires_in_s - self._claim.ttl_s * _MARGIN_SHARE):
                    await self._renew()
            except TimeoutError:
                raise self._lost("it could not be renewed in time") from None

    async def release(self) -> None:
        """Give the lease up at once; harmless when it is already another's."""
        try:
            await self._claim.bus.keys.delete(Bucket.LEASES, self.key, self._last)
        except Conflict:
            log.info("lease %s was already another's when it was released", self.key)

    async def _renew(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                # An attempt that met the server's death is never answered: leave time for another.
                async with asyncio.timeout(self._claim.ttl_s * _ATTEMPT_SHARE):
                    self._last = await self._claim.write(self._last, self.revision)
            except Conflict:
                await self._adopt_lost_answer()
            except (NatsError, NatsTimeoutError, TimeoutError) as error:
                log.warning("lease %s is not renewed yet: %r", self.key, error)
                await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                self._held_since_s = began_s
                return

    async def _adopt_lost_answer(self) -> None:
        """Go on, after a conflict, from our own renewal whose answer was lost.

        Raises: LeaseLost: the conflict is with another holder, or the lease has expired.
        """
        current = await self._claim.bus.keys.get_raw(Bucket.LEASES, self.key)
        if current is None or current.is_gone or not self._claim.is_own(current.headers):
            raise self._lost("another holder took it, or it expired")
        self._last = current.sequence

    def _lost(self, why: str) -> LeaseLost:
        return LeaseLost(f"lease {self.key} is lost: {why}", code=Code.ABORTED)


async def end_of_dead(bus: Bus, key: str) -> None:
    """End a lease whose holder is known to be dead, so that nobody waits for it to run out.

    Raises: nats errors: it is not stored.
    """
    current = await bus.keys.get(Bucket.LEASES, key)
    if current is not None:
        with suppress(Conflict):
            await bus.keys.delete(Bucket.LEASES, key, current.sequence)


async def _until_free(bus: Bus, key: str) -> None:
    """Wait until the key is deleted or has expired, or until it is time to read it again."""
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(_LOOK_AGAIN_S),
            aclosing(bus.keys.watch(Bucket.LEASES, key)) as changes,
        ):
            async for change in changes:
                if change.stored is None:
                    return
