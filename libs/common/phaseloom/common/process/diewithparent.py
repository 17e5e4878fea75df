"""Ask Linux to kill this process when its parent dies, even if SIGKILL kills the parent.

Phaseloom's own programs call `arm`. For other programs this file is also a launcher that needs only
the standard library: `python -I -S diewithparent.py <parent pid> <program> <argument>...`. The
request survives the exec. The kernel watches the parent's *thread* that created the child, so
children must be started from threads that live as long as their process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def arm(parent_pid: int) -> None:
    """Make the kernel kill this process (SIGKILL) as soon as its parent has exited.

    Args:   parent_pid: the process that started this one. If it exited before the request was in
                place, this process has another parent by now and kills itself.
    Raises: OSError: the kernel refuses the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def launcher(program: list[str]) -> list[str]:
    """Return the command that runs `program` so that it dies with the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


if __name__ == "__main__":
    arm(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
