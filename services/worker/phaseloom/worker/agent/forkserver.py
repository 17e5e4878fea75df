"""The program that imports backends' runtimes once and forks ranks of one Python interpreter.

A node has one such server for each configured interpreter. This module imports no torch itself. The
server, `python -m phaseloom.worker.agent.forkserver BACKEND...`, imports the backends' runtimes
(`preload`) and forks a rank for each configuration that the agent sends. A rank ends itself when
its agent's socket closes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from phaseloom.common.process import forkserver, lifecycle


def command(python: str, backends: Sequence[str]) -> list[str]:
    """Return the command of a server.

    Args: backends: the backends whose runtimes the server imports; empty: each rank imports its
             own.
    """
    return [python, "-m", __name__, *backends]


def main(backends: Sequence[str]) -> None:
    """Run as the server: fork a rank for each configuration until the agent is gone."""
    lifecycle.die_with_parent()

    def preload() -> None:
        from phaseloom.worker.agent.preload import preload

        preload(backends)

    def run(config_json: str) -> None:
        from phaseloom.worker.rank.process import main as run_rank

        run_rank(config_json)

    forkserver.serve(preload, run)


if __name__ == "__main__":
    main(sys.argv[1:])
