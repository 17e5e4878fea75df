"""Ask Linux to kill this process when its parent dies, even when the parent dies by SIGKILL.

Our own programs call `arm`. For programs that cannot, this file is a launcher that needs nothing
but the standard library: `python -I -S diewithparent.py <parent pid> <program> <argument>...`. The
request outlives the exec. The kernel watches the parent's *thread* that made the child, so children
are started from threads that live as long as their process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def arm(parent_pid: int) -> None:
    """Have this process killed (SIGKILL) as soon as its parent is gone.

    Args:   parent_pid: the process that started this one. If it died before the request was in
                place, this process has another parent by now, and ends at once.
    Raises: OSError: the kernel refuses the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_PDEATHSIG): {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def launcher(program: list[str]) -> list[str]:
    """The command that runs `program` so that it dies with the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


if __name__ == "__main__":
    arm(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
