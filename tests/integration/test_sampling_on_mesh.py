"""Parameters of `generate` from the client to the sampler and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from phaseloom import client
from phaseloom.cli.meshconfig import MeshConfig, NodeConfig
from tests.support.jobs import running_mesh, tenant
from tests.support.node import sampler_spec
from tests.support.tinymodel import VOCAB

MESH = MeshConfig(nodes=[NodeConfig("rollout-0", "rollout", [8 * 2**20])])
SHAPED = client.SamplingParams(
    8,
    temperature=0.8,
    top_k=10,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    bad_words=[[7], [3, 4]],
    top_logprobs=3,
)
PROMPTS = [client.Prompt([1, 2, 3], 5), client.Prompt([4], 6)]


async def test_parameters_reach_the_sampler_and_wrong_ones_are_refused(short_dir: Path) -> None:
    async with running_mesh(MESH, short_dir) as (mesh, log), tenant(mesh) as connection:
        job = await connection.submit_job("a", [sampler_spec()])
        sampler = job.deployment("sampler")
        first = await sampler.generate(PROMPTS, SHAPED, num_samples=3)
        assert await sampler.generate(PROMPTS, SHAPED, num_samples=3) == first
        for sample in (sample for group in first.sequences for sample in group):
            tokens = client.int32s(sample.tokens)
            assert 7 not in tokens
            top, of_top = client.int32s(sample.top_tokens), client.float32s(sample.top_logprobs)
            assert len(top) == len(of_top) == 3 * len(tokens)
            # What is drawn from among the ten likeliest is no likelier than the likeliest.
            for position, logprob in enumerate(client.float32s(sample.logprobs)):
                assert of_top[3 * position] >= logprob
        plain = await sampler.generate(PROMPTS, client.SamplingParams(8), num_samples=3)
        assert plain != first
        for changes, field in (
            ({"top_p": 0.0}, "args.sampling.top_p"),
            ({"bad_words": [[VOCAB]]}, "args.sampling.bad_words[0]"),
        ):
            with pytest.raises(client.CallerError) as raised:
                await sampler.generate(PROMPTS, replace(SHAPED, **changes))
            assert raised.value.info.field == field
        await log.caught_up()
