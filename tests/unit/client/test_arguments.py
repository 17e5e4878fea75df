"""Arguments of wrong types: every public function refuses them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from phaseloom.client import (
    AdamParams,
    After,
    CallerError,
    Deployment,
    DeploymentSpec,
    Job,
    Mesh,
    MeshJob,
    ModelSpec,
    OperationHandle,
    Prompt,
    SamplingParams,
    connect,
)
from phaseloom.client.arguments import check_type
from phaseloom.common.contract.operations import OptimStep

ADAM = AdamParams(learning_rate=1e-4)
SOUND = {
    "prompts": [Prompt([1])],
    "batch": [],
    "sampling": SamplingParams(4),
    "loss": "ppo",
    "adam": ADAM,
    "published": OperationHandle([], lambda results: results, None),  # type: ignore[arg-type]
    "operation": OperationHandle([], lambda results: results, None),  # type: ignore[arg-type]
    "name": "first",
    "deployment": "policy",
    "job": "mine",
    "pool": "train",
    "seq": 1,
    "id": "a",
    "args": OptimStep(ADAM),
    "deployments": [],
    "spec": DeploymentSpec("policy", "train", "noop", ModelSpec({})),
    "ttl_s": 1.0,
    "values": {"reward": 0.5},
}
"""A sound value of each parameter that must be given."""
BETWEEN_OUR_OWN = {"request", "report"}
OF_ANY_TYPE = {"hook"}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "connect", connect
    for kind in (Deployment, Job, Mesh, MeshJob):
        for name, function in vars(kind).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                yield f"{kind.__name__}.{name}", function


def cases() -> Iterator[Any]:
    for name, function in functions():
        for parameter in inspect.signature(function).parameters:
            if parameter not in {"self", *BETWEEN_OUR_OWN, *OF_ANY_TYPE}:
                yield pytest.param(function, parameter, id=f"{name}-{parameter}")


@pytest.mark.parametrize(("function", "parameter"), [*cases()])
def test_argument_of_another_type_is_refused_by_its_name(
    function: Callable[..., Any], parameter: str
) -> None:
    """Before anything is done: there is not even a `self` here."""
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: SOUND[p.name] for p in parameters if p.default is p.empty and p.name in SOUND}
    given |= {"self": None} if "self" in inspect.signature(function).parameters else {}
    with pytest.raises(CallerError, match=r"expected .*, got object") as refused:
        function(**given | {parameter: object()})
    assert refused.value.info.field == parameter
    assert refused.value.info.remedy


@pytest.mark.parametrize(
    ("value", "hint", "field"),
    [
        ({"max_tokens": 4}, SamplingParams, "x"),
        (SamplingParams("4"), SamplingParams, "x.max_tokens"),  # type: ignore[arg-type]
        (SamplingParams(4, stop_strings="end"), SamplingParams, "x.stop_strings"),  # type: ignore[arg-type]
        (AdamParams("high"), AdamParams, "x.learning_rate"),  # type: ignore[arg-type]
        (AdamParams(None), AdamParams, "x.learning_rate"),  # type: ignore[arg-type]
        (
            DeploymentSpec("a", "train", "noop", {"config": {}}),  # type: ignore[arg-type]
            DeploymentSpec,
            "x.model",
        ),
        (
            DeploymentSpec("a", "train", "noop", ModelSpec({}), batching="all"),  # type: ignore[arg-type]
            DeploymentSpec,
            "x.batching",
        ),
        (True, int, "x"),
        (1, bool, "x"),
        (2.5, int, "x"),
        (np.zeros(2), float, "x"),
        ("policy", list[str], "x"),
    ],
)
def test_wrong_value_is_refused_and_the_field_named(value: Any, hint: Any, field: str) -> None:
    with pytest.raises(CallerError) as refused:
        check_type(value, hint, "x")
    assert refused.value.info.field == field


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.int64(3), int),
        (np.float32(0.5), float),
        (torch.tensor(0.5), float),
        (3, float),
        ((1, 2), list[int]),
        (bytearray(b"x"), bytes),
        (AdamParams(np.float32(0.5)), AdamParams),  # type: ignore[arg-type]
        (After("policy", 1), OperationHandle | After),
        (DeploymentSpec("a", "train", "noop", ModelSpec({}), batching="shared"), DeploymentSpec),  # type: ignore[arg-type]
    ],
)
def test_what_is_as_good_is_taken(value: Any, hint: Any) -> None:
    check_type(value, hint, "x")


def test_message_says_what_is_due() -> None:
    with pytest.raises(CallerError) as refused:
        Deployment.optim_step(None, ADAM, after=3)  # type: ignore[arg-type]
    assert refused.value.info.message == "expected a list of OperationHandle or After, got int"
