"""Tokens of a `generate` while they are drawn, on the whole mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.client import (
    Batching,
    GenerateHandle,
    GenerateResult,
    OperationEnded,
    Piece,
    Progress,
    Prompt,
    RuntimeEvent,
    SamplingParams,
    float32s,
    int32s,
)
from phaseloom.common.contract.specs import Layout
from tests.support.jobs import kill_rank, running_mesh, tenant
from tests.support.node import sampler_spec

LONG = 2000
"""New tokens of a sample: seconds for the tiny model."""
PROMPTS = [Prompt([1, 2, 3], seed=5), Prompt([4, 5], seed=6)]
SAMPLING = SamplingParams(LONG, ignore_eos=True, top_logprobs=2)
NUM_SAMPLES = 2
MESH = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * 2**20])])


def check_whole(pieces: list[Piece], result: GenerateResult) -> None:
    """Joined, the pieces are the result: each position once, in order, with what is told of it."""
    for prompt, group in enumerate(result.sequences):
        for sample, sequence in enumerate(group):
            own = [each for each in pieces if (each.prompt, each.sample) == (prompt, sample)]
            tokens = [token for each in own for token in each.tokens]
            assert tokens == int32s(sequence.tokens)
            assert [each.offset for each in own] == [
                sum(len(before.tokens) for before in own[:i]) for i in range(len(own))
            ]
            assert [token for each in own for token in each.top_tokens] == int32s(
                sequence.top_tokens
            )
            for name in ("logprobs", "top_logprobs"):
                told = [value for each in own for value in getattr(each, name)]
                assert told == pytest.approx(float32s(getattr(sequence, name)), abs=1e-4)
            assert [each.stop_reason for each in own] == [""] * (len(own) - 1) + [
                sequence.stop_reason
            ]


async def streamed(handle: GenerateHandle) -> list[Piece]:
    return [piece async for piece in handle.stream()]


async def test_tokens_come_while_they_are_drawn_and_join_to_the_result(short_dir: Path) -> None:
    spec = sampler_spec(positions=LONG + 10, batching=Batching.SHARED)
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("streams", [spec])
        sampler = job.deployment(spec.name)
        events: list[RuntimeEvent | Piece] = []
        job.runtime_hook(events.append)
        handle = sampler.generate(PROMPTS, SAMPLING, NUM_SAMPLES, stream=True)
        async for piece in handle.stream():
            events.append(piece)
        result = await handle
        pieces = [event for event in events if isinstance(event, Piece)]
        check_whole(pieces, result)
        ended = next(i for i, event in enumerate(events) if isinstance(event, OperationEnded))
        before = [event for event in events[:ended] if isinstance(event, Piece)]
        assert {(each.prompt, each.sample) for each in before} == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert len(before) > 4, "several messages"
        assert {each.weights_seq for each in before} == {0}
        assert await streamed(handle) == pieces, "once more, from the first on"

        # Who does not ask is told of no token, and the stream has them with the result.
        events.clear()
        whole = sampler.generate(PROMPTS, SAMPLING, NUM_SAMPLES)
        pieces = await streamed(whole)
        assert len(pieces) == 4
        check_whole(pieces, await whole)
        assert [e.drawn for e in events if isinstance(e, Progress) and e.drawn] == []
        assert (await whole).sequences == result.sequences
        await job.finish()
        await log.caught_up()
        assert log.failures() == []


async def test_stream_goes_on_where_it_was_when_a_rank_is_killed(short_dir: Path) -> None:
    spec = sampler_spec(positions=LONG + 10)
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("killed", [spec])
        sampler = job.deployment(spec.name)
        expected = await sampler.generate(PROMPTS, SAMPLING, NUM_SAMPLES)
        handle = sampler.generate(PROMPTS, SAMPLING, NUM_SAMPLES, stream=True)
        pieces: list[Piece] = []
        async for piece in handle.stream():
            pieces.append(piece)
            if len(pieces) == 10:
                assert not handle.done()
                kill_rank(mesh, f"killed.{spec.name}")
        result = await handle
        check_whole(pieces, result)
        for group, other in zip(result.sequences, expected.sequences, strict=True):
            assert [int32s(each.tokens) for each in group] == [int32s(e.tokens) for e in other]
        # Each position once, though the second run told all of them again.
        assert len([each for each in pieces if not each.stop_reason]) > 10
        await job.finish()
        await log.caught_up()
        assert log.failures() == []


async def test_all_ranks_tell_their_tokens(short_dir: Path) -> None:
    mesh_of_four = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * 2**20] * 4)])
    spec = sampler_spec(LONG + 10, batching=Batching.SHARED, layout=Layout(dp=4))
    prompts = [Prompt([1 + seed % 5, 2, 3], seed) for seed in range(8)]
    # Each token ends its sample with a chance of about one in a hundred.
    sampling = SamplingParams(LONG, stop_token_ids=[7], top_logprobs=1)
    async with (
        running_mesh(mesh_of_four, short_dir) as (mesh, log),
        tenant(mesh) as connection,
    ):
        job = await connection.submit_job("tails", [spec])
        events: list[RuntimeEvent] = []
        job.runtime_hook(events.append)
        handle = job.deployment(spec.name).generate(prompts, sampling, NUM_SAMPLES, stream=True)
        check_whole(await streamed(handle), await handle)
        told = [each for e in events if isinstance(e, Progress) for each in e.drawn]
        assert {each.prompt for each in told} == set(range(len(prompts)))
        await job.finish()
        await log.caught_up()
        assert log.failures() == []
