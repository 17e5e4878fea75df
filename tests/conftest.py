"""Fixtures for all tests: a real nats-server of one's own, and a connection to it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

# Its pytest plugin imports it in the summary, which fails on Python 3.11 after a torch process
# group was made in this process.
import hypothesis
import pytest

from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import EmbeddedServer
from tests.support.directories import short_directory
from tests.support.warm import warm

TENANTS = ("acme", "globex")
_THOROUGH = 10
_SETTINGS = "_hypothesis_internal_use_settings"

# A change is judged by the same examples each time (`make test`); plain pytest draws new ones.
# No example has a deadline: a machine may be slow.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("thorough", print_blob=True, deadline=None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the profile `thorough` (`make test-slow`) each property test draws far more examples
    than its settings say."""
    if config.getoption("--hypothesis-profile") != "thorough":
        return
    for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
        if hypothesis.is_hypothesis_test(test) and hasattr(test, _SETTINGS):
            own: hypothesis.settings = getattr(test, _SETTINGS)
            more = hypothesis.settings(own, max_examples=own.max_examples * _THOROUGH)
            setattr(test, _SETTINGS, more)


# A shell starts what runs in its background with Ctrl-C ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Processes of ranks need not import torch each: see `warm`. Those of vLLM and Megatron do,
    since such a library reads the environment when it is imported."""
    with nullcontext() if find_spec("vllm") or find_spec("megatron") else warm():
        yield


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """See `short_directory`."""
    with short_directory() as directory:
        yield directory


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A nats-server with an empty store and the tenants `acme` and `globex`."""
    async with EmbeddedServer(tmp_path / "nats", TENANTS, fsync=False) as server:
        yield server


@pytest.fixture
async def bus(nats_server: EmbeddedServer) -> AsyncIterator[Bus]:
    """The mesh account's connection, streams provisioned, also those of the tenants."""
    bus = await Bus.open(nats_server.credentials.bus, "test")
    for tenant in TENANTS:
        await bus.provision_tenant(tenant, 64 * 2**20)
    yield bus
    await bus.close()
