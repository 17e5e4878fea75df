"""The server that ranks are forked from: what it is told, what dies with what, what is reaped."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from phaseloom.common.contract.errors import ResourceError
from phaseloom.common.process.forkserver import ForkedProcess, ForkServer
from phaseloom.worker.agent import forkserver
from phaseloom.worker.agent.interpreters import Interpreters
from tests.support.processes import child_pids

BAD_CONFIG = '{"token": "a secret"}'
"""A rank ends at once on it."""
_PATIENCE_S = 30.0


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(forkserver.command(sys.executable, []), "run `phaseloom doctor`")
    yield server
    server.close()


def wait_for_end(rank: ForkedProcess) -> None:
    assert select.select([rank.sentinel], [], [], _PATIENCE_S)[0]
    rank.close()


def server_pid() -> int:
    (pid,) = [pid for pid in child_pids(os.getpid()) if b"agent.forkserver" in command_line(pid)]
    return pid


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_rank_is_told_by_the_socket_alone_and_known_until_it_is_dead(server: ForkServer) -> None:
    rank = server.fork(BAD_CONFIG)
    pid = server_pid()
    assert b"secret" not in command_line(pid)
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    wait_for_end(rank)
    rank.kill()  # harmless by now
    ranks = [server.fork(BAD_CONFIG) for _ in range(4)]
    for each in ranks:
        each.kill()
        wait_for_end(each)
    assert len({each.pid for each in ranks}) == 4


def test_dead_server_is_named_with_the_remedy_and_started_again(server: ForkServer) -> None:
    wait_for_end(server.fork(BAD_CONFIG))
    os.kill(server_pid(), signal.SIGKILL)
    with pytest.raises(ResourceError, match=r"cannot fork processes.*phaseloom doctor"):
        server.fork(BAD_CONFIG)
    server.restart_if_dead()
    wait_for_end(server.fork(BAD_CONFIG))


def test_interpreter_that_is_none_fails_its_own_backend_only(tmp_path: Path) -> None:
    with closing(Interpreters({"vllm": str(tmp_path / "python")}, preload=False)) as interpreters:
        found = interpreters.backends()
    assert "vllm" not in found
    assert {"noop", "sampler"} <= set(found)
