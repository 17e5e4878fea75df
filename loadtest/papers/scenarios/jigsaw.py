"""What sharing devices in space gains, after JigsawRL's figures 12 to 20.

Two jobs on the same devices, each worker with a replica of both. `serial` runs one after the other
(the paper's Verl); `rollmux` rolls out on half of the devices and trains on the others, and
`rollmux_best` on the best of a quarter, a half and three quarters; `static` gives each job half of
each device; `rollouts` shares rollouts alone (the paper's MuxServe); `operations` is `greedy` where
nobody knows which sub-stage of an operation runs. The optimum may stop what has
begun, so no schedule of the same chains beats it.

It is a study of chains under a table of slowdowns (`simulator.spatial`), not a run of the
scheduler's core. Shares of an iteration's time are the paper's (Table 1) where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain as chained
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, NamedTuple

import msgspec

from loadtest.papers.scenarios.report import at_least, at_most, mean_of
from loadtest.papers.scenarios.scenario import Options, Scenario
from loadtest.papers.spatial import chains, pipelines
from loadtest.papers.spatial.chains import POLICIES
from loadtest.papers.spatial.merging import Gathered, Tail, balanced, gain_literal_s, gain_s
from loadtest.papers.spatial.optimum import least_makespan_s
from loadtest.papers.spatial.pipelines import Workload
from phaseloom.common.contract.specs import SlowdownTable
from phaseloom.common.process import slowdowns
from phaseloom.scheduler.core.planning.chains import WAIT, Chain, Pair, Stage
from phaseloom.simulator.comparison.cases import Case
from phaseloom.simulator.comparison.pictures import bars, canvas
from phaseloom.simulator.comparison.report import Published, Record, Report, Target
from phaseloom.simulator.tables import PAPER_TABLE

ITERATIONS = 4
ROWS = 256
"""The samples of an iteration: 64 prompts, four each (JigsawRL §5.1)."""
BEST = "lookahead"
"""The policy whose figures stand beside the paper's."""
ROLLMUX, ROLLMUX_BEST = "rollmux", "rollmux_best"
_SEEDS = (0, 1, 2)
_SMALL_GSM8K = Workload(0.661, 0.142, 0.197, 0.0, 180, 0.9)
_GSM8K = Workload(0.522, 0.187, 0.291, 0.0, 180, 0.8)
_GSM8K_64 = Workload(0.674, 0.158, 0.168, 0.0, 180, 0.8)
_AIME = Workload(0.809, 0.069, 0.122, 0.0, 1800, 0.7)
_SEARCH = Workload(0.391, 0.166, 0.246, 0.197, 180, 0.8)
_MATH = Workload(0.563, 0.187, 0.25, 0.0, 900, 0.35)
HOMOGENEOUS = {
    "0.6B GSM8K": _SMALL_GSM8K,
    "4B GSM8K": _GSM8K,
    "4B AIME": _AIME,
    "4B Search-R1": _SEARCH,
    "8B MATH": _MATH,
}
SCALED = {"4B GSM8K": _GSM8K_64, "14B MATH": _MATH._replace(scale=3.0)}
UNLIKE = {
    "0.6B GSM8K and 8B MATH": (_SMALL_GSM8K, _MATH._replace(scale=2.2)),
    "0.6B and 4B GSM8K": (_SMALL_GSM8K, _GSM8K._replace(scale=1.6)),
    "4B AIME and 4B GSM8K": (_AIME._replace(scale=1.6), _GSM8K._replace(scale=1.6)),
}
MIXED = {"GSM8K": _GSM8K, "MATH": _MATH}


class Setting(NamedTuple):
    """The parameters that all cases of a scenario share."""

    policies: Sequence[str]
    slowdowns: Path | None
    seed: int
    workload: str

    @property
    def table(self) -> SlowdownTable:
        return _table(self.slowdowns)


def _table(path: Path | None) -> SlowdownTable:
    """The table of slowdowns in a file; None: the paper's.

    Raises: CallerError: the table lacks a kind of sub-stage, or cannot be read.
    """
    path = path or PAPER_TABLE
    return slowdowns.read(path, needed=slowdowns.SUB_STAGES)


