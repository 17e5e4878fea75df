"""Hosts of their own on this machine: network namespaces on one switch, with slow links.

Needs leave to make namespaces (root, CAP_NET_ADMIN) and the programs `ip` and `tc`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_MTU = 9000
"""Headers take less than one per cent then."""


class NotPermittedError(Exception):
    """Namespaces cannot be made here; says why."""


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str
    port: tuple[str, str]
    """(namespace of the switch, device there)."""

    @property
    def launcher(self) -> tuple[str, ...]:
        """Command that runs another one on this host."""
        return ("ip", "netns", "exec", self.namespace)

    async def limit(self, bytes_per_s: int) -> None:
        """What it sends to all others together."""
        rate = ("rate", f"{8 * bytes_per_s}bit", "burst", "64kb", "latency", "1s")
        await _run(*self.launcher, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    async def unplug(self) -> None:
        await _run(*_in(self.port[0]), "ip", "link", "set", self.port[1], "down")

    async def plug(self) -> None:
        await _run(*_in(self.port[0]), "ip", "link", "set", self.port[1], "up")

    async def sent_bytes(self) -> int:
        """By the interface's counter, headers included."""
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(await _run(*self.launcher, "cat", counter))


@asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Host]]:
    """Raises: NotPermittedError."""
    if not (shutil.which("ip") and shutil.which("tc")):
        raise NotPermittedError("ip and tc (iproute2) are not installed")
    name = f"pl{os.getpid()}"
    switch = f"{name}-switch"
    made: list[str] = []
    try:
        found = []
        await _add(switch, made)
        await _run(*_in(switch), "ip", "link", "add", "br0", "type", "bridge")
        await _run(*_in(switch), "ip", "link", "set", "br0", "mtu", str(_MTU), "up")
        for number in range(count):
            host = Host(f"{name}-{number}", f"10.213.0.{number + 1}", (switch, f"port{number}"))
            await _add(host.namespace, made)
            await _connect(host)
            found.append(host)
        yield found
    finally:
        for namespace in reversed(made):
            await _run("ip", "netns", "delete", namespace)


async def _connect(host: Host) -> None:
    switch, port = host.port
    end = ("peer", "name", "eth0", "netns", host.namespace)
    await _run(*_in(switch), "ip", "link", "add", port, "mtu", str(_MTU), "type", "veth", *end)
    await _run(*_in(switch), "ip", "link", "set", port, "master", "br0", "up")
    await _run(*host.launcher, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    await _run(*host.launcher, "ip", "link", "set", "eth0", "mtu", str(_MTU), "up")
    await _run(*host.launcher, "ip", "link", "set", "lo", "up")


async def _add(namespace: str, made: list[str]) -> None:
    await _run("ip", "netns", "add", namespace)
    made.append(namespace)


def _in(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, complaint = await process.communicate()
    if process.returncode:
        raise NotPermittedError(f"{' '.join(command)}: {complaint.decode().strip()}")
    return out.decode()
