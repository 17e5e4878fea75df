"""The scheduler's policies, as a command line names them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from phaseloom.cli.supervisor import MeshConfig
from phaseloom.common.contract.errors import CallerError
from phaseloom.scheduler.core import ordering as ordering_policies
from phaseloom.scheduler.core import placement as placement_policies


def with_policies(settings: MeshConfig, placement: str | None, ordering: str | None) -> MeshConfig:
    """The settings with these policies, where given.

    Raises: CallerError: there is none of that name; names those that there are.
    """
    settings = replace(
        settings,
        placement=placement or settings.placement,
        ordering=ordering or settings.ordering,
    )
    _check(settings.placement, placement_policies.POLICIES, "placement")
    _check(settings.ordering, ordering_policies.POLICIES, "ordering")
    return settings


def _check(name: str, known: Iterable[str], field: str) -> None:
    if name not in known:
        raise CallerError(
            f"{name!r} is no {field} policy",
            field=field,
            remedy=f"choose one of: {', '.join(sorted(known))}",
        )