def _alike(setting: Setting, job: Workload, devices: int) -> list[Record]:
    """Two jobs of one kind, each with a replica on every device."""
    rng = Random(setting.seed)
    first, second = (
        pipelines.chain(rng, job, ITERATIONS, ROWS, devices) for _ in ("first", "second")
    )
    pair = Pair(first, second, setting.table)
    serial_s = sum(pair.total_s)
    rollmux_s = _rollmux_s(job, setting.seed, devices, [4]) if devices > 1 else 0.0
    best_s = least_makespan_s(pair)
    records = []
    for policy in setting.policies:
        if policy in (ROLLMUX, ROLLMUX_BEST):
            parts = [4] if policy == ROLLMUX else [2, 4, 6]
            took_s = _rollmux_s(job, setting.seed, devices, parts)
            records.append(_record(setting, policy, took_s, serial_s, rollmux_s))
            continue
        ran = chains.run(pair, POLICIES[policy])
        more = {"of_optimum": best_s / ran.makespan_s}
        if policy != "serial":
            more |= {"mean_latency": mean(ran.slowdowns), "slowest": max(ran.slowdowns)}
        records.append(_record(setting, policy, ran.makespan_s, serial_s, rollmux_s, **more))
    return records


def _record(
    setting: Setting,
    policy: str,
    makespan_s: float,
    serial_s: float,
    rollmux_s: float = 0.0,
    **more: float,
) -> Record:
    return Record(
        policy=policy,
        seed=setting.seed,
        workload=setting.workload,
        jobs=2,
        makespan_s=makespan_s,
        over_serial=serial_s / makespan_s,
        over_rollmux=rollmux_s / makespan_s if rollmux_s else None,
        more=more,
    )


def _rollmux_s(job: Workload, seed: int, devices: int, parts: Sequence[int]) -> float:
    """Rounds of two jobs that roll out on some devices and train on the others.

    A round takes as long as the busier side needs for both jobs, or one job for its turn.

    Args: parts: eighths of the devices that roll out; the best of them is taken.
    """
    compute = (job.reference + job.train) / job.rollout
    alone_s = _mean_rollout_s(job, seed, devices)
    rounds = []
    for part in parts:
        for_rollout = devices * part // 8
        rollout_s = _mean_rollout_s(job, seed, for_rollout)
        train_s = alone_s * compute * devices / (devices - for_rollout)
        turn_s = rollout_s + train_s + alone_s * job.tool / job.rollout
        rounds.append(max(2 * rollout_s, 2 * train_s, turn_s))
    return ITERATIONS * min(rounds)


def _mean_rollout_s(job: Workload, seed: int, devices: int) -> float:
    """The mean rollout of both jobs, of the same samples however many devices share them."""
    rng = Random(seed)
    drawn = [pipelines.iteration(rng, job, ROWS, devices) for _ in range(2 * ITERATIONS)]
    return mean(iteration.rollout_s for iteration in drawn)


TENSOR_SPEED = {2: 1.0, 4: 1.15, 8: 1.1}
"""How fast a replica of so many GPUs is. Chosen after the words of §5.4: marginal gains within a
node, a loss across nodes. Gains of sharing do not depend on it."""
_SHARES_AT = 8
"""The replicas for which the published shares of an iteration hold."""


def _parallel(setting: Setting, job: Workload, tensor: int, replicas: int) -> list[Record]:
    """Two jobs of one kind on `replicas` data-parallel replicas of `tensor` GPUs each."""
    reference_s = _mean_rollout_s(job, setting.seed, _SHARES_AT) / job.rollout
    rollout_s = _mean_rollout_s(job, setting.seed, replicas)
    shorter = _SHARES_AT / replicas
    reference, train = (share * reference_s * shorter for share in (job.reference, job.train))
    whole_s = rollout_s + reference + train
    shaped = job._replace(
        rollout=rollout_s / whole_s,
        reference=reference / whole_s,
        train=train / whole_s,
        scale=job.scale / TENSOR_SPEED[tensor],
    )
    iterations = 2 * ITERATIONS
    return [
        msgspec.structs.replace(
            record,
            more={
                "iterations_an_hour": 3600 * iterations / record.makespan_s,
                "gpu_s_an_iteration": tensor * replicas * record.makespan_s / iterations,
            },
        )
        for record in _alike(setting, shaped, replicas)
        if record.makespan_s
    ]


