"""The console script `phaseloom`. Each subcommand's module is imported when the command runs."""

from __future__ import annotations

import re
import sys

from cyclopts import App, CycloptsError, Parameter

from phaseloom.common.contract.errors import PhaseloomError

_COMMANDS = {
    "up:up": "Run a mesh on this machine until Ctrl-C: a NATS server and all services.",
    "phaseloom.demo.command:demo": "Train two GRPO jobs that share a mesh of two devices.",
    "env:env": "Print the variables that connect a shell to the running mesh.",
    "doctor:doctor": "Check that this machine and its NATS server can run a mesh.",
    "backup:backup": "Back up a run to a new directory, even while its mesh runs.",
    "backup:restore": "Restore a backup into a new run directory.",
    "state:state": "Show the state that each node keeps in device memory, host memory and on NVMe.",
    "accounts:accounts": "Create passwords and settings for a mesh that you start by hand.",
    "certs:certs": "Create the certificates that the nodes of a mesh use to authenticate.",
    "top:top": "Watch the jobs, devices and queues of a mesh live.",
    "trace:trace": "Show where the time of one operation went.",
    "replay:replay": "Write a run's timeline as one HTML file for a browser.",
    "jobs:jobs": "List the jobs and where they run; --profile adds measured durations.",
    "jobs:explain": "Explain where a job is placed and why, or what an operation waits for.",
    "jobs:cancel": "End a job now; its checkpoints stay.",
    "jobs:drain": "Empty a node to shut it down, or end a job after its open operations.",
    "slowdowns:measure_slowdown": "Measure how much slower work runs on some of a device's cores.",
    "simulate:simulate": "Compare placement policies by simulating a workload of your own.",
}
"""`module:function` → one line of help. The module is in this package unless it has a full path."""
_MODEL_COMMANDS = {
    "add": ("models:add", "Register a model directory under a name for jobs to use."),
    "convert": ("gguf:convert", "Convert a GGUF file into a model directory."),
    "list": ("models:list_models", "List the registered models."),
    "merge": ("merging:merge", "Merge a base model and an adapter into one model directory."),
    "remove": ("models:remove", "Unregister a model; its files stay."),
}
"""The subcommands of `phaseloom model`: name → `module:function` and one line of help."""
_CHECKPOINT_COMMANDS = {
    "archive": ("checkpoints:archive", "Download a checkpoint as a tar file."),
    "delete": ("checkpoints:delete", "Delete a checkpoint, unless its job needs it to recover."),
    "expire": ("checkpoints:expire", "Set how long a checkpoint is kept."),
    "list": ("checkpoints:list_checkpoints", "List the checkpoints, the newest last."),
    "show": ("checkpoints:show", "Describe a checkpoint and its files."),
}
"""The subcommands of `phaseloom checkpoint`: name → `module:function` and one line of help."""
_RUN_COMMANDS = {
    "list": ("runs:list_runs", "List the runs of jobs, the newest last."),
    "prune": ("runs:prune", "Delete the records and curves of old runs."),
}
"""The subcommands of `phaseloom runs`: name → `module:function` and one line of help."""


_EXAMPLES = {
    "up": "up --model HuggingFaceTB/SmolLM2-135M-Instruct --gateway 8800",
    "demo": "demo --baseline",
    "env": "env --json",
    "doctor": "doctor --mesh-file mesh.toml --json",
    "backup": "backup backups/monday",
    "restore": "restore backups/monday runs/restored",
    "state": "state --node train-0",
    "accounts": "accounts mesh acme demo --url nats://10.0.0.1:4222",
    "certs": "certs certificates train-0 train-1",
    "top": "top --once",
    "trace": "trace demo.hello.policy.7",
    "replay": "replay latest --out hello.html",
    "jobs": "jobs --profile",
    "explain": "explain demo.hello.policy.7",
    "cancel": "cancel demo.hello",
    "drain": "drain train-0 --timeout-s 900",
    "measure-slowdown": "measure-slowdown --cores 2",
    "simulate": "simulate --workload jobs.csv --policy coexec",
    "model add": "model add smollm2 models/smollm2",
    "model convert": "model convert models/smollm2",
    "model list": "model list --json",
    "model merge": "model merge models/base adapters/mine models/merged",
    "model remove": "model remove smollm2",
    "checkpoint archive": "checkpoint archive demo.hello.policy.step-10 step-10.tar",
    "checkpoint delete": "checkpoint delete demo.hello.policy.step-10",
    "checkpoint expire": "checkpoint expire demo.hello.policy.step-10 86400",
    "checkpoint list": "checkpoint list demo.hello",
    "checkpoint show": "checkpoint show demo.hello.policy.step-10 --json",
    "runs list": "runs list --job demo.hello",
    "runs prune": "runs prune --keep 3 --dry-run",
}
"""Command → an example of its use, which its help shows."""


def application() -> App:
    app = App(
        name="phaseloom",
        help="Run many RL post-training jobs on one shared pool of accelerators.",
        version=_version,
        # Plain text, because the Markdown renderer is slow to import.
        help_format="plaintext",
        # The parameter `console` is only for programs that call a subcommand as a function. Flags
        # have no `--no-…` form, because all are off by default.
        default_parameter=Parameter(parse=re.compile("^(?!console$)"), negative=()),
    )
    app.register_install_completion_command(help="Add completion to bash, zsh or fish.")
    for place, line in _COMMANDS.items():
        name = place.partition(":")[2].replace("_", "-")
        path = place if place.startswith("phaseloom.") else f"{__package__}.{place}"
        app.command(path, name=name, help=line, **_help_of(name))
    models = "Register, list, convert and merge models for jobs."
    saved = "List, describe, download and delete the checkpoints of jobs."
    for group, help, commands in (
        ("model", models, _MODEL_COMMANDS),
        ("checkpoint", saved, _CHECKPOINT_COMMANDS),
        ("runs", "List the runs of jobs, and delete old ones.", _RUN_COMMANDS),
    ):
        within = App(name=group, help=help)
        for name, (place, line) in commands.items():
            path = f"{__package__}.{place}"
            within.command(path, name=name, help=line, **_help_of(f"{group} {name}"))
        app.command(within)
    return app


def _help_of(command: str) -> dict[str, str]:
    example = f"Example: `phaseloom {_EXAMPLES[command]}`"
    return {"help_format": "markdown", "help_epilogue": example}


def main() -> None:
    """Run the command on the command line.

    Exit codes: 1 after an error of Phaseloom or of a file, which is printed in one line; 2 after an
    invalid command line; 130 after Ctrl-C.
    """
    try:
        application()(exit_on_error=False)
    except* CycloptsError:  # cyclopts has printed it
        sys.exit(2)
    except* BrokenPipeError:  # the reader of the pipe has closed it
        sys.exit(1)
    except* (PhaseloomError, OSError) as errors:
        for line in _lines(errors):
            print(f"phaseloom: {line}", file=sys.stderr)
        sys.exit(1)
    except* KeyboardInterrupt:
        sys.exit(130)


def _version() -> str:
    # Imported here because `importlib.metadata` takes as long to import as all other modules.
    from importlib.metadata import version

    return version("phaseloom")


def _lines(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [line for inner in error.exceptions for line in _lines(inner)]
    return [str(error)]


if __name__ == "__main__":
    main()
