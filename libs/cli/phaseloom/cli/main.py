"""The console script `phaseloom`. Subcommands live in modules of their own, imported when used."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version

from cyclopts import App, Parameter

from phaseloom.common.contract.errors import PhaseloomError


def application() -> App:
    app = App(
        name="phaseloom",
        help="Many RL post-training jobs time-share one pool of accelerators over a NATS mesh.",
        version=version("phaseloom"),
        # Where a subcommand is called by a program it may be given a console.
        default_parameter=Parameter(parse=re.compile("^(?!console$)")),
    )
    app.command("phaseloom.cli.up:up", name="up", help="Run the mesh on this machine.")
    app.command(
        "phaseloom.cli.demo:demo",
        name="demo",
        help="Train two GRPO jobs that share a mesh of two devices.",
    )
    app.command(
        "phaseloom.cli.doctor:doctor",
        name="doctor",
        help="Check that this machine, and its NATS server, can run a mesh.",
    )
    app.command(
        "phaseloom.cli.state:state",
        name="state",
        help="Show which state lies where on each node: device memory, host memory, NVMe.",
    )
    app.command(
        "phaseloom.cli.certs:certs",
        name="certs",
        help="Make the certificates by which the nodes of a mesh know one another.",
    )
    app.command("phaseloom.cli.top:top", name="top", help="Watch the mesh, live.")
    app.command(
        "phaseloom.cli.trace:trace", name="trace", help="Show where an operation's time went."
    )
    app.command(
        "phaseloom.cli.jobs:jobs", name="jobs", help="List the jobs, and what was learned of them."
    )
    app.command(
        "phaseloom.cli.jobs:explain",
        name="explain",
        help="Say why a job is where it is, or what an operation waits for.",
    )
    app.command("phaseloom.cli.jobs:cancel", name="cancel", help="End a job now.")
    app.command(
        "phaseloom.cli.jobs:drain",
        name="drain",
        help="Empty a node, or end a job once it has run dry.",
    )
    app.command(
        "phaseloom.cli.simulate:simulate",
        name="simulate",
        help="Try the scheduler's policies on a workload, under a virtual clock.",
    )
    return app


def main() -> None:
    """Exit code 1 and one line for an error of Phaseloom's, 2 for a wrong command line."""
    try:
        application()()
    except* PhaseloomError as errors:
        for line in _lines(errors):
            print(f"phaseloom: {line}", file=sys.stderr)
        sys.exit(1)


def _lines(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [line for inner in error.exceptions for line in _lines(inner)]
    return [str(error)]