def _parallel_published(records: list[Record]) -> list[Published]:
    one, four = (_of(records, "serial", f"4B GSM8K, TP 4, DP {n}") for n in (1, 4))
    rows = []
    for what, name, paper in (
        ("throughput", "iterations_an_hour", 1.2),
        ("cost", "gpu_s_an_iteration", 3.4),
    ):
        if one and four:
            ratio = mean_of(four, name) / mean_of(one, name)
            rows.append(Published(f"serial, DP 4 over DP 1: {what}", paper, ratio))
    workloads = dict.fromkeys(r.workload for r in _of(records, BEST))
    gains = [mean_of(_of(records, BEST, workload), "over_serial") for workload in workloads]
    if gains:
        rows.append(Published(f"{BEST} over serial, least", 1.16, min(gains)))
        rows.append(Published(f"{BEST} over serial, most", 1.48, max(gains)))
    return rows


def _asynchronous(setting: Setting, job: Workload, is_bounded: bool) -> list[Record]:
    """Each job rolls out on one half of eight devices and trains on the other, both at once.

    Two jobs with their halves exchanged have a rollout beside a training on every device. A job
    that is one step off waits for the slowest worker of each rollout; a fully asynchronous one does
    not.
    """
    first, second = (_halves(Random(setting.seed + i), job, is_bounded) for i in (0, 100))
    serial_s = _disaggregated_s(first, is_bounded) + _disaggregated_s(second, is_bounded)
    pairs = [
        Pair(_flat(first[0]), _flat(second[1]), setting.table),
        Pair(_flat(second[0]), _flat(first[1]), setting.table),
    ]
    return _side_by_side(setting, pairs, serial_s)


def _side_by_side(setting: Setting, pairs: Sequence[Pair], serial_s: float) -> list[Record]:
    """A record a policy: the makespan of pairs that run at once, each on devices of its own."""
    records = []
    for policy in setting.policies:
        makespan_s = max(chains.run(pair, POLICIES[policy]).makespan_s for pair in pairs)
        records.append(_record(setting, policy, makespan_s, serial_s))
    return records


Iterations = list[list[Stage]]


def _halves(rng: Random, job: Workload, is_bounded: bool) -> tuple[Iterations, Iterations]:
    """A worker's rollouts and a worker's training, an entry an iteration, on four devices each."""
    rollouts: Iterations = []
    trains: Iterations = []
    for number in range(ITERATIONS):
        drawn = pipelines.iteration(rng, job, ROWS, 4)
        whole_s = pipelines.iteration(rng, job, ROWS, 8).rollout_s / job.rollout
        rollouts.append(
            [Stage(k, s, 2 * number) for k, s in drawn.rollout if is_bounded or k != WAIT]
        )
        trains.append(
            [
                Stage("reference", 2 * job.reference * whole_s, 2 * number),
                Stage("train", 2 * job.train * whole_s, 2 * number + 1),
            ]
        )
    return rollouts, trains


def _flat(iterations: Iterations) -> Chain:
    return [*chained.from_iterable(iterations)]


def _seconds(stages: Iterable[Stage]) -> float:
    return sum(stage.seconds for stage in stages)


def _disaggregated_s(halves: tuple[Iterations, Iterations], is_bounded: bool) -> float:
    """The time of one job that has its halves to itself."""
    rollouts, trains = halves
    if is_bounded:
        return sum(max(map(_seconds, both)) for both in zip(rollouts, trains, strict=True))
    return max(_seconds(_flat(rollouts)), _seconds(_flat(trains)))


