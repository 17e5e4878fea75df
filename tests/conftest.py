"""Fixtures for all tests: a real nats-server of one's own, and a connection to it."""

from __future__ import annotations

import gc
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

# Its pytest plugin imports it in the summary, which fails on Python 3.11 after a torch process
# group was made in this process.
import hypothesis
import pytest

from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.natsserver import EmbeddedServer
from tests.support import megatron, vllm
from tests.support.directories import short_directory
from tests.support.warm import warm

TENANTS = ("acme", "globex")
_EXAMPLES = {"same": 1 / 3, "thorough": 10}
"""How many examples a property test draws under a profile, of those that its settings say."""
_FEW = 5
"""No property test is left with fewer examples than these."""
_SETTINGS = "_hypothesis_internal_use_settings"

# A change is judged by the same examples each time (`make test`); plain pytest draws new ones.
# No example has a deadline: a machine may be slow.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("thorough", print_blob=True, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Have processes that tests start forked from ones that have imported what they need, which all
    processes of pytest share: see `warm`."""
    if not hasattr(config, "workerinput"):
        started = ExitStack()
        started.enter_context(warm([vllm.PYTHON, megatron.PYTHON]))
        config.add_cleanup(started.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each property test draws fewer examples than its settings say with the profile `same` (`make
    test`), and far more with `thorough` (`make test-slow`)."""
    factor = _EXAMPLES.get(config.getoption("--hypothesis-profile"))
    if factor is None:
        return
    for test in {item.obj for item in items if isinstance(item, pytest.Function)}:
        if hypothesis.is_hypothesis_test(test) and hasattr(test, _SETTINGS):
            own: hypothesis.settings = getattr(test, _SETTINGS)
            wanted = max(min(own.max_examples, _FEW), round(own.max_examples * factor))
            setattr(test, _SETTINGS, hypothesis.settings(own, max_examples=wanted))


def pytest_collection() -> None:
    """Imports create no garbage, and searching for it takes time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have no garbage collection look at all that is imported by now: that takes a quarter of a
    second each time, and each backend that is built collects."""
    gc.enable()
    gc.collect()
    gc.freeze()


# A shell starts what runs in its background with Ctrl-C ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
