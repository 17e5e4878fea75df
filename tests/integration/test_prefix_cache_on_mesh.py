"""The sampler's prefix cache on the whole mesh: turns, switches, kills, and updates in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.client import (
    AdamParams,
    Deployment,
    GenerateResult,
    MeshJob,
    Progress,
    Prompt,
    RolloutResult,
    RuntimeEvent,
    SamplingParams,
    float32s,
    int32s,
)
from phaseloom.common.contract.events import ActivationOpened
from phaseloom.common.contract.operations import Outcome
from tests.support.jobs import kill_rank, running_mesh, tenant
from tests.support.node import lesson, policy_spec, sampler_spec
from tests.support.tinymodel import VOCAB

LOGPROB_ERROR = 1e-5
CACHE_BYTES = 2**20
LONG = 500
"""New tokens of a rollout: more than there is time for before the update."""
PROMPTS = [Prompt([1, 2, 3], seed=5), Prompt([4, 5], seed=6)]
NUM_SAMPLES = 2
SAMPLING = SamplingParams(LONG, ignore_eos=True)


class Conversation:
    """A conversation with a sampler."""

    def __init__(self, sampler: Deployment) -> None:
        self._sampler = sampler
        self._said: list[int] = []
        self.results: list[GenerateResult] = []
        self.num_asked = 0
        """Tokens that are not the model's."""

    async def turn(self) -> int:
        """Returns: how many tokens were run before the first new one; 0: it is not told."""
        turn = len(self.results)
        asked = [(turn * 7 + i * i) % VOCAB for i in range(3 + turn % 3)]
        self._said = [*self._said, *asked]
        self.num_asked += len(asked)
        sampling = SamplingParams(6, ignore_eos=True)
        result = await self._sampler.generate([Prompt(self._said, turn)], sampling)
        self._said = [*self._said, *int32s(result.sequences[0][0].tokens)]
        self.results.append(result)
        return int(result.metrics.get("prefilled_tokens:sum", 0))

    @property
    def num_said(self) -> int:
        return len(self._said)