def _unlike(setting: Setting, jobs: Sequence[Workload]) -> list[Record]:
    """Two jobs of different size, each repeated until the other has had as many seconds."""
    rng = Random(setting.seed)
    drawn = [pipelines.chain(rng, job, ITERATIONS, ROWS, 8) for job in jobs]
    longest_s = max(map(_seconds, drawn))
    first, second = (_repeated(one, round(longest_s / _seconds(one))) for one in drawn)
    pair = Pair(first, second, setting.table)
    records = []
    for policy in setting.policies:
        ran = chains.run(pair, POLICIES[policy])
        more = {
            "rates_over_alone": sum(1 / slow for slow in ran.slowdowns),
            "slowest": max(ran.slowdowns),
        }
        serial_s = sum(pair.total_s)
        records.append(_record(setting, policy, ran.makespan_s, serial_s, **more))
    return records


def _repeated(chain: Chain, times: int) -> Chain:
    """The chain several times over, with numbers of its own for each operation."""
    step = chain[-1].operation + 1
    return [
        stage._replace(operation=stage.operation + step * again)
        for again in range(times)
        for stage in chain
    ]


def _mixed(setting: Setting, job: Workload) -> list[Record]:
    """A synchronous job on eight devices beside one that rolls out on four and trains on four."""
    sync = pipelines.chain(Random(setting.seed), job, ITERATIONS, ROWS, 8)
    halves = _halves(Random(setting.seed + 100), job, is_bounded=True)
    pairs = [Pair(sync, _flat(half), setting.table) for half in halves]
    serial_s = _seconds(sync) + _disaggregated_s(halves, is_bounded=True)
    return _side_by_side(setting, pairs, serial_s)


MIGRATIONS = ("stay", "literal", "corrected", "balanced")
"""The rules for a long tail: it stays; it is gathered where the printed ΔT is above 0; where the
corrected ΔT is; where that is, with the other job's batches balanced."""
_TAIL_ROWS = 4
"""The rows of a worker from which on its rollout counts as a long tail."""
_TAIL_SHARE = 0.25
"""The share of a device that a tail has beside a training."""


def _migrating(setting: Setting, job: Workload, devices: int) -> list[Record]:
    """The tails of one job's rollout on all devices, beside a training of the other job."""
    slow, rng = setting.table, Random(setting.seed)
    per_worker = ROWS // devices
    rests: list[list[int]] = []
    for _ in range(devices):
        lengths = sorted(pipelines.lengths(rng, job, per_worker))
        tail, before = lengths[-_TAIL_ROWS:], lengths[-_TAIL_ROWS - 1]
        rests.append([length - before for length in tail])
    drawn = pipelines.iteration(rng, job, ROWS, devices)
    train_s = drawn.rollout_s * job.train / job.rollout
    tail_slow = slow.slowdown("decode_small", _TAIL_SHARE, "train")
    train_slow = slow.slowdown("train", 1 - _TAIL_SHARE, "decode_small")
    move_s = _TAIL_ROWS * job.median_tokens / pipelines.PREFILL_TOKENS * pipelines.PREFILL_S
    tails = [Tail(pipelines.decode_s(r), tail_slow, train_s, train_slow, move_s) for r in rests]
    target = max(range(devices), key=lambda i: tails[i].seconds)
    whole = pipelines.decode_s([*chained.from_iterable(rests)])
    sizes = balanced(ROWS, devices, target, train_slow)
    others = max(size for i, size in enumerate(sizes) if i != target)
    skewed = max(sizes[target] * train_slow, others) / per_worker
    even = Gathered(whole, target, train_slow, tail_slow)
    skewing = even._replace(other_slowdown=skewed)
    does = {
        "stay": None,
        "literal": even if gain_literal_s(tails, even) > 0 else None,
        "corrected": even if gain_s(tails, even) > 0 else None,
        "balanced": skewing if gain_s(tails, skewing) > 0 else None,
    }
    stay_s = max(max(t.slowdown * t.seconds, t.other_slowdown * t.other_s) for t in tails)
    records = []
    for policy in setting.policies:
        gathered = does[policy]
        end_s = stay_s - (gain_s(tails, gathered) if gathered else 0.0)
        more = {
            "moved": float(gathered is not None),
            "over_stay": stay_s / end_s,
            "train_over_alone": gathered.other_slowdown if gathered else train_slow,
        }
        records.append(
            Record(
                policy=policy,
                seed=setting.seed,
                workload=setting.workload,
                jobs=2,
                makespan_s=end_s,
                more=more,
            )
        )
    return records


