"""Prefetches: hints to bring state or weights to this node or its ranks before they are needed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from phaseloom.common.contract.commands import PrefetchState, PrefetchVersion
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import VersionKey
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.agent.wpgs import Wpgs
from phaseloom.worker.rank.wire import PrefetchWeights

log = logging.getLogger(__name__)


class Prefetching:
    """Follows hints. A failed hint is only logged, because the operation itself will report the
    error."""

    def __init__(
        self,
        wpgs: Wpgs,
        state: AgentStateClient,
        release: Callable[[list[VersionKey]], Awaitable[None]],
    ) -> None:
        """Args: release: drops weights versions from this node."""
        self._wpgs = wpgs
        self._state = state
        self._release = release
        self._num_hints: Counter[VersionKey] = Counter()
        """Weights versions that ranks are fetching now → the number of running hints for each."""
        self._released: set[VersionKey] = set()
        """Versions among these that were released during the fetch."""

    async def prefetch_state(self, command: PrefetchState) -> None:
        try:
            await self._state.prefetch(command.deployment, command.incarnation, command.in_s)
        except PhaseloomError as error:
            # For example, the hint came after the incarnation had ended.
            log.info("cannot prefetch %s: %s", command.deployment, error)

    async def prefetch_version(self, command: PrefetchVersion) -> None:
        wpg, version = (
            self._wpgs.get(command.deployment, command.incarnation),
            command.ticket.version,
        )
        if wpg is None:
            return
        self._num_hints[version] += 1
        try:
            await wpg.prefetch_version(PrefetchWeights(command.sources, command.ticket, command.id))
        except PhaseloomError as error:
            log.info("cannot prefetch version %s: %s", version, error)
        self._num_hints[version] -= 1
        if not self._num_hints[version]:
            del self._num_hints[version]
            if version in self._released:
                # The fetch may have brought it back after it was released.
                self._released.remove(version)
                await self._release([version])

    async def release(self, versions: list[VersionKey]) -> None:
        """Drop weights versions, and again any that a running prefetch brings back."""
        self._released.update(version for version in versions if version in self._num_hints)
        await self._release(versions)
