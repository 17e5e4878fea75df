"""Registered models: looks up the name in a job's `ModelSpec` and pins the model in the job's spec.

The pinned files enter the decision log with the job. A replay therefore decides the same, and
removing or replacing a registered model does not affect jobs that were already submitted.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from phaseloom.common.contract.codec import decode
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import check_name
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec, RegisteredModel
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus

ModelOf = Callable[[str], Awaitable[RegisteredModel | None]]
"""Look up a registered model by name. None: there is none."""

_DTYPE = ("dtype", "torch_dtype")
"""Keys for the dtype of the model's files. Ranks may use another."""


def models_on(bus: Bus) -> ModelOf:
    """Return a lookup in the bus's bucket of models."""

    async def model_of(name: str) -> RegisteredModel | None:
        stored = await bus.keys.get(Bucket.MODELS, name)
        if stored is None:
            return None
        model: RegisteredModel = decode(stored.payload, RegisteredModel)
        return model

    return model_of


async def pin_job(spec: JobSpec, model_of: ModelOf, field: str) -> JobSpec:
    """Pin the registered models of all deployments of a job. Raises: like `pin_deployment`."""
    pinned = [
        await pin_deployment(deployment, model_of, f"{field}.deployments[{index}]")
        for index, deployment in enumerate(spec.deployments)
    ]
    return replace(spec, deployments=pinned)


async def pin_deployment(spec: DeploymentSpec, model_of: ModelOf, field: str) -> DeploymentSpec:
    """Replace the name of a registered model by its config and files. Other specs stay unchanged.

    Raises: CallerError: NOT_FOUND: no model has the name. INVALID_ARGUMENT: the caller pinned files
        itself, or gave a config that differs from the model's.
    """
    model, field = spec.model, f"{field}.model"
    if model.pinned is not None:
        raise CallerError(
            "a controller cannot name files of a node",
            field=f"{field}.pinned",
            remedy="leave it out; name a model that the operator has registered",
        )
    if model.adapter is not None:
        _check_adapter(model, field)
    if not model.registered:
        return spec
    check_name(model.registered, f"{field}.registered")
    registered = await model_of(model.registered)
    if registered is None:
        raise CallerError(
            f"there is no registered model {model.registered!r}",
            code=Code.NOT_FOUND,
            field=f"{field}.registered",
            remedy="see `phaseloom model list`; the operator adds one with `phaseloom model add`",
        )
    return replace(spec, model=_pinned(model, registered, field))


def _pinned(model: ModelSpec, registered: RegisteredModel, field: str) -> ModelSpec:
    config = {key: value for key, value in registered.config.items() if key not in _DTYPE}
    for key, value in model.config.items():
        if key not in _DTYPE and (key not in config or config[key] != value):
            raise CallerError(
                f"the registered model {registered.name!r} has another {key!r} than {value!r}",
                field=f"{field}.config.{key}",
                remedy="leave the config out; with a registered model it can only give `dtype`",
            )
    return replace(model, config=config | model.config, pinned=registered.directory)


def _check_adapter(model: ModelSpec, field: str) -> None:
    adapter = model.adapter
    assert adapter is not None
    if not model.registered:
        raise CallerError(
            "an adapter needs a base, whose weights all of its jobs share",
            field=f"{field}.adapter",
            remedy="name a registered model, or leave the adapter out",
        )
    if adapter.rank < 1:
        raise CallerError(
            f"a rank of {adapter.rank} is none",
            field=f"{field}.adapter.rank",
            remedy="use 1 or more, or leave the adapter out to train all weights",
        )
    if not (math.isfinite(adapter.alpha) and adapter.alpha > 0):
        raise CallerError(
            f"{adapter.alpha} is no scale",
            field=f"{field}.adapter.alpha",
            remedy="use a positive number, as the rank or twice that",
        )
    if not adapter.targets or len({*adapter.targets}) < len(adapter.targets):
        raise CallerError(
            "the layers are none, or one is named twice",
            field=f"{field}.adapter.targets",
            remedy="name linear layers by the last parts of their names, as q_proj",
        )
