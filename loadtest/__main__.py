"""`python -m loadtest`: measure the mesh on this machine; see loadtest/README.md."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cyclopts
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest import (
    adapterbench,
    batching,
    chaos,
    deltasync,
    gatewaybench,
    hiding,
    load,
    losingdisk,
    offpolicy,
    peering,
    pictures,
    powercuts,
    publishing,
    resharding,
    roundtrip,
    runtimes,
    scale,
    servers,
    spatial,
    state_bench,
    switches,
    tailbench,
)
from loadtest.hostile import run as hostile
from loadtest.papers.command import simulate
from loadtest.records import LATEST, Record, describe, record, write
from loadtest.stage_predictions import stage_predictions
from phaseloom.cli.recorder import read_entries
from phaseloom.cli.rundir import find_run
from phaseloom.common.contract.errors import PhaseloomError

app = cyclopts.App(name="loadtest", help=__doc__)
_RUNS = LATEST.parent


@app.default
def bench(
    *,
    rounds: int = 10,
    operations: int = 2000,
    file: Path = LATEST,
    fsync: bool = True,
    state: bool = True,
    hidden: bool = True,
) -> None:
    """Measure round trips with 1, 16 and 256 in flight, what batching saves, and how state moves.

    Parameters
    ----------
    rounds
        How often the meshes and the raw chain take turns.
    operations
        Operations of each side with one in flight, over all rounds.
    file
        Where the figures are merged by name.
    fsync
        Have all servers fsync each message before they acknowledge it. Figures without it have
        names of their own, and are of round trips alone.
    state
        Run `state` too, into state.json beside the file.
    hidden
        Run `hidden` too, into hidden.json beside the file.
    """
    directory = _work_directory(file)
    per_round = max(1, operations // rounds)
    figures = uvloop.run(roundtrip.measure(directory, rounds, per_round, fsync=fsync))
    if fsync:
        figures += uvloop.run(batching.measure(directory, rounds))
    Console().print(_table(record(figures, describe(), file).figures))
    if state:
        state_test(file=file.with_name("state.json"))
    if hidden:
        hidden_test(file=file.with_name("hidden.json"))


@app.command(name="load")
def load_test(
    *,
    jobs: int = 100,
    ops: int = 1000,
    in_flight: int = 1,
    nodes: int = 4,
    clients: int = 2,
    file: Path = _RUNS / "load.json",
) -> None:
    """Run many jobs at once with no-op workers. The picture is drawn beside the file.

    Parameters
    ----------
    jobs
        Jobs at once, each with a device of its own.
    ops
        Operations of each job.
    in_flight
        Operations of each job under way at once.
    nodes
        Nodes that the devices are on.
    clients
        Processes of the jobs' controllers.
    file
        Where the report is written.
    """
    settings = load.Settings(jobs, ops, in_flight, nodes, clients)
    report = write(uvloop.run(load.run(settings, _work_directory(file))), file)
    pictures.draw_load(report, file.with_suffix(".png"))
    console = Console()
    console.print(pictures.headline(report))
    console.print(
        f"scheduler's step: p50 below {1e6 * report.step_p50_s:.0f} µs, "
        f"p99 below {1e6 * report.step_p99_s:.0f} µs"
    )
    table = Table("service", "memory at the end, MiB", "growth, MiB")
    for name, grown in report.growth_bytes.items():
        end = report.samples[-1].memory_bytes[name]
        table.add_row(name, f"{end / 2**20:.1f}", f"{grown / 2**20:+.1f}")
    console.print(table)


@app.command(name="scale")
def scale_test(
    *, nodes: int = 1000, devices: int = 8, jobs: int = 2000, file: Path = _RUNS / "scale.json"
) -> None:
    """Feed the scheduler's core a large cluster, and measure its steps, memory and snapshot.

    Parameters
    ----------
    nodes
        Nodes of the cluster.
    devices
        Devices of each node.
    jobs
        Jobs at once.
    file
        Where the report is written.
    """
    report = write(scale.measure(scale.Settings(nodes, devices, jobs), _work_directory(file)), file)
    Console().print(publishing.scale_table(report), soft_wrap=True, markup=False)


@app.command(name="offpolicy")
def off_policy(
    *,
    task: str = "letter_counting",
    steps: int = 60,
    seed: int = 0,
    file: Path = _RUNS / "offpolicy.json",
) -> None:
    """Run the GRPO example in step with its rollouts and ahead of them, at once on one mesh.

    Parameters
    ----------
    task
        Task of all jobs.
    steps
        Steps of each job.
    seed
        Seed of all jobs.
    file
        Where the report is written.
    """
    settings = offpolicy.Settings(task, steps, seed)
    report = write(uvloop.run(offpolicy.run(settings, _work_directory(file))), file)
    quarters = [f"quarter {i + 1}" for i in range(offpolicy.QUARTERS)]
    table = Table("rollouts", "held out, before", *quarters, "held out, after", "s")
    for job in report.jobs:
        rewards = [job.reward_start, *job.by_quarter, job.reward_end]
        table.add_row(job.mode, *(f"{r:.2f}" for r in rewards), f"{job.seconds:.0f}")
    Console().print(table)


@app.command
def gateway(
    *, rounds: int = 7, calls: int = 30, large: int = 20_000, file: Path = _RUNS / "gateway.json"
) -> None:
    """Measure calls through the Tinker SDK and the gateway beside those of our client.

    Parameters
    ----------
    rounds
        How often the two take turns.
    calls
        Calls of each kind in a round, one at a time.
    large
        Datums of the large batch, of 50 tokens each.
    file
        Where the report is written.
    """
    settings = gatewaybench.Settings(rounds, calls, large)
    report = write(uvloop.run(gatewaybench.run(settings, _work_directory(file))), file)
    Console().print(publishing.gateway_table(report))


@app.command(name="spatial")
def spatial_test(
    *settings: str,
    policy: tuple[str, ...] = spatial.POLICIES,
    rounds: int = 3,
    file: Path = _RUNS / "spatial.json",
) -> None:
    """Measure two jobs on one device of two cores, by turns and side by side.

    Parameters
    ----------
    settings
        Settings of `phaseloom demo --spatial`; none: all of them, one after the other.
    policy
        The multiplexing policies that are compared with `off` and `static`.
    rounds
        How often all policies take turns, in each setting.
    file
        Where the figures are merged by setting.
    """
    uvloop.run(spatial.run(settings, policy, rounds, _work_directory(file), file))


@app.command
def stages(*logs: Path) -> None:
    """Compare what was predicted of rollouts with what came, in recorded runs.

    Parameters
    ----------
    logs
        The `events.jsonl` of runs of `phaseloom demo`.
    """
    table = Table(
        "log",
        "rollouts",
        "usual duration off by, p50, p90",
        "sum of sub-stages off by, p50, p90",
        "sub-stages foreseen",
        "each off by, p50, p90",
    )
    for log in logs:
        found = stage_predictions(entry.event for entry in read_entries(log))
        cells = [
            (found.duration_error_p50, found.duration_error_p90),
            (found.stages_error_p50, found.stages_error_p90),
            (found.foreseen,),
            (found.stage_error_p50, found.stage_error_p90),
        ]
        told = (", ".join("" if s is None else f"{s:.0%}" for s in shares) for shares in cells)
        table.add_row(str(log.parent), str(found.operations), *told)
    Console().print(table)


@app.command
def tails(
    *, rounds: int = 3, model_rounds: int = 13, steps: int = 3, file: Path = _RUNS / "tails.json"
) -> None:
    """Measure rollouts of two jobs on four devices, with their long tails gathered and without.

    Parameters
    ----------
    rounds
        How often the two take turns, where ranks wait as long as a device would take.
    model_rounds
        How often they take turns with a real model, whose every token is compared.
    steps
        Rollouts of each job in a round.
    file
        Where the report is written.
    """
    settings = tailbench.Settings(rounds, steps, model_rounds=model_rounds)
    report = write(uvloop.run(tailbench.run(settings, _work_directory(file))), file)
    Console().print(publishing.tails_table(report))


@app.command
def peers(
    python: Path, *, rounds: int = 5, operations: int = 1000, file: Path = _RUNS / "peers.json"
) -> None:
    """Measure the same round trip in Ray and Redis.

    Parameters
    ----------
    python
        Interpreter of the environment that they are installed in.
    rounds
        How often the systems take turns.
    operations
        Operations of each system with one in flight, over all rounds.
    file
        Where the report is written.
    """
    per_round = max(1, operations // rounds)
    comparing = peering.compare(python, _work_directory(file), rounds, per_round)
    report = write(uvloop.run(comparing), file)
    table = Table("system", "in flight", "p50, ms", "p99, ms", "operations a second")
    for figure in report.figures:
        table.add_row(
            figure.name,
            str(figure.in_flight),
            f"{figure.p50_ms:.2f}",
            f"{figure.p99_ms:.2f}",
            f"{figure.throughput:.0f}",
        )
    Console().print(table)


@app.command(name="chaos")
def chaos_test(
    *,
    kills: int = 20,
    seed: int = 0,
    vllm: Path | None = None,
    megatron: Path | None = None,
    stuck_s: float = 120.0,
    file: Path = _RUNS / "chaos.json",
) -> int:
    """Run the two example jobs under kill -9.

    The exit code is 1 where a job ends with other weights or is stuck.

    Parameters
    ----------
    kills
        Kills in all.
    seed
        Seed of the order and the moments of the kills.
    vllm
        Python of an environment that has vLLM, which rollouts then run on.
    megatron
        Python of an environment that has Megatron-core, which trains the policies then, each on
        four ranks: two tensor by two pipeline parallel ones.
    stuck_s
        A job that completes nothing for so many seconds counts as stuck.
    file
        Where the report is written.
    """
    console = Console(highlight=False)
    settings = chaos.Settings(
        kills,
        seed,
        vllm=str(vllm.absolute()) if vllm else "",
        megatron=str(megatron.absolute()) if megatron else "",
        stuck_s=stuck_s,
    )
    running = chaos.run(settings, _work_directory(file), console.print)
    report = write(uvloop.run(running), file)
    table = Table("victim", "kills", "recovery: median, s", "longest, s")
    for summary in report.victims:
        table.add_row(
            summary.victim,
            str(summary.kills),
            f"{summary.recovery_median_s:.2f}",
            f"{summary.recovery_max_s:.2f}",
        )
    console.print(table)
    if report.stuck:
        console.print(f"[bold red]STUCK[/] {report.stuck}")
    return int(report.has_failed)


@app.command(name="hostile")
def hostile_test(
    *,
    rounds: int = 3,
    floods: str = "",
    faults: bool = True,
    file: Path = _RUNS / "hostile.json",
) -> int:
    """Flood a mesh as one tenant, and starve its processes, while another tenant works.

    The exit code is 1 where an aim is missed or a job ends with other weights.

    Parameters
    ----------
    rounds
        How often the floods take turns.
    floods
        Names of the floods to send, with commas between them; empty: all.
    faults
        Starve and stop processes too.
    file
        Where the report is written.
    """
    console = Console(highlight=False)
    settings = hostile.Settings(rounds, floods.split(",") if floods else [], faults)
    report = write(uvloop.run(hostile.run(settings, _work_directory(file), console.print)), file)
    console.print(publishing.hostile_table(report))
    return int(report.has_failed)


@app.command(name="powercuts")
def power_cuts_test(*, cuts: int = 5, seed: int = 0, file: Path = _RUNS / "powercuts.json") -> int:
    """Run the two example jobs on a mesh whose power is cut again and again.

    It needs root, /dev/fuse and libfuse 3. The exit code is 1 where a job ends with other weights,
    an acknowledged operation is lost, or nothing goes on, and 2 where this machine lacks something.

    Parameters
    ----------
    cuts
        Power cuts in all.
    seed
        Seed of the moments, and of which unsynced blocks reach the disk.
    file
        Where the report is written.
    """
    console = Console(highlight=False)
    if lacks := losingdisk.missing():
        console.print(f"this machine lacks {lacks}")
        return 2
    settings = powercuts.Settings(cuts, seed)
    running = powercuts.run(settings, _work_directory(file), console.print)
    report = write(uvloop.run(running), file)
    return int(report.has_failed)


@app.command(name="servers")
def servers_test(
    *,
    rounds: int = 10,
    operations: int = 1000,
    faults: int = 5,
    file: Path = _RUNS / "servers.json",
) -> None:
    """Measure three NATS servers beside one, and how long a job stands still when one is lost.

    Parameters
    ----------
    rounds
        How often the two meshes take turns.
    operations
        Operations of each with one in flight, over all rounds.
    faults
        How often each fault happens.
    file
        Where the report is written.
    """
    console = Console(highlight=False)
    settings = servers.Settings(rounds, operations, faults)
    running = servers.run(settings, _work_directory(file), console.print)
    report = write(uvloop.run(running), file)
    console.print(publishing.servers_table(report), soft_wrap=True, markup=False)


@app.command(name="state")
def state_test(
    *,
    mib: int = 2048,
    rounds: int = 5,
    directory: Path | None = None,
    file: Path = _RUNS / "state.json",
) -> None:
    """Measure how fast state moves: disk against fio, switches against memcpy.

    Parameters
    ----------
    mib
        Size of the file that is written and read.
    rounds
        How often the sides take turns.
    directory
        A directory on the disk that is measured; default: beside the file.
    file
        Where the figures are merged by name.
    """
    work = _work_directory(directory / "figures" if directory else file)
    figures = uvloop.run(state_bench.measure(work, mib * 2**20, rounds))
    figures += resharding.measure(rounds)
    Console().print(_table(record(figures, describe("xxhash"), file).figures))


@app.command(name="hidden")
def hidden_test(
    *,
    rounds: int = 3,
    steps: int = 60,
    state_mib: int = 64,
    seed: int = 0,
    file: Path = _RUNS / "hidden.json",
) -> None:
    """Measure which share of context switches is over before an operation waits for them.

    Parameters
    ----------
    rounds
        How often it all runs; the run with the median share is reported.
    steps
        Steps of each of the two jobs.
    state_mib
        Size of each deployment's state.
    seed
        Seed of the jobs' pauses.
    file
        Where the report is written.
    """
    settings = hiding.Settings(steps=steps, state_mib=state_mib, seed=seed)
    runs = [uvloop.run(hiding.run(settings, _work_directory(file))) for _ in range(rounds)]
    report = write(hiding.middle(runs), file)
    console = Console()
    shares = ", ".join(f"{share:.1%}" for share in report.hidden_shares)
    console.print(
        f"{report.hidden_share:.1%} of {report.switch_seconds:.1f} s in {report.switches} switches "
        f"hidden ({report.hidden_share_settled:.1%} in the second half); all runs: {shares}"
    )
    idle = ", ".join(f"{device} {share:.0%}" for device, share in report.idle_share.items())
    console.print(f"idle: {idle}; waited for, s: {report.unhidden_seconds}")


@app.command(name="lora")
def lora_test(
    *, rounds: int = 5, jobs: int = 24, steps: int = 2, file: Path = _RUNS / "lora.json"
) -> None:
    """Measure what adapters on one base save: switches, rows of eight of them in one batch, and
    many jobs on two devices of a mesh.

    Parameters
    ----------
    rounds
        How often the sides take turns.
    jobs
        How many jobs share the devices: all at once, and one after another; 0: leave that out.
    steps
        Steps of each of these jobs, on either side.
    file
        Where the figures are merged by name.
    """
    figures = uvloop.run(adapterbench.measure(_work_directory(file), rounds, jobs, steps))
    Console().print(_table(record(figures, describe("torch", "transformers"), file).figures))


@app.command(name="delta")
def delta_test(
    model: Path,
    *,
    learning_rates: list[float] | None = None,
    steps: int = 8,
    settle_steps: int = 24,
    rows: int = 8,
    link_mbit: int = 1000,
    file: Path = _RUNS / "delta.json",
) -> None:
    """Measure weights versions of a fine-tuning run that are sent as deltas, beside whole.

    Parameters
    ----------
    model
        Directory of the model that is trained, in the Hugging Face layout.
    learning_rates
        One run each; default: 1e-6, 1e-5 and 1e-4.
    steps
        Measured steps of a run.
    settle_steps
        Steps before them.
    rows
        Solved problems of a step.
    link_mbit
        Speed of the link to the nodes that fetch, megabits a second.
    file
        Where the report is written.
    """
    rates = learning_rates or [1e-6, 1e-5, 1e-4]
    settings = deltasync.Settings(rates, steps, settle_steps, rows, link_mbit)
    measuring = deltasync.measure(model, settings, _work_directory(file))
    report = write(uvloop.run(measuring), file)
    Console().print(publishing.delta_table(report), soft_wrap=True, markup=False)


@app.command(name="runtimes")
def runtimes_test(
    python: Path,
    *,
    rounds: int = 5,
    rows: int = 32,
    tokens: int = 128,
    tp: int = 2,
    quick: bool = False,
    file: Path = _RUNS / "runtimes.json",
) -> None:
    """Measure each runtime under our adapter beside the same work without it.

    Parameters
    ----------
    python
        Interpreter of the environment that vLLM is installed in.
    rounds
        How often the sides take turns.
    rows
        Sequences that are decoded together.
    tokens
        New tokens of each.
    tp
        Tensor-parallel ranks of the sampler that weights are synced to, beside one rank alone.
    quick
        Take small models: to see that it runs, not to publish.
    file
        Where the figures are merged by name.
    """
    measuring = runtimes.measure(
        runtimes.Settings(rounds, rows, tokens, tp, quick), python, _work_directory(file), file
    )
    Console().print(_table(uvloop.run(measuring).figures))


@app.command(name="switches")
def switches_of(
    run: Path | None = None, *, seconds: float = 0.0, file: Path = _RUNS / "switches.json"
) -> None:
    """Measure the parts of a run's context switches, by deployment, next to plain copies.

    Parameters
    ----------
    run
        Run directory, or its name under runs/. Default: the newest run.
    seconds
        How long to follow the run; Ctrl-C ends it earlier. 0: use what it has recorded so far, next
        to plain copies made now.
    file
        Where the report is written.
    """
    report = switches.measure(find_run(run), seconds)
    write(report, file)
    table = Table(*switches.HEAD)
    for row in switches.rows(report):
        table.add_row(*row)
    Console().print(table)


app.command(simulate)


@app.command
def publish() -> None:
    """Copy the measurements into docs/measured, and their tables and picture into docs."""
    for file in publishing.publish(_RUNS):
        Console().print(str(file))


def _work_directory(file: Path) -> Path:
    directory = file.parent / "work"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _table(records: list[Record]) -> Table:
    table = Table("figure", "measured", "limit", "ratio", "aim")
    table.columns[0].no_wrap = True
    for entry in records:
        table.add_row(
            entry.name,
            f"{entry.value:.4g} {entry.unit}",
            f"{entry.limit_value:.4g}",
            f"{entry.ratio:.2f}",
            entry.aim,
        )
    return table


if __name__ == "__main__":
    try:
        sys.exit(app())
    except PhaseloomError as error:
        sys.exit(str(error))
