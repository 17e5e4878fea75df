"""A node's own record of how far the decision log has come, so that an older log is noticed.

A store that has lost its newest messages, or an older copy of one that was put back, looks sound:
it goes on from where it ends, and gives out the same sequence numbers once more. Each node keeps
the newest sequence that it knows of on its own disk, beside its seals. Where the log ends before
that, nothing may be decided on it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from phaseloom.common.process.files import replace_file
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.decisionlog import log_went_back

log = logging.getLogger(__name__)

FILE = "log-mark"
"""Name of the file in the directory of a node's state."""
_KEEP_EVERY_S = 1.0


def read_mark(directory: Path) -> int:
    """The newest sequence of the decision log that a node has known; 0: none that can be read."""
    try:
        return int((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return 0


class LogMark:
    """The mark of one node, kept by its agent.

    It may lag behind what the node knows by a second; it is never ahead of it.
    """

    def __init__(self, bus: Bus, directory: Path) -> None:
        self._bus = bus
        self._directory = directory
        self._kept = read_mark(directory)
        self._seen = 0

    def saw(self, sequence: int) -> None:
        """Note that the log has an entry with this sequence."""
        self._seen = max(self._seen, sequence)

    async def check(self) -> None:
        """Compare the log with the mark.

        Raises: ResourceError: DATA_LOSS: the log ends before the mark.
        """
        end = await self._bus.log.end()
        if end < self._kept:
            raise log_went_back(self._kept, end)

    async def keep(self) -> None:
        """Write the mark whenever it has changed, until cancelled."""
        while True:
            newest = max(self._seen, self._bus.log.mark)
            if newest > self._kept:
                try:
                    await asyncio.to_thread(self._write, newest)
                    self._kept = newest
                except OSError as error:  # a full disk: the mark only lags
                    log.warning("the log's mark is not kept: %s", error)
            await asyncio.sleep(_KEEP_EVERY_S)

    def _write(self, newest: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._directory / FILE, str(newest).encode())
