"""A node's own record of the decision log's length, which reveals an older log.

A store that has lost its newest messages, or was replaced by an older copy, looks intact: it
continues from its end and assigns the same sequence numbers again. So each node keeps the newest
sequence it knows on its own disk, next to its seals. If the log ends before that, no decision may
be based on it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import log_end_lost

log = logging.getLogger(__name__)

FILE = "log-mark"
"""Name of the file in the node's state directory."""
_KEEP_EVERY_S = 1.0


def read_mark(directory: Path) -> int:
    """Return the newest decision-log sequence that a node has recorded; 0: there is no readable
    record."""
    try:
        return int((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return 0


class LogMark:
    """The mark of one node, maintained by its agent.

    It may lag a second behind what the node knows, and is never ahead of it.
    """

    def __init__(self, bus: Bus, directory: Path) -> None:
        self._bus = bus
        self._directory = directory
        self._written = read_mark(directory)
        self._seen = 0

    def record(self, sequence: int) -> None:
        """Record that the log has an entry with this sequence."""
        self._seen = max(self._seen, sequence)

    async def check(self) -> None:
        """Compare the log with the mark.

        Raises: ResourceError: DATA_LOSS: the log ends before the mark.
        """
        end = await self._bus.log.end()
        if end < self._written:
            raise log_end_lost(self._written, end)

    async def keep(self) -> None:
        """Write the mark whenever it changes, until cancelled."""
        while True:
            newest = max(self._seen, self._bus.log.mark)
            if newest > self._written:
                try:
                    await asyncio.to_thread(self._write, newest)
                    self._written = newest
                except OSError as error:  # a full disk: the mark only lags
                    log.warning("cannot write the log mark: %s", error)
            await asyncio.sleep(_KEEP_EVERY_S)

    def _write(self, newest: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._directory / FILE, str(newest).encode())
