"""The shorter way for messages: what comes out is what nats-py would make of the same bytes."""

from __future__ import annotations

import random

import pytest
from nats.aio.client import Client

from phaseloom.common.transport.natsclient import MeshClient

Seen = list[tuple[int, bytes, bytes, bytes, bytes | None]]

PINGS = b"PING\r\n"
WIRE = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"HMSG a.c 2 $JS.ACK.x 27 32\r\nNATS/1.0\r\nName: a value\r\n\r\nworld\r\n"
    + PINGS
    + b"HMSG a.d 3 16 16\r\nNATS/1.0 404\r\n\r\n\r\n"
    + b"MSG a.e 4 reply.to 0\r\n\r\n"
    + b"MSG a.f 5 70000\r\n"
    + bytes(range(256)) * 273
    + bytes(112)
    + b"\r\n+OK\r\n"
    + b"MSG a.g 6 2\r\n\r\n\r\n"
)


def watched(client: Client, seen: Seen, pings: list[int]) -> None:
    """Have what a client takes from the wire noted, and nothing be done about it."""

    async def note(sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        seen.append((sid, subject, reply, data, headers or None))

    async def ping() -> None:
        pings.append(len(seen))

    client._process_msg = note  # type: ignore[method-assign]
    client._process_ping = ping  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(20))
async def test_reader_finds_nats_pys_messages_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    clients = (Client(), MeshClient())
    results: list[tuple[Seen, list[int]]] = [([], []), ([], [])]
    for client, (seen, pings) in zip(clients, results, strict=True):
        watched(client, seen, pings)
    rest = WIRE * 3
    while rest:
        # Often a byte or two, sometimes nearly all.
        size = min(len(rest), int(rng.paretovariate(0.4)))
        piece, rest = rest[:size], rest[size:]
        for client in clients:
            await client._ps.parse(piece)

    theirs, ours = results
    assert ours == theirs
    assert len(ours[0]) == 18
    assert ours[1] == [2, 8, 14]


@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0\r\nNats-Stream: SCHED\r\nContent-Type: application/msgpack\r\n\r\n",
        b"NATS/1.0\r\nName:no space\r\nOther:   many  \r\n\r\n",
        b"NATS/1.0\r\nEmpty: \r\n\r\n",
        b"NATS/1.0\r\nText: with: colon\r\n\r\n",
        b"NATS/1.0\r\nText: gr\xc3\xbcn\r\n\r\n",
        b"NATS/1.0\r\nText: \xff\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 404 Message Not Found\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 10\r\nNats-Last-Stream: 12\r\n\r\n",
    ],
)
async def test_headers_are_read_as_nats_py_reads_them(block: bytes) -> None:
    theirs = await Client()._process_headers(block)
    ours = await MeshClient()._process_headers(block)
    assert theirs is not None
    assert ours is not None
    # nats-py leaves a description that is not there out.
    assert {k: v for k, v in ours.items() if v} == {k: v for k, v in theirs.items() if v}


async def test_what_follows_a_reset_is_read_from_the_beginning() -> None:
    """A connection that is lost in the middle of a message leaves nothing to the next one."""
    client = MeshClient()
    seen: Seen = []
    watched(client, seen, [])
    await client._ps.parse(b"MSG a 1 100\r\nhalf")
    client._ps.reset()
    await client._ps.parse(b"MSG b 2 5\r\nwhole\r\n")
    assert seen == [(2, b"b", b"", b"whole", None)]