def check_alike(ours: list[GenerateResult], theirs: list[GenerateResult]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        ((mine,),), ((yours,),) = one.sequences, two.sequences
        assert int32s(mine.tokens) == int32s(yours.tokens)
        expected = list(float32s(yours.logprobs))
        assert list(float32s(mine.logprobs)) == pytest.approx(expected, abs=LOGPROB_ERROR)


async def test_turns_prefill_each_token_once_and_a_switch_or_a_kill_costs_the_cache_only(
    short_dir: Path,
) -> None:
    node = NodeConfig("rollout-0", "rollout", [CACHE_BYTES + CACHE_BYTES // 2])
    cached = sampler_spec(256, prefix_cache=True, scratch_bytes=CACHE_BYTES)
    async with (
        running_mesh(MeshConfig(nodes=[node]), short_dir) as (mesh, log),
        tenant(mesh) as connection,
    ):
        plain = await connection.submit_job("plain", [sampler_spec(256)])
        expected = Conversation(plain.deployment("sampler"))
        for _ in range(14):
            assert await expected.turn() == 0
        await plain.finish()

        job = await connection.submit_job("cached", [cached])
        talk = Conversation(job.deployment("sampler"))
        num_prefilled = [await talk.turn() for _ in range(10)]
        assert sum(num_prefilled) == talk.num_asked + 9

        other = await connection.submit_job("other", [cached])
        await Conversation(other.deployment("sampler")).turn()
        before = talk.num_said
        assert await talk.turn() >= before
        assert await talk.turn() < 8

        kill_rank(mesh, "cached.sampler")
        before = talk.num_said
        assert await talk.turn() >= before
        assert await talk.turn() < 8
        check_alike(talk.results, expected.results)
        for each in (job, other):
            await each.finish()
        await log.caught_up()
        opened = [e for e in log.events if isinstance(e, ActivationOpened)]
        assert len([e for e in opened if e.displaced]) >= 2
        assert max(e.bytes_in for e in opened) < CACHE_BYTES // 2, "the cache was moved"
        assert log.failures() == []


async def interrupted(job: MeshJob, *, keeps_kv: bool, after_a_step: bool = False) -> RolloutResult:
    """A rollout that a weights update meets."""
    policy, sampler = job.deployment("policy"), job.deployment("sampler")
    drawn = asyncio.Event()

    def heard(event: RuntimeEvent) -> None:
        if isinstance(event, Progress) and event.num_done:
            drawn.set()

    job.runtime_hook(heard)
    rollout = sampler.rollout(PROMPTS, SAMPLING, NUM_SAMPLES)
    await drawn.wait()
    if after_a_step:
        args = lesson(1)
        policy.forward_backward(args.batch, args.loss)
        policy.optim_step(AdamParams(1e-1))
    published = policy.publish_weights()
    await sampler.update_weights(published, keeps_kv=keeps_kv)
    result = await rollout
    runs = [each for group in result.versions for each in group]
    assert all(len(each) == 2 and each[1].version == published.seq for each in runs)
    return result


async def check_refused(connection: client.Mesh) -> None:
    """A sampler without a cache cannot keep it."""
    job = await connection.submit_job("plain", [policy_spec(), sampler_spec()])
    published = job.deployment("policy").publish_weights()
    with pytest.raises(client.CallerError) as raised:
        await job.deployment("sampler").sync_weights(published, keeps_kv=True)
    assert raised.value.info.field == "args.keeps_kv"
    assert "prefix_cache" in raised.value.info.remedy
    await job.finish()


async def test_update_in_flight_keeps_the_kv_cache_or_computes_it_anew(short_dir: Path) -> None:
    nodes = [
        NodeConfig("rollout-0", "rollout", [16 * 2**20]),
        NodeConfig("train-0", "train", [8 * 2**20]),
    ]
    size = LONG + 10
    specs = [
        policy_spec(max_position_embeddings=size),
        sampler_spec(size, prefix_cache=True, scratch_bytes=8 * CACHE_BYTES),
    ]
    async with (
        running_mesh(MeshConfig(nodes=nodes), short_dir) as (mesh, log),
        tenant(mesh) as connection,
    ):
        job = await connection.submit_job("rolling", specs)
        whole = await job.deployment("sampler").generate(PROMPTS, SAMPLING, NUM_SAMPLES)
        expected = [sample for group in whole.sequences for sample in group]
        num_prompts = sum(len(list(prompt.tokens)) for prompt in PROMPTS)
        num_samples = len(PROMPTS) * NUM_SAMPLES
        # The cache has the prompts before the first update, and where samples that went on were
        # prefilled with the present weights.
        for keeps_kv, begun in ((True, len(PROMPTS)), (False, num_prompts), (True, len(PROMPTS))):
            result = await interrupted(job, keeps_kv=keeps_kv)
            samples = [sample for group in result.sequences for sample in group]
            assert [int32s(s.tokens) for s in samples] == [int32s(s.tokens) for s in expected]
            for mine, theirs in zip(samples, expected, strict=True):
                assert list(float32s(mine.logprobs)) == pytest.approx(
                    list(float32s(theirs.logprobs)), abs=LOGPROB_ERROR
                )
            old = [runs[0].num_tokens for group in result.versions for runs in group]
            rest = sum(old) + NUM_SAMPLES * num_prompts
            rerun = num_samples if keeps_kv else rest
            assert result.metrics["prefilled_tokens:sum"] == begun + rerun
        await interrupted(job, keeps_kv=True, after_a_step=True)
        await job.finish()
        await check_refused(connection)
        await log.caught_up()
        failures = [f for f in log.failures() if f.key.job == "rolling"]
        assert [f for f in failures if f.outcome is not Outcome.CANCELLED] == []
