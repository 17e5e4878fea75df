"""The server process that a node's ranks are forked from, with torch imported already.

This module is free of torch: the agent names `run_rank`, and the forked process imports the rest.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def fork_server(*, with_torch: bool) -> ForkServerContext:
    """The context whose processes fork from a preloaded server, which begins to import now."""
    context = multiprocessing.get_context("forkserver")
    imported = "phaseloom.worker.agent.preload" if with_torch else "phaseloom.worker.rank.process"
    context.set_forkserver_preload([imported])
    forkserver.ensure_running()
    return context


def run_rank(config_json: str) -> None:
    """Entry point of a forked rank. Args: config_json: a `RankConfig`."""
    from phaseloom.worker.rank.process import main

    main(config_json)
