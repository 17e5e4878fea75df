"""Sign and verify the tickets with which state managers give weights versions to other nodes.

The scheduler's shell signs the tickets issued by its core; state managers verify them. Both know
the mesh's secret; ranks do not. A ticket contains no time and no random value, so two schedulers
that briefly both lead sign the same ticket.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

import msgspec

from phaseloom.common.contract.commands import FilesTicket, Ticket

_PURPOSE = b"phaseloom ticket 1"

T = TypeVar("T", Ticket, FilesTicket)


def signed(ticket: T, secret: str) -> T:
    return msgspec.structs.replace(ticket, mac=_mac(ticket, secret))


def is_genuine(ticket: Ticket | FilesTicket, secret: str) -> bool:
    return hmac.compare_digest(ticket.mac, _mac(ticket, secret))


def _mac(ticket: Ticket | FilesTicket, secret: str) -> bytes:
    """HMAC-SHA256 over a ticket without its mac, with a key derived for this purpose only."""
    key = hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).digest()
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(ticket, mac=b""))
    return hmac.new(key, unsigned, hashlib.sha256).digest()
