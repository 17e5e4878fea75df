"""Reports on the log when the mesh does not answer, and when it answers again."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

REPORT_AFTER_S = 2.0
"""How long the mesh may be silent before the log mentions it."""
_NOTICE_EVERY_S = 60.0


class Contact:
    """Whether the mesh of a connection answers.

    Args: patience_s: how long calls and open operations wait for an answer.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._silent_since_s: float | None = None
        self._reported_s: float | None = None

    def answered(self) -> None:
        if self._reported_s is not None:
            log.warning("the mesh answers again")
        self._silent_since_s = self._reported_s = None

    def silent(self, reason: str, since_s: float | None = None) -> None:
        """Record that the mesh does not answer, and report it once that lasts.

        Args: since_s: when the unanswered request was made, by the monotonic clock; None: now.
        """
        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s if since_s is None else since_s
        silent_s = now_s - self._silent_since_s
        last_s = self._reported_s
        if silent_s >= REPORT_AFTER_S and (last_s is None or now_s - last_s >= _NOTICE_EVERY_S):
            self._reported_s = now_s
            log.warning(
                "the mesh has not answered for %.0f s (%s); calls and operations wait up to %.0f s "
                "for it. Check that `phaseloom up` and its NATS server run",
                silent_s,
                reason,
                self._patience_s,
            )
