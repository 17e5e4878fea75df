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
from phaseloom.common.contract.ids import check_model_name, to_token
from phaseloom.common.contract.specs import DeploymentSpec, JobSpec, ModelSpec, RegisteredModel
from phaseloom.common.contract.streams import Bucket
from phaseloom.common.transport.bus import Bus

ModelOf = Callable[[str], Awaitable[RegisteredModel | None]]
"""Look up a registered model by name. None: there is none."""

_MAX_RANK = 2**14
_MAX_TARGETS = 64
_DTYPE = ("dtype", "torch_dtype")
"""Keys for the dtype of the model's files. Ranks may use another."""


def models_on(bus: Bus) -> ModelOf:
    """Return a lookup in the bus's bucket of models."""

    async def model_of(name: str) -> RegisteredModel | None:
        stored = await bus.keys.get(Bucket.MODELS, to_token(name))
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
            "`pinned` is set by the scheduler, not by controllers",
            field=f"{field}.pinned",
            remedy="omit it, and name a model that the operator has registered",
        )
    if model.adapter is not None:
        _check_adapter(model, field)
    if not model.registered:
        return spec
    check_model_name(model.registered, f"{field}.registered")
    registered = await model_of(model.registered)
    if registered is None:
        raise CallerError(
            f"model {model.registered!r} is not registered",
            code=Code.NOT_FOUND,
            field=f"{field}.registered",
            remedy="see `phaseloom model list`; an operator can add it with `phaseloom model add`",
        )
    return replace(spec, model=_pinned(model, registered, field))


def _pinned(model: ModelSpec, registered: RegisteredModel, field: str) -> ModelSpec:
    config = {key: value for key, value in registered.config.items() if key not in _DTYPE}
    for key, value in model.config.items():
        if key not in _DTYPE and (key not in config or config[key] != value):
            raise CallerError(
                f"{key!r} = {value!r} differs from the registered model {registered.name!r}",
                field=f"{field}.config.{key}",
                remedy="omit the config; for a registered model it may only set `dtype`",
            )
    return replace(model, config=config | model.config, pinned=registered.directory)


def _check_adapter(model: ModelSpec, field: str) -> None:
    adapter = model.adapter
    assert adapter is not None
    if not model.registered:
        raise CallerError(
            "an adapter needs a registered base model, whose weights its jobs share",
            field=f"{field}.adapter",
            remedy="name a registered model, or omit the adapter",
        )
    if not 1 <= adapter.rank <= _MAX_RANK:
        raise CallerError(
            f"rank must be from 1 to {_MAX_RANK}, got {adapter.rank}",
            field=f"{field}.adapter.rank",
            remedy="use a rank in this range, or omit the adapter to train all weights",
        )
    if not (math.isfinite(adapter.alpha) and adapter.alpha > 0):
        raise CallerError(
            f"alpha must be finite and greater than 0, got {adapter.alpha}",
            field=f"{field}.adapter.alpha",
            remedy="use the rank or twice the rank, for example",
        )
    is_repeated = len({*adapter.targets}) < len(adapter.targets)
    if not 1 <= len(adapter.targets) <= _MAX_TARGETS or is_repeated:
        raise CallerError(
            f"targets must name 1 to {_MAX_TARGETS} layers, and each layer once",
            field=f"{field}.adapter.targets",
            remedy="name linear layers by the last part of their names, for example q_proj",
        )
