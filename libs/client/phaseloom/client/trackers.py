"""Sends what a job reports to an experiment tracker as well: TensorBoard, wandb or trackio.

Each is imported only if it is named; the extra `trackers` installs all three. Their own settings
apply, such as `WANDB_MODE=offline`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from phaseloom.common.contract.errors import CallerError, Code

Log = Callable[[int, Mapping[str, float]], None]
"""Receives a step and its values by name."""

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def tracker(target: str, name: str) -> Log:
    """Return a function for `MeshJob.report_to` that records under the run `name`.

    Args:   target: `tensorboard:DIRECTORY`, `wandb:PROJECT` or `trackio:PROJECT`.
    Raises: CallerError: the target names no tracker, or its package is missing.
    """
    kind, _, place = target.partition(":")
    if kind not in _PACKAGES or not place:
        raise CallerError(
            f"expected tensorboard:DIRECTORY, wandb:PROJECT or trackio:PROJECT, got {target!r}",
            field="target",
            remedy="name a tracker and where it records, such as tensorboard:runs/curves",
        )
    try:
        package: Any = import_module(_PACKAGES[kind])
    except ImportError as error:
        raise CallerError(
            f"{kind} needs the package {_PACKAGES[kind]}: {error}",
            code=Code.FAILED_PRECONDITION,
            field="target",
            remedy="pip install 'phaseloom[trackers]'",
        ) from error
    if kind == "tensorboard":
        writer = package.SummaryWriter(f"{place}/{name}")

        def write(step: int, values: Mapping[str, float]) -> None:
            for label, value in values.items():
                writer.add_scalar(label, value, step)
            writer.flush()

        return write
    run = package.init(project=place, name=name)
    return lambda step, values: run.log(dict(values), step=step)
