"""The long tail of a rollout on the whole mesh: gathered on one rank, while another job runs on the
devices of the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.cli.supervisor import Mesh
from phaseloom.client import (
    Batching,
    GenerateResult,
    Piece,
    Prompt,
    SamplingParams,
    float32s,
    int32s,
)
from phaseloom.common.contract.events import (
    MAX_STEP_RUNS,
    ActivationOpened,
    OperationFinished,
    TailGathered,
)
from phaseloom.common.contract.specs import Layout
from tests.support.jobs import Log, kill_rank, running_mesh, tenant
from tests.support.node import sampler_spec
from tests.support.tinymodel import VOCAB

pytestmark = pytest.mark.long

MAX_TOKENS = 1500
FOUR = Layout(dp=4)
MESH = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * 2**20] * 4)])
PROMPTS = [Prompt([1 + seed % 5, 2, 3], seed) for seed in range(16)]
HEAVY_TAILED = SamplingParams(MAX_TOKENS, stop_strings=["ab", "cd"], ignore_eos=True)
"""Each token ends its sample with a chance of about two in VOCAB²: a few samples are many times as
long as most."""
TEXTS = [chr(ord("a") + token) for token in range(VOCAB)]
LOGPROB_ERROR = 1e-5


async def rollout(
    connection: client.Mesh, log: Log, name: str, *, tail_share: float
) -> GenerateResult:
    """The answer to a job's only rollout, which it has also seen while it was drawn."""
    spec = sampler_spec(
        MAX_TOKENS + 10, batching=Batching.SHARED, layout=FOUR, tail_share=tail_share
    )
    spec = replace(spec, model=replace(spec.model, token_texts=TEXTS))
    job = await connection.submit_job(name, [spec])
    handle = job.deployment(spec.name).generate(PROMPTS, HEAVY_TAILED, num_samples=4, stream=True)
    pieces = [piece async for piece in handle.stream()]
    result = await handle
    check_stream(pieces, result)
    await log.until_finished(f"{name}.{spec.name}.1")
    await job.finish()
    return result


def check_stream(pieces: list[Piece], result: GenerateResult) -> None:
    """Joined, the pieces are the result, and little of the longest sample came with it only."""
    for prompt, group in enumerate(tokens_of(result)):
        for sample, tokens in enumerate(group):
            own = [each for each in pieces if (each.prompt, each.sample) == (prompt, sample)]
            assert [token for each in own for token in each.tokens] == tokens
    ends = [piece for piece in pieces if piece.stop_reason]
    longest = max(ends, key=lambda piece: piece.offset + len(piece.tokens))
    assert longest.offset > 9 * len(longest.tokens)


def tokens_of(result: GenerateResult) -> list[list[list[int]]]:
    return [[int32s(sample.tokens) for sample in group] for group in result.sequences]


def logprobs_of(result: GenerateResult) -> list[float]:
    samples = [sample for group in result.sequences for sample in group]
    return [value for sample in samples for value in float32s(sample.logprobs)]


def check_same(result: GenerateResult, expected: GenerateResult) -> None:
    assert tokens_of(result) == tokens_of(expected)
    assert logprobs_of(result) == pytest.approx(logprobs_of(expected), abs=LOGPROB_ERROR)


async def beside(
    connection: client.Mesh, log: Log, name: str, kill_in: Mesh | None = None
) -> GenerateResult:
    """The answer to a rollout beside a job that has something to do all the time.

    Args: kill_in: kill a rank of the rollout's once its tail is gathered.
    """
    other = await connection.submit_job(f"beside-{name}", [sampler_spec()])
    sampler = other.deployment("sampler")
    short = [Prompt([1])], SamplingParams(2)
    await sampler.generate(*short)
    rolling = asyncio.ensure_future(rollout(connection, log, name, tail_share=0.2))
    while not rolling.done():
        await sampler.generate(*short)
        if kill_in is not None and gathered_by(log, name):
            kill_rank(kill_in, f"{name}.sampler")
            kill_in = None
    await other.finish()
    await log.caught_up()
    return await rolling


def gathered_by(log: Log, job: str) -> list[int]:
    """Where the log says that a tail of the job is gathered."""
    tails = ((i, e) for i, e in enumerate(log.events) if isinstance(e, TailGathered))
    return [i for i, event in tails if event.operations[0].job == job]


def ended_by(log: Log, job: str) -> list[int]:
    """Where the log says that a `generate` of the job has ended."""
    ends = ((i, e) for i, e in enumerate(log.events) if isinstance(e, OperationFinished))
    return [i for i, event in ends if event.key.job == job and event.kind == "generate"]


async def test_next_job_runs_on_the_devices_that_a_tail_leaves(short_dir: Path) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        expected = await rollout(connection, log, "whole", tail_share=0.0)
        lengths = sorted(len(each) for group in tokens_of(expected) for each in group)
        assert lengths[-1] > 2 * lengths[len(lengths) * 8 // 10], "no heavy tail"
        gathered = await beside(connection, log, "gathered")
        (begin,), (end,) = gathered_by(log, "gathered"), ended_by(log, "gathered")
        assert any(begin < at < end for at in ended_by(log, "beside-gathered"))
        check_same(gathered, expected)
        check_steps(log, "whole", expected)
        check_steps(log, "gathered", gathered)
        assert log.failures() == []


def check_steps(log: Log, job: str, result: GenerateResult) -> None:
    """The log tells each replica's steps: every new token is of a row's prefill or of a step."""
    (finished,) = (log.events[i] for i in ended_by(log, job))
    assert isinstance(finished, OperationFinished)
    assert {run.replica for run in finished.steps} == {0, 1, 2, 3}
    assert len(finished.steps) <= MAX_STEP_RUNS
    prompts = sum(len(int32s(prompt.tokens)) for prompt in PROMPTS)
    drawn = sum(len(tokens) for group in tokens_of(result) for tokens in group)
    # A prefill draws a token of each sample; rows that have ended stay in a batch for a while.
    assert sum(run.tokens for run in finished.steps) >= prompts + drawn - 4 * len(PROMPTS)
    assert sum(run.duration_s for run in finished.steps) <= 4 * finished.duration_s


@pytest.mark.slow
async def test_rank_that_is_killed_in_a_gathered_tail_loses_no_token(short_dir: Path) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        expected = await rollout(connection, log, "whole", tail_share=0.0)
        killed = await beside(connection, log, "killed", kill_in=mesh)
        assert len(gathered_by(log, "killed")) == 2
        check_same(killed, expected)
        assert log.failures() == []


@pytest.mark.slow
async def test_next_rollout_over_the_same_devices_begins_without_the_tails(
    short_dir: Path,
) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        expected = await rollout(connection, log, "whole", tail_share=0.0)
        both = await asyncio.gather(
            *(rollout(connection, log, name, tail_share=0.2) for name in ("one", "two"))
        )
        await log.caught_up()
        opened = [
            (i, event.deployment.job)
            for i, event in enumerate(log.events)
            if isinstance(event, ActivationOpened) and event.deployment.job != "whole"
        ]
        (_, first), (begun, second) = opened[:2]
        assert gathered_by(log, first)[0] < begun < ended_by(log, first)[0]
        assert ended_by(log, first)[0] < ended_by(log, second)[0]
        for result in both:
            check_same(result, expected)
        assert log.failures() == []
