"""`phaseloom demo` runs two GRPO jobs that share a mesh and, with `--baseline`, first each alone.

Every run has its own mesh with the same configuration: the shared run in `runs/<id>/`, each job
alone in `runs/<id>/alone-<job>/`. A run writes `events.jsonl`, `spans/`, `logs/` and
`timeline.json`. The demo as a whole writes `summary.json`, `timeline.png`, `rewards.png` and
`replay.html`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console

from phaseloom.cli.extras import check_installed
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.recorder import Recorder, read_entries, read_events
from phaseloom.cli.replay import FILE as REPLAY
from phaseloom.cli.replay import make_replay
from phaseloom.cli.rundir import new_run_dir
from phaseloom.cli.supervisor import Mesh
from phaseloom.cli.up import with_policies
from phaseloom.common.contract.errors import CallerError, PhaseloomError
from phaseloom.common.contract.modelconfig import context_tokens
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.common.observability.spans import read_spans
from phaseloom.common.process.slowdowns import read
from phaseloom.common.tensors.modelfiles import read_model
from phaseloom.common.transport.bus import Bus
from phaseloom.demo import spatial as one_device
from phaseloom.demo import verdict
from phaseloom.demo.controllers import Controllers, ControllerSpec, find_example
from phaseloom.demo.pictures import Panel, draw_rewards, draw_timeline
from phaseloom.demo.progress import Progress
from phaseloom.demo.report import (
    AloneRun,
    JobResult,
    Processors,
    RunLog,
    Summary,
    Usage,
    read_log,
    summarize,
)
from phaseloom.demo.timeline import write_timeline
from phaseloom.demo.turns import Clock, Turn, num_cores, without_pauses
from phaseloom.simulator.predictions import accuracy, durations, predictions
from phaseloom.simulator.tables import TWO_CORES_TABLE

TASKS = ("chain_sum", "letter_counting")
TENANT = "demo"
LAST_EVENTS_TIMEOUT_S = 5.0
"""Longest wait, after a controller ends, for the log entry of its last operation."""
ROUNDS = 5
"""Rounds of a comparison: some 18 steps of each job."""
_LEAST_WEIGHTS_BYTES = 4 * 2**20
"""Devices and host memory have room for at least a model of this size."""
TINY_KV_CACHE_BYTES = 32 * 2**20
"""KV cache of each job on vLLM, for the tiny model."""
OVERLAP_NOTE = (
    "chain_sum has about 200 distinct prompts, so its held-out prompts overlap with those it "
    "trained on; its reward shows learning, not generalisation"
)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The log of a finished run, and the results of its controllers."""

    results: list[JobResult]
    log: RunLog
    usage: Usage


