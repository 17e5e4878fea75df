"""Fixtures of tests that run on a node, or a whole mesh, of real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.jobs import TASKS, oracle, short
from tests.support.node import TestNode, running_node
from tests.support.processes import without_torch
from tests.support.warm import cold


@pytest.fixture
def cold_nodes() -> Iterator[None]:
    """The services and nodes of the test's meshes import what they need themselves: see `cold`."""
    with cold():
        yield


@pytest.fixture(scope="module")
def expected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """SHA-256 of each task's weights after the module's `STEPS`, where nothing is shared."""
    root, steps = tmp_path_factory.mktemp("oracle"), request.module.STEPS
    return {task: oracle(task, short(task, steps), root / task) for task in TASKS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_node(request: pytest.FixtureRequest) -> AsyncIterator[TestNode]:
    """All tests of a module have one, with its `NUM_DEVICES`; one device where it says nothing."""
    async with running_node(num_devices=getattr(request.module, "NUM_DEVICES", 1)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def node(shared_node: TestNode) -> AsyncIterator[TestNode]:
    """The module's, with nothing of the tests before. For tests of `loop_scope="module"`."""
    async with shared_node.fresh():
        yield shared_node


@pytest.fixture
def noop_nodes() -> Iterator[None]:
    """The nodes of the test's meshes run `noop` alone: see `without_torch`."""
    with without_torch():
        yield