Run = Callable[..., list[Record]]


def _scenario(
    name: str,
    about: str,
    cases: Sequence[tuple[str, Run, tuple[Any, ...]]],
    policies: tuple[str, ...],
    targets: Callable[[list[Record]], list[Target]] = lambda records: [],
    *,
    column: str = "over_serial",
    published: Callable[[list[Record]], list[Published]] = lambda records: [],
) -> Scenario:
    """A scenario of spatial sharing.

    Args: cases: (workload, function, its arguments after the workload's name).
          column: the figure that the picture shows.
    """

    def run(options: Options) -> Report:
        chosen = options.policies_of(policies)
        table = _table(options.slowdowns)
        found = options.run_cases(
            [
                Case(
                    f"{what}, seed {seed}",
                    function,
                    (Setting(chosen, options.slowdowns, seed, what), *rest),
                )
                for what, function, rest in cases
                for seed in options.seeds or _SEEDS
            ]
        )
        records = [*chained.from_iterable(found)]
        records.sort(key=lambda r: [what for what, _, _ in cases].index(r.workload))
        return Report(
            scenario=name,
            about=about,
            parameters={"iterations": ITERATIONS, "rows": ROWS, "slowdowns": table.source},
            records=records,
            targets=targets(records),
            published=published(records),
        )

    def draw(report: Report, path: Path) -> None:
        with canvas(path, 1, width=9.0, height=3.0) as panels:
            bars(panels[0], report.records, column, column.replace("_", " "))

    return Scenario(about, run, draw, policies, frozenset({"slowdowns"}))


def _of(records: Iterable[Record], policy: str, workload: str = "") -> list[Record]:
    return [r for r in records if r.policy == policy and workload in (r.workload, "")]


def _throughput(
    over_serial: float, over_rollmux: float = 0.0, of_optimum: float = 0.0
) -> Callable[[list[Record]], list[Target]]:
    """Means over all workloads and seeds under the best policy."""

    def targets(records: list[Record]) -> list[Target]:
        ours = _of(records, BEST)
        aims = {
            "over_serial": over_serial,
            "over_rollmux": over_rollmux,
            "of_optimum": of_optimum,
        }
        return [
            at_least(f"{BEST}: {name.replace('_', ' ')} (mean)", mean_of(ours, name), aim)
            for name, aim in aims.items()
            if aim and ours and (name != "over_rollmux" or _has_rollmux(ours))
        ]

    return targets


def _has_rollmux(records: Sequence[Record]) -> bool:
    return all(record.over_rollmux is not None for record in records)


def _latency(records: list[Record]) -> list[Target]:
    ours = _of(records, BEST)
    if not ours:
        return []
    return [at_most(f"{BEST}: latency over alone (mean)", mean_of(ours, "mean_latency"), 1.48)]


def _slowest(records: list[Record]) -> list[Target]:
    ours = _of(records, "fair")
    return [
        at_most(
            f"fair: the slower job over alone, {r.workload}, seed {r.seed}", r.more["slowest"], 1.34
        )
        for r in ours
    ]


def _each(aims: dict[str, float], policy: str = BEST, column: str = "over_serial"
          ) -> Callable[[list[Record]], list[Target]]:  # fmt: skip
    def targets(records: list[Record]) -> list[Target]:
        found = {workload: _of(records, policy, workload) for workload in aims}
        return [
            at_least(
                f"{policy}, {workload}: {column.replace('_', ' ')}", mean_of(ours, column), aim
            )
            for (workload, ours), aim in zip(found.items(), aims.values(), strict=True)
            if ours
        ]

    return targets