async def demo(
    *,
    baseline: bool = False,
    steps: int | None = None,
    seed: int = 0,
    run_dir: Path | None = None,
    jobs: tuple[str, ...] = TASKS,
    placement: str | None = None,
    ordering: str | None = None,
    pretrained: Path | None = None,
    vllm: Path | None = None,
    adapter: int | None = None,
    spatial: bool = False,
    setting: str = one_device.STEADY,
    multiplexing: tuple[str, ...] = ("greedy",),
    rounds: int = 3,
    slowdowns: Path | None = None,
) -> int:
    """Train two GRPO jobs that share a mesh of two devices.

    The exit code is 0 if every check passed, otherwise 1.

    Parameters
    ----------
    baseline
        Also run each job alone first, and compare.
    steps
        GRPO steps of each job. Default: the number that the example is tuned for.
    seed
        Seed of all random choices.
    run_dir
        Directory for the results. Default: `runs/<time>`, which becomes `runs/latest`.
    jobs
        Tasks of `examples/grpo.py`. Each job has the name of its task.
    placement
        Policy that decides which nodes a job is pinned to, and which other jobs share them.
    ordering
        Policy that decides which ready operation a device runs next.
    pretrained
        Directory of a model that both jobs start from, instead of a tiny one made from a seed. It
        takes some GB of memory and several minutes.
    vllm
        Python interpreter of an environment with vLLM, to run rollouts on vLLM. Default: the
        backend `sampler`.
    adapter
        Rank of the LoRA adapter that each job trains on that model. Default: jobs train all
        weights.
    spatial
        Instead run two jobs on one device of two cores, in turns and at the same time.
    setting
        The jobs that share that device: `steady`, jobs that always have work; `tools`, jobs that
        wait for tools; `memory`, two jobs whose trainings do not fit on the device together;
        `no-gain`, a table of slowdowns by which sharing does not pay. All except `steady` imply
        `--spatial`.
    multiplexing
        With `--spatial`, a policy to compare with `off` and `static`; may be given several times.
    rounds
        With `--spatial`, how often to measure each policy.
    slowdowns
        With `--spatial`, the table of slowdowns to decide by. Default: the one for two cores that
        comes with the simulator.
    """
    console = Console(highlight=False)
    check_prerequisites()
    mesh, program = MeshConfig(), Program(find_example(), rounds=ROUNDS)
    if pretrained is not None:
        mesh, program = await asyncio.to_thread(for_pretrained, pretrained)
    if adapter is not None:
        if pretrained is None or adapter < 1:
            raise CallerError(
                "adapter needs a pretrained model and a rank of at least 1, got rank "
                f"{adapter} and {pretrained or 'no model'}",
                field="adapter",
                remedy="name the model's directory with --pretrained, and a rank of 1 or more",
            )
        program = Program(program.script, [*program.arguments, "--adapter", str(adapter)])
    if vllm is not None:
        cache_bytes = await asyncio.to_thread(kv_cache_bytes, pretrained)
        mesh, program = with_vllm(mesh, program, vllm, cache_bytes)
    settings = with_policies(mesh, placement, ordering)
    is_spatial = spatial or setting != one_device.STEADY
    if is_spatial:
        has_other_options = pretrained is not None or vllm is not None or baseline
        _check_spatial(has_other_options=has_other_options)
        decides_by = one_device.setting_of(setting, multiplexing, rounds, slowdowns).table
        settings = replace(settings, slowdowns=str(slowdowns or decides_by))
    settings.check()
    _check_tasks(jobs, steps)
    run_dir = (run_dir or new_run_dir(Path("runs"))).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    if is_spatial:
        table = await asyncio.to_thread(read, slowdowns or TWO_CORES_TABLE)
        policies = [one_device.SERIAL, one_device.STATIC, *dict.fromkeys(multiplexing)]
        return await _share_in_space(
            one_device.SETTINGS[setting].specs(jobs, seed, steps),
            setting,
            [policy for _ in range(rounds) for policy in policies],
            settings,
            table,
            run_dir=run_dir,
            console=console,
        )
    specs = [ControllerSpec(task, task, seed, steps) for task in jobs]
    failures: list[PhaseloomError] = []
    try:
        alone, shared = await _run_all(
            specs, program, settings, run_dir, console, baseline=baseline
        )
    except* PhaseloomError as failed:
        failures = _flatten(failed)
    if failures:
        for error in failures:
            console.print(f"[bold red]FAILED[/] {error}", soft_wrap=True)
        return 1
    summary = await asyncio.to_thread(_write_results, run_dir, seed, shared, alone)
    console.print(verdict.tables(summary))
    for line in verdict.hashes(summary):
        console.print(line, soft_wrap=True)
    problems = verdict.problems(summary, judges_rewards=steps is None and pretrained is None)
    for line in [*verdict.notes(summary), f"results: {run_dir}"]:
        console.print(line, soft_wrap=True)
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}", soft_wrap=True)
    return 1 if problems else 0


def _check_spatial(*, has_other_options: bool) -> None:
    if has_other_options:
        raise CallerError(
            "spatial cannot be combined with baseline, pretrained or vllm",
            field="spatial",
            remedy="omit baseline, pretrained and vllm, or omit spatial",
        )


def _check_tasks(jobs: tuple[str, ...], steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise CallerError(
            f"steps must be at least 1, got {steps}", field="--steps", remedy="give 1 or more"
        )
    if not jobs or len(set(jobs)) != len(jobs) or not set(jobs) <= set(TASKS):
        raise CallerError(
            f"jobs must be different tasks of the demo, got {', '.join(jobs) or 'none'}",
            field="--jobs",
            remedy=f"name one or more of {', '.join(TASKS)}, each once",
        )


async def _share_in_space(
    specs: Sequence[ControllerSpec],
    setting: str,
    policies: Sequence[str],
    settings: MeshConfig,
    table: SlowdownTable,
    *,
    run_dir: Path,
    console: Console,
) -> int:
    """Run two jobs on one device under each multiplexing policy in turn.

    Args: table: the slowdowns on this machine, for predictions of the runs.
    """
    chosen = one_device.SETTINGS[setting]
    words = [*chosen.arguments, "--pool", one_device.POOL]
    program = Program(find_example(chosen.example), words)
    runs = []
    for place, policy in enumerate(policies):
        number = policies[: place + 1].count(policy)
        finished = await _run(
            specs,
            program,
            one_device.mesh_of(policy, settings, setting),
            one_device.directory_of(run_dir, number, policy),
            console,
            title=f"Round {number}, multiplexing {policy}",
        )
        runs.append(one_device.run_of(number, policy, finished.results, finished.log))
    runs = await asyncio.to_thread(one_device.predicted, runs, run_dir, table)
    figures = one_device.summarize(runs, setting)
    summary = one_device.SpatialSummary(run_dir.name, specs[0].seed, specs[0].steps or 0, figures)
    await asyncio.to_thread(one_device.write, summary, run_dir)
    for line in [*one_device.lines_of(figures), f"results: {run_dir}"]:
        console.print(line, soft_wrap=True)
    problems = one_device.problems(figures)
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}", soft_wrap=True)
    return 1 if problems else 0


