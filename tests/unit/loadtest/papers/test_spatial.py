"""Sharing in space: sub-stages, slowdowns, policies against the optimum, gathered tails."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.papers.scenarios import SCENARIOS
from loadtest.papers.scenarios.jigsaw import HOMOGENEOUS, ITERATIONS, ROWS
from loadtest.papers.scenarios.scenario import Options
from loadtest.papers.spatial import pipelines
from loadtest.papers.spatial.chains import POLICIES, run
from loadtest.papers.spatial.merging import (
    Gathered,
    Tail,
    balanced,
    gain_literal_s,
    gain_s,
)
from loadtest.papers.spatial.optimum import least_makespan_s
from phaseloom.common.contract.errors import CallerError
from phaseloom.common.contract.specs import KindSlowdown, SlowdownTable
from phaseloom.common.process import slowdowns
from phaseloom.scheduler.core.planning.chains import (
    WAIT,
    Chain,
    Pair,
    PairProgress,
    PairState,
    Rates,
    Stage,
)
from phaseloom.scheduler.core.policies.sharing_view import MARGIN
from phaseloom.simulator.tables import PAPER_TABLE, TWO_CORES_TABLE

GOLDEN = Path(__file__).parents[3] / "golden"
TABLE = slowdowns.read(PAPER_TABLE)


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("case", golden("migration")["cases"], ids=lambda case: case["name"])
def test_gain_of_gathering_as_printed(case: dict[str, Any]) -> None:
    rows = zip(case["T"], case["s"], case["Tp"], case["sp"], case["M"], strict=True)
    gathered = Gathered(case["TX"], case["t"], case["s_t"])
    gain = gain_literal_s([Tail(*row) for row in rows], gathered)
    assert gain == pytest.approx(case["dT"]), case["why"]


def test_the_printed_gain_counts_twice_what_runs_at_once() -> None:
    """A tail of 10 s beside 10 s of training on two workers: gathered, nobody ends earlier."""
    tails = [Tail(10.0, 1.0, 10.0, 1.2, 0.5)] * 2
    gathered = Gathered(10.0, 0, 1.2)
    assert gain_literal_s(tails, gathered) == pytest.approx(22 - 22.5)
    assert gain_s(tails, gathered) == pytest.approx(0.0)
    assert gain_s(tails, gathered._replace(other_slowdown=1.1)) == pytest.approx(1.0)


@pytest.mark.parametrize("case", golden("multiplexing")["balance"], ids=lambda case: case["name"])
def test_balanced_batches_as_by_hand(case: dict[str, Any]) -> None:
    assert balanced(case["N"], case["n"], case["t"], case["s"], case["a"]) == case["out"]


@given(st.integers(2, 16), st.integers(16, 400), st.floats(1.0, 3.0))
def test_balanced_batches_end_together(workers: int, total: int, slow: float) -> None:
    sizes = balanced(total, workers, 0, slow)
    assert sum(sizes) == total
    assert max(sizes[0] * slow, *sizes[1:]) <= total / workers * slow + 1
    assert max(sizes[1:]) - min(sizes[1:]) <= 1


@pytest.mark.parametrize("case", golden("multiplexing")["chains"], ids=lambda case: case["name"])
def test_least_makespan_as_by_search(case: dict[str, Any]) -> None:
    memory = case.get("memory", {})
    kinds = {
        name: KindSlowdown({0.5: units["1"], 1.0: units["2"]}, memory.get(name, 0.0))
        for name, units in golden("multiplexing")["slow"].items()
    }
    table = SlowdownTable("golden", kinds, splits=(0.5,))
    first, second = ([Stage(k, s, i) for i, (k, s) in enumerate(case[job])] for job in "AB")
    pair = Pair(first, second, table)
    assert least_makespan_s(pair) == pytest.approx(case["makespan"], rel=0.005), case["why"]


def test_slowdown_between_two_measured_shares_and_beyond() -> None:
    kind = KindSlowdown({0.5: 2.0, 1.0: 1.0})
    table = SlowdownTable("mine", {"a": kind, "b": kind}, beside={"a": {"b": 1.5}})
    assert table.alone("a", 0.75) == pytest.approx(1.5)
    assert table.alone("a", 0.1) == 2.0
    assert table.slowdown("a", 0.75, "b") == pytest.approx(2.25)
    assert table.slowdown("b", 0.75, "a") == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not a slowdown table"),
        ('{"source": "x", "kinds": {"a": {"shares": {"1.0": 0}}}}', "positive"),
        ('{"source": "x", "kinds": {"a": {"shares": {"1.0": 1}}}, "speed": 2}', "speed"),
        (
            '{"source": "x", "kinds": {"a": {"shares": {"1.0": 1}}}, "beside": {"b": {"a": 1}}}',
            "that `kinds` lacks",
        ),
        ('{"source": "x", "kinds": {"a": {"shares": {"1.0": 1}}}}', "lacks decode_small"),
    ],
)
def test_a_bad_table_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(CallerError, match=why) as refused:
        SCENARIOS["jigsaw-fig19"].run(Options(seeds=(0,), slowdowns=path, processes=1))
    assert refused.value.info.field == "slowdowns"


def chains_of(seed: int) -> tuple[Chain, Chain]:
    rng = Random(seed)
    kinds = [*TABLE.kinds, WAIT]

    def one() -> Chain:
        return [Stage(rng.choice(kinds), rng.uniform(1, 20), i // 2) for i in range(8)]

    return one(), one()


@pytest.mark.parametrize("name", POLICIES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=5, deadline=None)
def test_no_policy_beats_the_optimum(name: str, seed: int) -> None:
    pair = Pair(*chains_of(seed), TABLE)
    ran = run(pair, POLICIES[name])
    longest_s = max(pair.total_s)
    assert ran.makespan_s >= longest_s * (1 - 1e-9)
    # Short stages take at least a cell of the optimum's grid.
    assert ran.makespan_s >= 0.95 * least_makespan_s(pair, cells=100)


def test_serial_takes_the_sum_and_what_cannot_fit_is_never_together() -> None:
    trains = [Stage("train", 10.0, 0)]
    pair = Pair(trains, trains, TABLE)
    for name in ("serial", "greedy", "lookahead", "fair"):
        assert run(pair, POLICIES[name]).makespan_s == pytest.approx(20.0), name


def test_what_has_begun_is_not_stopped() -> None:
    first = [Stage("decode_large", 5.0, 0), Stage("decode_small", 5.0, 0)]
    pair = Pair(first, [Stage("train", 10.0, 0)], TABLE)
    _, state = pair.advance(pair.start, (1.0, 0.0))
    assert state[0].has_begun
    assert all(rates[0] > 0 for rates in pair.options(state))


def test_where_only_operations_are_known_a_rollout_is_taken_for_its_worst_sub_stage() -> None:
    """Its batch gains nothing beside training under the paper's table, its tail does."""
    rollout = [Stage("decode_large", 1.0, 0), Stage("decode_small", 9.0, 0)]
    pair = Pair(rollout, [Stage("train", 10.0, 0)], TABLE)
    assert run(pair, POLICIES["operations"]).makespan_s == pytest.approx(20.0)
    assert run(pair, POLICIES["greedy"]).makespan_s < 15.0
    tail = Pair(rollout[1:], [Stage("train", 10.0, 0)], TABLE)
    assert run(tail, POLICIES["operations"]) == run(tail, POLICIES["greedy"])


