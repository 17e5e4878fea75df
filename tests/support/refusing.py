"""Makes the kernel refuse a system call, as a container's seccomp profile does."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse(number: int) -> None:
    """Refuse a system call with EPERM in this thread, and in all that it starts from now on."""
    steps = [
        (_LOAD, 0, 0, 0),  # the call's number
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), code)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
