"""What a job may be: checked before it enters the log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from phaseloom.common.contract.api import CreateDeployment, SubmitJob
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.specs import (
    Cycle,
    DeploymentSpec,
    JobSpec,
    Layout,
    ModelSpec,
    Segment,
)
from phaseloom.scheduler.api import MAX_SPEC_BYTES, check_deployment, check_job

SOUND = DeploymentSpec("policy", "train", "fsdp", ModelSpec({}), trainable=True)


def job(*deployments: DeploymentSpec, slo: float = 0.0) -> SubmitJob:
    return SubmitJob("a", JobSpec(slo=slo, deployments=list(deployments)))


def spread(**axes: int) -> DeploymentSpec:
    return msgspec.structs.replace(SOUND, layout=Layout(**axes))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (job(), "spec.deployments"),
        (job(SOUND, SOUND), "spec.deployments"),
        (job(SOUND, slo=0.5), "spec.slo"),
        (job(msgspec.structs.replace(SOUND, pool="a.b")), "spec.deployments[0].pool"),
        (job(spread(dp=0)), "spec.deployments[0].layout.dp"),
        (job(spread(tp=-1)), "spec.deployments[0].layout.tp"),
        (
            job(msgspec.structs.replace(spread(dp=3), num_nodes=2)),
            "spec.deployments[0].num_nodes",
        ),
        (
            job(msgspec.structs.replace(SOUND, num_nodes=0)),
            "spec.deployments[0].num_nodes",
        ),
        (job(msgspec.structs.replace(SOUND, host_bytes=-1)), "spec.deployments[0].host_bytes"),
    ],
    ids=[
        *["empty", "same name", "slo", "pool", "dp", "no tp", "nodes", "no node"],
        "memory",
    ],
)
def test_job_that_cannot_be_is_refused_and_the_field_named(request_: SubmitJob, field: str) -> None:
    with pytest.raises(CallerError) as caught:
        check_job(request_)
    assert caught.value.info.code is Code.INVALID_ARGUMENT
    assert caught.value.info.field == field


SEGMENTS = [Segment("train", 0.0, 4.0, 6.0), Segment("train", 6.0, 4.0)]


def cycling(period_s: float = 10.0, duration_s: float = 0.0, **segment: Any) -> SubmitJob:
    """Args: segment: what is otherwise in the second of its segments."""
    segments = [SEGMENTS[0], msgspec.structs.replace(SEGMENTS[1], **segment)]
    spec = JobSpec(deployments=[SOUND], cycle=Cycle(period_s, segments), duration_s=duration_s)
    return SubmitJob("a", spec)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (cycling(0.0), "spec.cycle.period_s"),
        (cycling(float("nan")), "spec.cycle.period_s"),
        (cycling(float("inf")), "spec.cycle.period_s"),
        (
            SubmitJob("a", JobSpec(deployments=[SOUND], cycle=Cycle(10.0, SEGMENTS, 0))),
            "spec.cycle.num_optim_steps",
        ),
        (cycling(duration_s=-1.0), "spec.duration_s"),
        (cycling(duration_s=float("inf")), "spec.duration_s"),
        (cycling(pool="rollout"), "spec.cycle.segments[1].pool"),
        (cycling(duration_s=0.0, offset_s=7.0), "spec.cycle.segments[1].offset_s"),
        (cycling(offset_s=-1.0), "spec.cycle.segments[1].offset_s"),
        (cycling(offset_s=float("nan")), "spec.cycle.segments[1].offset_s"),
        (cycling(worst_s=3.0), "spec.cycle.segments[1].worst_s"),
        (cycling(worst_s=float("inf")), "spec.cycle.segments[1].worst_s"),
    ],
)
def test_cycle_that_cannot_be_is_refused_and_the_field_named(
    request_: SubmitJob, field: str
) -> None:
    with pytest.raises(CallerError) as caught:
        check_job(request_)
    assert caught.value.info.field == field
    assert caught.value.info.remedy


@pytest.mark.parametrize(
    ("segments", "field"),
    [
        ([], "spec.cycle.segments"),
        ([Segment("train", 0.0, 0.0)], "spec.cycle.segments[0].duration_s"),
    ],
)
def test_cycle_that_uses_nothing_is_refused(segments: list[Segment], field: str) -> None:
    request = SubmitJob("a", JobSpec(deployments=[SOUND], cycle=Cycle(10.0, segments)))
    with pytest.raises(CallerError) as caught:
        check_job(request)
    assert caught.value.info.field == field


def test_deployment_is_checked_as_in_a_submission() -> None:
    texts = ["x" * 100] * (MAX_SPEC_BYTES // 200)
    large = msgspec.structs.replace(SOUND, model=ModelSpec({}, token_texts=texts))
    refusals = (
        (spread(tp=0), Code.INVALID_ARGUMENT, "spec.layout.tp"),
        (msgspec.structs.replace(SOUND, name="a.b"), Code.INVALID_ARGUMENT, "spec.name"),
        (large, Code.RESOURCE_EXHAUSTED, "spec"),
    )
    for spec, code, field in refusals:
        with pytest.raises(CallerError) as caught:
            check_deployment(CreateDeployment("a", spec), JobSpec(deployments=[large]))
        assert (caught.value.info.code, caught.value.info.field) == (code, field)
    check_deployment(CreateDeployment("a", large), JobSpec(deployments=[SOUND]))


def test_job_whose_spec_is_too_large_is_refused_with_the_numbers() -> None:
    texts = ["x" * 100] * (MAX_SPEC_BYTES // 100)
    large = msgspec.structs.replace(SOUND, model=ModelSpec({}, token_texts=texts))
    with pytest.raises(CallerError, match=str(MAX_SPEC_BYTES)) as caught:
        check_job(job(large))
    assert caught.value.info.code is Code.RESOURCE_EXHAUSTED


def test_config_that_a_decoder_may_refuse_gets_into_no_log() -> None:
    """Once in it, it would end every scheduler that reads it."""
    nested: dict[str, Any] = {}
    for _ in range(100):
        nested = {"x": [nested]}
    for config, field in (
        (nested, "spec.deployments[0].model.config"),
        ({"x": 10**30}, "spec"),
    ):
        with pytest.raises(CallerError) as caught:
            check_job(job(msgspec.structs.replace(SOUND, model=ModelSpec(config))))
        assert caught.value.info.field == field


@pytest.mark.parametrize(
    ("size", "value"),
    [("num_hidden_layers", 0), ("num_key_value_heads", 0), ("vocab_size", -1), ("head_dim", 0)],
)
def test_model_without_a_size_is_refused_and_the_size_named(size: str, value: int) -> None:
    """It was `INTERNAL`, an error of a runtime that met it."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": None, size: value}
    with pytest.raises(CallerError, match=f"{size} must be .* from 1 to .*, got {value}") as caught:
        check_job(job(msgspec.structs.replace(SOUND, model=ModelSpec(sizes))))
    assert caught.value.info.field == f"spec.deployments[0].model.config.{size}"


def test_model_whose_heads_do_not_divide_is_refused() -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 2}
    with pytest.raises(CallerError, match="by 3 attention heads") as caught:
        check_job(job(msgspec.structs.replace(SOUND, model=ModelSpec(sizes))))
    assert caught.value.info.field == "spec.deployments[0].model.config.num_key_value_heads"


def test_sound_jobs_are_taken() -> None:
    check_job(job(SOUND))
    check_job(job(spread(dp=2), slo=1.5))
    check_job(job(msgspec.structs.replace(spread(dp=4), num_nodes=2)))
    check_job(cycling(duration_s=3600.0))
