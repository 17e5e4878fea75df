"""A process that waits until it is told to stop: `python -m tests.support.idle`."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.pause()
