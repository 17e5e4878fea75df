"""The upgrades of a snapshot from an older core version to this one, a version at a time.

A snapshot from which nobody has gone on is all that its scheduler knew, and all that it has sent. A
core of another version goes on from there: it folds later events only, by its own rules. Before
that it has to give the tree its own shape.

Whoever raises `CORE_VERSION` adds the line of the version before. A tree that only has new fields,
each with a default that is right for jobs that run, is `unchanged`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tree = dict[str, Any]
"""The state as plain MessagePack: mappings, lists, numbers, text."""
Upgrade = Callable[[Tree], None]
"""Changes a tree of one version, in place, to what the next version would have."""

OLDEST = 12
"""The oldest core version whose snapshots are taken over."""


def unchanged(tree: Tree) -> None:
    """Change nothing: the next version reads this version's tree as it is."""


def with_lags(tree: Tree) -> None:
    """Note for each member that what has kept its job from running lies before its next iteration.

    Version 14 measures iterations.
    """
    for group in tree["cluster"]["groups"].values():
        for name, member in group["members"].items():
            if name in tree["jobs"]:
                member["lag_s"] = tree["jobs"][name]["progress"]["lag_s"]


def without_bounds(tree: Tree) -> None:
    """Forget what the members of each group leave to one more: version 15 knows more of it."""
    for group in tree["cluster"]["groups"].values():
        group["bounds"] = None


def with_exclusive(tree: Tree) -> None:
    """Note for each member whether its job asks to be alone: version 17 places jobs by the company
    that they may have."""
    cluster = tree["cluster"]
    members = [each for group in cluster["groups"].values() for each in group["members"].values()]
    for member in [*members, *cluster["waiting"]]:
        job = tree["jobs"].get(member["job"])
        if job is not None:
            member["is_exclusive"] = job["spec"].get("exclusive", False)


UPGRADES: Mapping[int, Upgrade] = {
    12: unchanged,
    13: with_lags,
    14: without_bounds,
    15: unchanged,
    16: with_exclusive,
    17: unchanged,
    18: unchanged,
}
"""Core version → the upgrade of its tree to the next version."""


def upgrade(tree: Tree, core_version: int, to: int, table: Mapping[int, Upgrade]) -> bool:
    """Upgrade a tree from one core version to a later one, in place.

    Returns: False where the table has no way from one to the other; the tree is as it was.
    """
    versions = range(core_version, to)
    if core_version >= to or any(version not in table for version in versions):
        return False
    for version in versions:
        table[version](tree)
    return True
