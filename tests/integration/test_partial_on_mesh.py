"""A controller's `generate` on the whole mesh: others join it, and it is stopped and goes on."""

from __future__ import annotations

from pathlib import Path

from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from phaseloom.client import (
    Batching,
    GenerateResult,
    Prompt,
    SamplingParams,
    Sequence,
    continued,
    int32s,
)
from tests.support.jobs import running_mesh, tenant
from tests.support.node import sampler_spec

LONG = 20_000
"""New tokens: far longer than the short ones take; two such rows fit the sampler's cache."""
PROMPT = Prompt([1, 2, 3], seed=5)
MESH = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * 2**20])])


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, ignore_eos=True)


async def test_short_generate_joins_a_long_one_which_is_stopped_and_goes_on(
    short_dir: Path,
) -> None:
    spec = sampler_spec(positions=LONG + 10, batching=Batching.SHARED)
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("partial", [spec])
        sampler = job.deployment(spec.name)
        long = sampler.generate([PROMPT], _sampling(LONG))
        for seed in range(3):
            await sampler.generate([Prompt([4, 5], seed)], _sampling(3))
        assert not long.done()
        await long.stop()
        first = _only(await long)
        assert first.stop_reason == "partial"
        num_tokens = len(int32s(first.tokens))
        assert 0 < num_tokens < LONG
        more = _sampling(num_tokens + 5)
        rest = _only(await sampler.generate([continued(PROMPT, first)], more))
        whole = _only(await sampler.generate([PROMPT], more))
        assert int32s(first.tokens) + int32s(rest.tokens) == int32s(whole.tokens)
        await job.finish()
        await log.caught_up()
        assert log.failures() == []


def _only(result: GenerateResult) -> Sequence:
    ((sequence,),) = result.sequences
    return sequence