def deciding_by(believed: SlowdownTable, true: Pair) -> float:
    """How much faster two jobs are than one after the other, decided by a table that is not true,
    as live meshes decide."""
    belief = Pair(true.first, true.second, believed)

    def policy(pair: Pair, state: PairState, progress: PairProgress) -> Rates:
        options, offered = pair.options(state), belief.options(state)
        wanted = offered.index(POLICIES["operations"](belief, state, progress))
        # Where one of the tables has no room for both, the last choice is one of the two alone.
        return options[wanted] if len(options) == len(offered) else options[-1]

    return sum(true.total_s) / run(true, policy).makespan_s


def beside_more(table: SlowdownTable, factor: float) -> SlowdownTable:
    """The same table, where everything slows everything down by so much more."""
    beside = {
        kind: {other: factor * table.factor(kind, other) for other in table.kinds}
        for kind in table.kinds
    }
    return msgspec.structs.replace(table, kinds={**table.kinds}, beside=beside)


def test_a_table_that_denies_costs_more_than_one_that_promises() -> None:
    """Two jobs of each workload of Fig. 12 on two cores, by the table of a GPU, by their own, by
    one as it is measured while the machine has other work (training seems to lose nothing on one
    core, and all a third beside something), and by their own where the truth is that everything
    slows everything down by half."""
    own = slowdowns.read(TWO_CORES_TABLE)
    of_a_gpu = msgspec.structs.replace(TABLE, splits=own.splits)
    hindered = beside_more(own, 1.5)
    loaded = beside_more(own, 1.3)
    loaded.kinds["train"] = KindSlowdown({0.5: 1.0, 1.0: 1.0})
    names = ("own", "denied", "loaded", "promised", "known")
    gains: dict[str, list[float]] = {name: [] for name in names}
    for job, seed in product(HOMOGENEOUS.values(), range(3)):
        rng = Random(seed)
        first, second = (pipelines.chain(rng, job, ITERATIONS, ROWS, 8) for _ in range(2))
        true = Pair(first, second, own)
        gains["own"].append(deciding_by(own, true))
        gains["denied"].append(deciding_by(of_a_gpu, true))
        gains["loaded"].append(deciding_by(loaded, true))
        hinders = Pair(first, second, hindered)
        gains["promised"].append(deciding_by(own, hinders))
        gains["known"].append(deciding_by(hindered, hinders))
    mean = {name: fmean(found) for name, found in gains.items()}
    assert mean["own"] > 1.7
    assert gains["loaded"] == gains["own"]
    assert mean["denied"] < 1.35
    assert 0.95 * mean["known"] < mean["promised"] <= mean["known"] + 0.01, mean


