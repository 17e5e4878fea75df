"""Python runs this file at its start where `tests.support.warm` has set its path: a program that
imports much gets itself forked from a process that has imported it already."""

import os
import sys

if os.environ.get("PHASELOOM_TESTS_WARM", "").partition(":")[0] == sys.prefix:
    _words = sys.orig_argv
    _at = _words.index("-m") + 1 if "-m" in _words else len(_words)
    _program = _words[_at] if _words[_at:] else ""
    _imported = ""
    if _program.startswith("tests.unit.worker.backends.") or (
        # A node that preloads nothing has nothing to gain.
        _program == "phaseloom.worker.agent.forkserver" and _words[_at + 1 :]
    ):
        _imported = "torch"
    elif _program.endswith(".main") and _program.split(".")[1:-1] in (
        ["scheduler"],
        ["router"],
        ["profiler"],
        ["statemgr"],
        ["worker"],
    ):
        _imported = "ours"
    if _imported:
        import contextlib
        import json
        import signal
        import socket
        import struct

        _directory = os.environ["PHASELOOM_TESTS_WARM"].partition(":")[2]
        with socket.socket(socket.AF_UNIX) as _warm:
            _warm.connect(f"{_directory}/{_imported}")
            _asked = json.dumps([_words[_at:], sys.warnoptions, os.getcwd(), dict(os.environ)])
            socket.send_fds(_warm, [struct.pack("<I", len(_asked.encode()))], [0, 1, 2])
            _warm.sendall(_asked.encode())
            # These are the other process's from here on.
            _nothing = os.open(os.devnull, os.O_RDWR)
            for _fd in (0, 1, 2):
                os.dup2(_nothing, _fd)
            _code = b""
            if _told := _warm.recv(4):
                (_pid,) = struct.unpack("<i", _told)
                with open(f"{_directory}/{os.getpid()}", "w") as _file:
                    _file.write(str(_pid))

                def _pass_on(number: int, frame: object) -> None:
                    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                        os.kill(_pid, number)

                for _number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(_number, _pass_on)
                _code = _warm.recv(1)
                os.unlink(f"{_directory}/{os.getpid()}")
        (_status,) = struct.unpack("<b", _code or b"\1")
        if _status == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(_status & 0xFF)
