"""Heartbeats of a service's event loop, in the protocol of systemd's watchdog.

If the variable NOTIFY_SOCKET names a datagram socket, the service sends `WATCHDOG=1` to it twice a
second. The supervisor of `phaseloom up` and systemd (`WatchdogSec`) replace services that hang.

`STATUS=` in a heartbeat says that the service is short of open files, memory or disk space, and how
to fix that. It is empty again once nothing has failed for five seconds. The supervisor makes
notices of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

from phaseloom.common.contract.errors import shortages, unexpected_error

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""Variable with the socket's path, or `@` and its name in the abstract namespace."""
INTERVAL_S = 0.5
MESSAGE = b"WATCHDOG=1"
STATUS = b"STATUS="
_QUIET_BEATS = 10
"""A shortage is over after this many heartbeats without a failure."""
_MAX_STATUS_BYTES = 400


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
        status, num_quiet = b"", 0
        while True:
            shortage = _shortage(sender.fileno()).encode()[:_MAX_STATUS_BYTES]
            num_quiet = 0 if shortage else num_quiet + 1
            status = shortage or (status if num_quiet < _QUIET_BEATS else b"")
            with suppress(OSError):  # the supervisor is slow to read, or is gone
                sender.sendto(MESSAGE + b"\n" + STATUS + status, address)
            await asyncio.sleep(INTERVAL_S)


def _shortage(descriptor: int) -> str:
    """Return what this process has lacked since the last call and how to fix it; empty: nothing."""
    try:
        os.close(os.dup(descriptor))
    except OSError as error:
        unexpected_error(error)
    if not shortages:
        return ""
    info = shortages.pop()
    return f"{info.message}; to fix: {info.remedy}"
