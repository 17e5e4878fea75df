"""Python runs this file at its start where `tests.support.warm` has set its path: a program that
imports torch gets itself forked from a process that has imported it already."""

import os
import sys

if os.environ.get("PHASELOOM_TESTS_WARM", "").partition(":")[0] == sys.prefix:
    _words = sys.orig_argv
    _at = _words.index("-m") + 1 if "-m" in _words else len(_words)
    if (
        _words[_at:]
        and (
            _words[_at].startswith("tests.unit.worker.backends.")
            # A node that preloads nothing has nothing to gain.
            or (_words[_at] == "phaseloom.worker.agent.forkserver" and _words[_at + 1 :])
        )
    ):
        import json
        import socket
        import struct

        with socket.socket(socket.AF_UNIX) as _warm:
            _warm.connect(os.environ["PHASELOOM_TESTS_WARM"].partition(":")[2])
            _asked = json.dumps([_words[_at:], sys.warnoptions, os.getcwd(), dict(os.environ)])
            socket.send_fds(_warm, [struct.pack("<I", len(_asked.encode()))], [0, 1, 2])
            _warm.sendall(_asked.encode())
            # These are the other process's from here on.
            _nothing = os.open(os.devnull, os.O_RDWR)
            for _fd in (0, 1, 2):
                os.dup2(_nothing, _fd)
            _code = _warm.recv(1)
        os._exit(_code[0] if _code else 1)