@dataclass(frozen=True, slots=True)
class Program:
    """The controllers' program."""

    script: Path
    arguments: Sequence[str] = ()
    rounds: int = 1
    """How often the runs of a comparison take turns; 1: they run one after another."""


def for_pretrained(directory: Path) -> tuple[MeshConfig, Program]:
    """Return a mesh for a registered model, and the program that trains it.

    Each of the mesh's two devices has room for one job's copies of the model, so two jobs must
    share them.

    Raises: CallerError: the directory does not contain a model.
    """
    directory = directory.absolute()
    model = read_model("pretrained", directory)
    weights_bytes = max(4 * model.num_parameters, _LEAST_WEIGHTS_BYTES)
    rollout, train = weights_bytes * 5 // 4, weights_bytes * 9 // 2
    nodes = [
        NodeConfig("rollout-0", "rollout", [rollout], host_memory_bytes=12 * weights_bytes),
        NodeConfig("train-0", "train", [train], host_memory_bytes=24 * weights_bytes),
    ]
    words = ["--model", model.name, "--tokenizer", str(directory)]
    mesh = MeshConfig(nodes=nodes, models={model.name: str(directory)})
    return mesh, Program(find_example("grpo_pretrained.py"), words)


def with_vllm(
    mesh: MeshConfig, program: Program, python: Path, cache_bytes: int
) -> tuple[MeshConfig, Program]:
    """Return the mesh and program with rollouts on vLLM, which also needs room for a KV cache.

    Args: python: the interpreter that has vLLM.
    """
    interpreters = {"vllm": str(python.absolute())}
    nodes = [
        replace(
            node,
            devices=[size + cache_bytes for size in node.devices],
            interpreters=interpreters,
        )
        if node.pool == "rollout"
        else node
        for node in mesh.nodes
    ]
    words = ["--rollout-backend", "vllm", "--kv-cache-bytes", str(cache_bytes)]
    return replace(mesh, nodes=nodes), Program(program.script, [*program.arguments, *words])


def kv_cache_bytes(pretrained: Path | None) -> int:
    """Return the size of a KV cache for one sequence of the model's maximum length.

    Args:   pretrained: the model's directory; None: the tiny model.
    Raises: CallerError: the directory does not contain a model.
    """
    if pretrained is None:
        return TINY_KV_CACHE_BYTES
    config = read_model("pretrained", pretrained.absolute()).config
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    position_bytes = 2 * 4 * int(config["num_hidden_layers"] * heads * head_dim)
    one_sequence = position_bytes * (context_tokens(config) or 0)
    return max(TINY_KV_CACHE_BYTES, one_sequence * 5 // 4)


def check_prerequisites() -> None:
    """Raises: CallerError: a package that the demo needs is missing."""
    packages = ("torch", "transformers", "reasoning_gym", "matplotlib")
    check_installed("the demo", packages, "worker,demo")


async def _run_all(
    specs: Sequence[ControllerSpec],
    program: Program,
    settings: MeshConfig,
    run_dir: Path,
    console: Console,
    *,
    baseline: bool,
) -> tuple[list[FinishedRun], FinishedRun]:
    """Run each job alone, if there is a baseline, and all jobs together.

    They take turns if the program has rounds: a change of the machine's load then affects all.
    """
    plans = [([spec], run_dir / f"alone-{spec.job}", f"{spec.job} alone") for spec in specs]
    plans = [*(plans if baseline else []), ([*specs], run_dir, "Both jobs, sharing the devices")]
    turn = asyncio.Lock() if program.rounds > 1 and baseline else None
    if turn is not None:
        words = [*program.arguments, "--rounds", str(program.rounds)]
        program = Program(program.script, words)
    running = [
        _run(jobs, program, settings, directory, console, title=title, turn=turn)
        for jobs, directory, title in plans
    ]
    if turn is None:
        finished = [await run for run in running]
    else:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in running]
        finished = [task.result() for task in tasks]
    return finished[:-1], finished[-1]


