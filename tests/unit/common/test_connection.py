"""The addresses of NATS servers, as people write them."""

from __future__ import annotations

import pytest

from phaseloom.common.contract.errors import CallerError
from phaseloom.common.transport.connection import parse_addresses


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("nats://here:1", ["nats://here:1"]),
        ("nats://here:1/", ["nats://here:1/"]),
        ("tls://[::1]:1, tls://[::2]:2", ["tls://[::1]:1", "tls://[::2]:2"]),
        ("here:1", ["nats://here:1"]),
        ("here", ["nats://here:4222"]),
        ("nats://here", ["nats://here:4222"]),
        ("wss://here", ["wss://here"]),
    ],
)
def test_address_has_its_scheme_and_its_port(url: str, found: list[str]) -> None:
    assert parse_addresses(url, "URL") == found


@pytest.mark.parametrize(
    "url",
    [
        "http://here:1",
        "nats://here:1,http://here:2",
        "nats://",
        "",
        "nats://here:x",
        "here:70000",
        "nats:/here:1",
        "nats://here:1/path",
    ],
)
def test_what_is_no_address_is_refused_and_its_source_named(url: str) -> None:
    """`http` was taken for the name of a host that does not answer."""
    with pytest.raises(CallerError, match="is not the address of a NATS server") as refused:
        parse_addresses(url, "PHASELOOM_URL")
    assert refused.value.info.field == "PHASELOOM_URL"
    assert "nats://HOST:PORT" in refused.value.info.remedy
