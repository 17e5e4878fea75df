"""The processes that tests fork programs from, which nothing that becomes of a program may end."""

from __future__ import annotations

import os
import socket
import subprocess

from tests.support.warm import Forked


def test_program_that_dies_before_it_has_a_group_of_its_own_ends_alone() -> None:
    """It ended the process that it was forked from, and with that the programs of all tests."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["false"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    Forked(process.pid, os.pidfd_open(process.pid), ours).end()
    with theirs:
        assert theirs.recv(1) == b"\x01"
    process.wait()