async def _run(
    specs: Sequence[ControllerSpec],
    program: Program,
    settings: MeshConfig,
    run_dir: Path,
    console: Console,
    *,
    title: str,
    turn: asyncio.Lock | None = None,
) -> FinishedRun:
    """Run controllers on a new mesh, and record the run.

    Args:   turn: held while the run does something, if it takes turns with others.

    Raises: ExceptionGroup or PhaseloomError: the mesh did not start, or a controller failed.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    events = run_dir / "events.jsonl"
    progress = Progress(console, title, [spec.job for spec in specs])
    async with Turn(turn, progress) as own, Mesh(settings, run_dir) as mesh:
        await mesh.ready()
        environment = {
            "PHASELOOM_URL": mesh.url,
            "PHASELOOM_TENANT": TENANT,
            "PHASELOOM_PASSWORD": mesh.credentials.tenants[TENANT],
            "PHASELOOM_TELEMETRY_SPANS_DIR": str(run_dir / "spans"),
        }
        controllers = Controllers(
            program.script,
            specs,
            environment=environment,
            logs=logs,
            on_line=progress.on_line,
            arguments=program.arguments,
            at_barrier=own.at_barrier,
        )
        bus = await Bus.open(mesh.credentials.bus, "recorder")
        try:
            results = await _recorded(controllers, bus, events, progress)
        finally:
            await bus.close()
    # Services write their last spans as they stop.
    spans = await asyncio.to_thread(read_spans, run_dir / "spans")
    await asyncio.to_thread(write_timeline, spans, run_dir / "timeline.json")
    clock = Clock(own.pauses)
    moved = [
        replace(
            result,
            grpo_start_unix_s=clock.at(result.grpo_start_unix_s),
            grpo_end_unix_s=clock.at(result.grpo_end_unix_s),
        )
        for result in results
    ]
    return FinishedRun(moved, without_pauses(read_log(read_events(events)), own.pauses), own.usage)


async def _recorded(
    controllers: Controllers, bus: Bus, events: Path, progress: Progress
) -> list[JobResult]:
    recorder = Recorder(bus, events, progress.on_entry)
    async with asyncio.TaskGroup() as group:
        recording = group.create_task(recorder.run())
        results = await controllers.run()
        await recorder.drained()
        try:
            async with asyncio.timeout(LAST_EVENTS_TIMEOUT_S):
                await recorder.until(lambda: progress.reader.log.num_open == 0)
        except TimeoutError:
            # The summary's counts show it: fewer operations completed and failed than submitted.
            pass
        recording.cancel()
    return results


def _write_results(
    run_dir: Path, seed: int, shared: FinishedRun, baseline: Sequence[FinishedRun]
) -> Summary:
    alone = [AloneRun(run.results[0], run.log) for run in baseline]
    notes = [OVERLAP_NOTE] if any(r.name == "chain_sum" for r in shared.results) else []
    recorded = read_entries(run_dir / "events.jsonl")
    entries = [(entry.sequence, entry.time_unix_s, entry.event) for entry in recorded]
    summary = summarize(
        run_dir.name,
        seed,
        shared.log,
        shared.results,
        alone=alone,
        notes=notes,
        predicted_starts=accuracy(predictions(entries)),
        predicted_durations=durations(entries),
        processors=Processors(
            num_cores(),
            sum((run.usage for run in baseline), Usage()),
            shared.usage,
        ),
    )
    written = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (run_dir / "summary.json").write_bytes(written + b"\n")
    panels = [Panel(f"{a.result.name} alone", a.log, [a.result]) for a in alone]
    panels.append(Panel("both, sharing the devices", shared.log, shared.results))
    draw_timeline(panels, summary, run_dir / "timeline.png")
    draw_rewards(shared.results, run_dir / "rewards.png")
    make_replay(run_dir.name, read_events(run_dir / "events.jsonl"), run_dir / REPLAY)
    return summary


def _flatten(group: BaseExceptionGroup[PhaseloomError]) -> list[PhaseloomError]:
    leaves = []
    for error in group.exceptions:
        leaves += _flatten(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
