"""Python runs this file at its start where `tests.support.warm` has set its path: a program that
imports much gets itself forked from a process that has imported it already."""

import os
import sys

_directory, *_environments = os.environ.get("PHASELOOM_TESTS_WARM", "").split(":")
if sys.prefix in _environments:
    _words = sys.orig_argv
    _at = 1
    while _words[_at:] and _words[_at - 1] != "-m" and not _words[_at].endswith("/sdk_child.py"):
        _at += 1
    _program = _words[_at] if _words[_at:] else ""
    _place = _environments.index(sys.prefix)
    _imported = ""
    if (
        _program.startswith("tests.unit.worker.backends.")
        or _program == "phaseloom.worker.measuring"
        or (_program == "phaseloom.worker.agent.forkserver" and _words[_at + 1 :])
    ):
        _imported = f"torch{_place}"
    elif (
        _program == "phaseloom.worker.agent.forkserver"
        and "PHASELOOM_WORKER_NODE" in os.environ
        and _place == 0
    ):
        # A node whose ranks need no torch.
        _imported = "ours0"
    elif _program.endswith(".main") and _program.split(".")[1:-1] in (
        ["scheduler"],
        ["router"],
        ["profiler"],
        ["statemgr"],
        ["worker"],
        ["gateway"],
        ["console"],
    ):
        _imported = "ours0"
    elif _program.endswith(".py") and _place == 0:
        _imported = "sdk0"
    if _imported:
        # Nodes beside one another must not agree only because their hashes of strings are the same.
        _node = os.environ.get("PHASELOOM_WORKER_NODE") or os.environ.get("PHASELOOM_STATEMGR_NODE")
        if _place == 0 and _imported != "sdk0" and (_node or "")[-1:] in {*"13579"}:
            _imported += "odd"
        # Only what is built into Python: hundreds of programs run this.
        import _signal  # type: ignore[import-not-found]
        import _socket
        import marshal

        _warm = _socket.socket(_socket.AF_UNIX)
        _warm.connect(f"{_directory}/{_imported}")
        _asked = marshal.dumps([_words[_at:], sys.warnoptions, os.getcwd(), dict(os.environ)])
        _files = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
        _rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, _files)]
        _warm.sendmsg([len(_asked).to_bytes(4, "little")], _rights)
        _warm.sendall(_asked)
        # These are the other process's from here on.
        _nothing = os.open(os.devnull, os.O_RDWR)
        for _fd in (0, 1, 2):
            os.dup2(_nothing, _fd)
        _code = b""
        if _told := _warm.recv(4):
            _pid = int.from_bytes(_told, "little")
            with open(f"{_directory}/{os.getpid()}", "w") as _file:
                _file.write(str(_pid))

            def _pass_on(number: int, frame: object) -> None:
                from contextlib import suppress

                with suppress(ProcessLookupError):  # it may have ended by itself
                    os.kill(_pid, number)

            for _number in (_signal.SIGTERM, _signal.SIGINT):
                _signal.signal(_number, _pass_on)
            _code = _warm.recv(1)
            os.unlink(f"{_directory}/{os.getpid()}")
        _status = int.from_bytes(_code or b"\1", "little", signed=True)
        if -_signal.NSIG < _status < 0:
            if _status != -_signal.SIGKILL:
                _signal.signal(-_status, _signal.SIG_DFL)
            os.kill(os.getpid(), -_status)
        os._exit(_status & 0xFF)
