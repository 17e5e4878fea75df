"""Heartbeats of a service's event loop, in the protocol of systemd's watchdog.

If the variable NOTIFY_SOCKET names a datagram socket, the service sends `WATCHDOG=1` to it twice a
second. The supervisor of `phaseloom up` and systemd (`WatchdogSec`) replace services that hang.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""Variable with the socket's path, or `@` and its name in the abstract namespace."""
INTERVAL_S = 0.5
MESSAGE = b"WATCHDOG=1"


async def beat() -> None:
    """Send heartbeats while the event loop runs, until cancelled. Without the variable, return."""
    # Processes that this one starts have no heartbeat of their own, so they must not inherit it.
    address = os.environ.pop(NOTIFY_SOCKET, "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        while True:
            with suppress(OSError):  # the supervisor is slow to read, or is gone
                sender.sendto(MESSAGE, address)
            await asyncio.sleep(INTERVAL_S)