def test_a_wait_takes_nothing_of_the_device() -> None:
    pair = Pair([Stage(WAIT, 10.0, 0)], [Stage("train", 10.0, 0)], TABLE)
    assert run(pair, POLICIES["static"]).makespan_s == pytest.approx(16.4)
    assert run(pair, POLICIES["greedy"]).makespan_s == pytest.approx(10.0)


def test_scenario_tells_gain_over_its_rivals_and_takes_a_table_of_ones_own(tmp_path: Path) -> None:
    options = Options(policies=("serial", "greedy", "lookahead"), seeds=(0,), processes=1)
    report = SCENARIOS["jigsaw-fig19"].run(options)
    found = {record.policy: record for record in report.records}
    assert found["serial"].over_serial == pytest.approx(1.0)
    assert found["lookahead"].over_serial is not None
    assert found["lookahead"].over_serial > 1.3
    assert found["lookahead"].more["of_optimum"] <= 1.01
    # Where nothing is gained side by side, lookahead leaves the device to one at a time.
    beside = {kind: dict.fromkeys(TABLE.kinds, 4.0) for kind in TABLE.kinds}
    contended = msgspec.structs.replace(TABLE, beside=beside)
    path = tmp_path / "contended.json"
    path.write_bytes(msgspec.json.encode(contended))
    options = Options(("lookahead",), (0,), slowdowns=path, processes=1)
    (record,) = SCENARIOS["jigsaw-fig19"].run(options).records
    assert record.over_serial is not None
    assert 0.97 < record.over_serial < found["lookahead"].over_serial


def test_tails_are_gathered_only_where_somebody_gains() -> None:
    records = SCENARIOS["jigsaw-fig20"].run(Options(seeds=(0, 1), processes=1)).records
    gains = {(r.policy, r.workload, r.seed): r.more["over_stay"] for r in records}
    assert all(gain >= 1.0 for (policy, *_), gain in gains.items() if policy != "literal")
    assert max(gain for (policy, *_), gain in gains.items() if policy == "balanced") > 1.1


def test_measured_table_of_two_cores_is_one_that_all_take() -> None:
    """Decoding works on one core, so it loses nothing with one; training loses less than half, so
    two of it get more done side by side, by more than the margin of `greedy`."""
    table = slowdowns.read(TWO_CORES_TABLE, needed=slowdowns.SUB_STAGES)
    for kind in ("decode_small", "decode_large", "reference"):
        assert table.alone(kind, 0.5) == pytest.approx(1.0, abs=0.1)
    assert 1.1 < table.alone("train", 0.5) < 1.9
    ((first, second),) = table.rates("train", "train")
    assert first + second > 1 + MARGIN
    options = Options(("lookahead",), (0,), slowdowns=TWO_CORES_TABLE, processes=1)
    (record,) = SCENARIOS["jigsaw-fig19"].run(options).records
    assert (record.over_serial or 0.0) > 1.1
