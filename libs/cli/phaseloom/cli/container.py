"""Runs one service in a container and ends it if it hangs.

    python -m phaseloom.cli.container phaseloom.router.main

Docker restarts what ends, but not what hangs. Silence is measured as under `phaseloom up`
(`hanging`), so a busy machine ends nothing. The images run their service this way.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

from phaseloom.cli.hanging import TICK_S, Pulse
from phaseloom.common.process import diewithparent
from phaseloom.common.process.heartbeat import NOTIFY_SOCKET

HUNG_S = 20.0
"""Silence after which the service is killed."""


def run(program: list[str], hung_s: float = HUNG_S) -> int:
    """Run a program until it ends, and kill it if it has been silent for `hung_s`.

    Returns: the exit code for this process.
    """
    pulse = Pulse()
    environment = os.environ | {NOTIFY_SOCKET: pulse.address}
    process = subprocess.Popen(diewithparent.launcher(program), env=environment)

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    ended = os.pidfd_open(process.pid)
    last_s = time.monotonic()
    while not select.select([ended], [], [], TICK_S)[0]:
        now_s = time.monotonic()
        pulse.tick(now_s - last_s)
        last_s = now_s
        silent_s = pulse.silence.seconds
        if silent_s >= hung_s:
            message = f"killing the service: silent for {silent_s:.1f} s although it could run"
            print(json.dumps({"level": "ERROR", "message": message}), file=sys.stderr, flush=True)
            os.kill(pulse.silence.pid, signal.SIGKILL)
            process.kill()
            pulse.restart()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run([sys.executable, "-m", *sys.argv[1:]]))
