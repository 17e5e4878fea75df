"""Background work of the leader: detects expired leases and deletes outcomes that are no longer
needed.

An expired lease is appended to the log as an event; nothing is decided here. Called by `main`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeoutError

from phaseloom.common.contract import streams
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.events import NodeLost, OutcomesDropped, SessionLost, SessionOpened
from phaseloom.common.contract.ids import JobKey, parse_operation_key
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.keys import KeyChange
from phaseloom.common.transport.leases import node_lease_key, session_lease_key
from phaseloom.common.transport.retry import ATTEMPT_S, RetryingLog, until_done
from phaseloom.scheduler.core.durability import seals
from phaseloom.scheduler.core.jobs.jobs import MIN_KEPT_S
from phaseloom.scheduler.core.state.job import Job
from phaseloom.scheduler.core.state.transitions import JOB_ENDED
from phaseloom.scheduler.shell import Shell

log = logging.getLogger(__name__)

_SWEEPS_PER_RETENTION = 4
_SHORTEST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 60.0
_SWEEP_S = 30.0
_DONE_PREFIX = f"{streams.PREFIX}.done."


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """Background tasks of the leader. Each public method runs until cancelled."""

    bus: Bus
    log: RetryingLog
    shell: Shell

    async def watch_nodes(self, margin_s: float) -> None:
        """Report a node as lost once its lease has been expired long enough for its agent to kill
        its ranks."""
        await self.shell.caught_up.wait()
        loop = asyncio.get_running_loop()
        gone_since: dict[tuple[str, int], float] = {}
        while True:
            nodes = [n for n in self.shell.core.state.nodes.values() if n.is_up]
            for node in nodes:
                incarnation = (node.node, node.revision)
                if await self._has_lease(node_lease_key(node.node)):
                    gone_since.pop(incarnation, None)
                elif loop.time() - gone_since.setdefault(incarnation, loop.time()) > margin_s:
                    event = NodeLost(node.node, node.revision, "its lease expired")
                    await self.log.append(event, msg_id=f"node-lost:{node.node}:{node.revision}")
            await asyncio.sleep(margin_s / 3)

    async def watch_sessions(self) -> None:
        """Report controllers whose heartbeat stopped or resumed."""
        await self.shell.caught_up.wait()
        leases: dict[str, tuple[int, int]] = {}
        async with aclosing(self.bus.keys.watch(Bucket.LEASES, session_lease_key(_ANY))) as changes:
            async for change in changes:
                await self._note_session(change, leases)

    async def sweep_outcomes(
        self, retention_s: float, max_bytes_of: Callable[[str], float]
    ) -> None:
        """Delete outcomes that are older than the retention and that no rebuild needs.

        Args: max_bytes_of: tenant → the bound on its stored bytes; 0: none.
        """
        await self.shell.caught_up.wait()
        pause_s = retention_s / _SWEEPS_PER_RETENTION
        pause_s = min(max(pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        while True:
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(_SWEEP_S):
                    await self._sweep(time.time() - retention_s)
                    await self.relieve(retention_s, max_bytes_of)
            except (TimeoutError, NatsError, NatsTimeoutError) as error:
                log.info("sweep of outcomes interrupted, the next one will continue: %r", error)

    async def _has_lease(self, key: str) -> bool:
        stored = await until_done(
            lambda: self.bus.keys.get(Bucket.LEASES, key), "read a lease", attempt_s=ATTEMPT_S
        )
        return stored is not None

    async def _note_session(self, change: KeyChange, leases: dict[str, tuple[int, int]]) -> None:
        """Report a controller as lost or resumed after a change of its lease.

        Args: leases: lease key → (last live session, revision of its lease).
        """
        _, tenant, name = change.key.split(".")
        job = self.shell.core.state.jobs.get(str(JobKey(tenant, name)))
        if change.stored is not None:
            session = int(change.stored.payload)
            leases[change.key] = (session, change.stored.sequence)
            if (
                job is not None
                and job.controller.session == session
                and not job.controller.is_attached
            ):
                await self.log.append(SessionOpened(job.key, session))
        elif job is not None and job.state not in JOB_ENDED:
            await self._report_lost(job, *leases.pop(change.key, (job.controller.session, 0)))

    async def _report_lost(self, job: Job, session: int, revision: int) -> None:
        """Report a session as lost.

        A lease that expired before this process started is attributed to the newest session. If
        that session is alive, its next heartbeat corrects this.
        """
        msg_id = f"session-lost:{job.key}:{session}:{revision}"
        await self.log.append(SessionLost(job.key, session), msg_id=msg_id)

    async def relieve(self, retention_s: float, max_bytes_of: Callable[[str], float]) -> None:
        """Delete outcomes before they expire, of tenants that have used half of their bytes."""
        state, now_s = self.shell.core.state, self.shell.now_s()
        before_s = now_s - min(retention_s, MIN_KEPT_S)
        for tenant in sorted(state.outcomes):
            limit = max_bytes_of(tenant)
            is_old = any(60 * (minute + 1) <= before_s for minute in state.outcomes[tenant])
            if limit and is_old and state.outcome_bytes(tenant, now_s) > limit / 2:
                await self._sweep(before_s, f"{tenant}.")
                await self.log.append(OutcomesDropped(tenant, before_s))
                await self.bus.notice(
                    "scheduler",
                    "outcomes deleted early",
                    "they use more than half of the tenant's bytes (`max_bytes`)",
                    tenant,
                )

    async def _sweep(self, before_s: float, prefix: str = "") -> None:
        subjects = self.bus.stored.before(streams.DONE, f"{_DONE_PREFIX}{prefix}>", before_s)
        num_deleted = 0
        async with aclosing(subjects) as old:
            async for subject in old:
                if not self._is_needed(subject):
                    await self.bus.stored.delete(streams.DONE, subject)
                    num_deleted += 1
        if num_deleted:
            log.info("deleted %d outcomes that are no longer needed", num_deleted)

    def _is_needed(self, subject: str) -> bool:
        try:
            key = parse_operation_key(subject.removeprefix(_DONE_PREFIX))
        except CallerError:
            return False
        return seals.is_outcome_needed(self.shell.core.state, key)


_ANY = JobKey("*", "*")