def _asynchronous_targets(records: list[Record]) -> list[Target]:
    targets = []
    for kind, aim in (("one step off", 1.25), ("fully asynchronous", 1.21)):
        ours = [r for r in _of(records, BEST) if r.workload.endswith(kind)]
        if ours:
            name = f"{BEST}, {kind}: over serial (mean)"
            targets.append(at_least(name, mean_of(ours, "over_serial"), aim))
    return targets


_ALL = ("serial", ROLLMUX, ROLLMUX_BEST, "static", "rollouts", "greedy", "lookahead", "fair")
_SHARING = ("static", "greedy", "lookahead", "fair")
_LATENCY = ("static", "rollouts", "greedy", "lookahead", "fair")
_ALIKE = [(name, _alike, (job, 8)) for name, job in HOMOGENEOUS.items()]

SCENARIOS: dict[str, Scenario] = {
    "jigsaw-fig12": _scenario(
        "jigsaw-fig12",
        "two jobs of one kind on eight devices, shared in space (JigsawRL Fig. 12)",
        _ALIKE,
        (*_ALL[:5], "operations", *_ALL[5:]),
        _throughput(1.5, 1.2, 0.97),
    ),
    "jigsaw-fig13": _scenario(
        "jigsaw-fig13",
        "the same on 8 to 64 devices (JigsawRL Fig. 13)",
        [
            (f"{name}, {devices} devices", _alike, (job, devices))
            for name, job in SCALED.items()
            for devices in (8, 16, 32, 64)
        ],
        _ALL,
        _throughput(1.47, 1.31),
    ),
    "jigsaw-fig14": _scenario(
        "jigsaw-fig14",
        "what sharing in space costs a job in latency (JigsawRL Fig. 14)",
        _ALIKE,
        _LATENCY,
        _latency,
        column="mean_latency",
    ),
    "jigsaw-fig15": _scenario(
        "jigsaw-fig15",
        "asynchronous jobs, rollouts of one beside training of the other (JigsawRL Fig. 15)",
        [
            (f"{name}, {kind}", _asynchronous, (job, kind == "one step off"))
            for name, job in HOMOGENEOUS.items()
            for kind in ("one step off", "fully asynchronous")
        ],
        _SHARING,
        _asynchronous_targets,
    ),
    "jigsaw-fig16": _scenario(
        "jigsaw-fig16",
        "jobs of different size on the same devices (JigsawRL Fig. 16)",
        [(name, _unlike, (jobs,)) for name, jobs in UNLIKE.items()],
        _SHARING,
        _slowest,
        column="slowest",
    ),
    "jigsaw-fig17": _scenario(
        "jigsaw-fig17",
        "a synchronous job beside one that is one step off (JigsawRL Fig. 17)",
        [(name, _mixed, (job,)) for name, job in MIXED.items()],
        _SHARING,
        _each({"GSM8K": 1.24, "MATH": 1.07}),
    ),
    "jigsaw-fig18": _scenario(
        "jigsaw-fig18",
        "sharing beside tensor and data parallelism (JigsawRL Fig. 18)",
        [
            (f"{name}, TP {tensor}, DP {replicas}", _parallel, (job, tensor, replicas))
            for name, job in SCALED.items()
            for tensor, replicas in ((2, 1), (4, 1), (8, 1), (4, 2), (4, 4))
        ],
        ("serial", "greedy", "lookahead"),
        column="iterations_an_hour",
        published=_parallel_published,
    ),
    "jigsaw-fig19": _scenario(
        "jigsaw-fig19",
        "what is shared: nothing, rollouts, everything (JigsawRL Fig. 19)",
        [("4B GSM8K, 4 devices", _alike, (_GSM8K, 4))],
        ("serial", "rollouts", "operations", "greedy", "lookahead"),
        _each({"4B GSM8K, 4 devices": 1.7}),
    ),
    "jigsaw-fig20": _scenario(
        "jigsaw-fig20",
        "long tails gathered beside another job's training (JigsawRL Fig. 20)",
        [
            (f"{name}, {n} devices", _migrating, (job, n))
            for name, job in MIXED.items()
            for n in (2, 8)
        ],
        MIGRATIONS,
        column="over_stay",
    ),
}
