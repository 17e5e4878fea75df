"""Upgrades of a scheduler snapshot from an older core version to this one, one version at a time.

A scheduler that stops in order leaves a snapshot of all that it knows and has sent. A core of a
later version continues from that snapshot and folds only later events, by its own rules. Before
that, the stored state must get the shape that the later version expects. The functions in
`UPGRADES` do this.

A change that raises `CORE_VERSION` must add the line for the version before. Use `unchanged` if the
new version only adds fields whose defaults are right for running jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phaseloom.common.contract.ids import OperationKey
from phaseloom.scheduler.core.state.job import run_name

Tree = dict[str, Any]
"""The state as plain MessagePack values: mappings, lists, numbers, text."""
Upgrade = Callable[[Tree], None]
"""Changes a tree of one core version, in place, to the shape of the next version."""


def unchanged(tree: Tree) -> None:
    """Change nothing: the next version can read this version's tree."""


def _name_readers(tree: Tree) -> None:
    """Version 2 keeps the readers of a named version by their text forms."""
    for job in tree["jobs"].values():
        for named in job["versions"]["named"].values():
            keys = [OperationKey(**key) for key in named["readers"]]
            named["readers"] = {str(key): key.deployment_name for key in keys}


def _name_runs(tree: Tree) -> None:
    """Version 3 names the runs of jobs, and counts incarnations from the job's first one."""
    for job in tree["jobs"].values():
        job["run"] = run_name(job["submitted_s"])
    for deployment in tree["deployments"].values():
        deployment["wpg"]["first_incarnation"] = 1


UPGRADES: Mapping[int, Upgrade] = {1: _name_readers, 2: _name_runs}
"""Core version → the upgrade of its tree to the next version."""


def upgrade(tree: Tree, core_version: int, to: int, table: Mapping[int, Upgrade]) -> bool:
    """Upgrade a tree from one core version to a later one, in place.

    Returns: False if the table has no path between the two versions; the tree is then unchanged.
    """
    versions = range(core_version, to)
    if core_version >= to or any(version not in table for version in versions):
        return False
    for version in versions:
        table[version](tree)
    return True
