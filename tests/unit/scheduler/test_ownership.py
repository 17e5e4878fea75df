"""Each record of the scheduler's state is changed in one module, its owner."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

import phaseloom.scheduler.core
from phaseloom.scheduler.core.state.activation import Activation
from phaseloom.scheduler.core.state.deployment import Deployment
from phaseloom.scheduler.core.state.durability import Copying, DeploymentDurability
from phaseloom.scheduler.core.state.job import (
    Controller,
    EarlierDeployments,
    Job,
    JobVersions,
    Progress,
    Speculation,
)
from phaseloom.scheduler.core.state.move import Move, Relocation
from phaseloom.scheduler.core.state.node import Expected, Leave, Node, Slot
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.queue import OperationQueue
from phaseloom.scheduler.core.state.tree import State
from phaseloom.scheduler.core.state.wpg import Wpg

CORE = Path(phaseloom.scheduler.core.__file__).parent

RECORDS: list[tuple[type[msgspec.Struct], str, set[str]]] = [
    (Job, "state/job.py", {"job", "old"}),
    (Controller, "state/job.py", {"controller"}),
    (JobVersions, "state/job.py", {"versions"}),
    (EarlierDeployments, "state/job.py", {"earlier"}),
    (Speculation, "state/job.py", {"speculation"}),
    (Progress, "state/job.py", {"progress"}),
    (Op, "state/operation.py", {"op"}),
    (Deployment, "state/deployment.py", {"deployment", "other", "victim", "policy"}),
    (OperationQueue, "state/queue.py", {"queue"}),
    (Wpg, "state/wpg.py", {"wpg"}),
    (Activation, "state/activation.py", {"activation"}),
    (DeploymentDurability, "state/durability.py", {"durability"}),
    (Copying, "state/durability.py", {"copying", "before"}),
    (Move, "state/move.py", {"move"}),
    (Relocation, "state/move.py", {"relocation", "move"}),
    (Node, "state/node.py", {"node", "old", "place"}),
    (Slot, "devices/devices.py", {"slot", "other"}),
    (Leave, "state/node.py", {"leave", "known"}),
    (Expected, "state/node.py", {"expected", "prediction"}),
    (State, "state/tree.py", {"state"}),
]
"""Each record, its owner, and the names that its instances have elsewhere."""

CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
CHANGING |= {"setdefault", "sort", "reverse", "update"}

CACHES = {
    "planning/weave/fifo.py": "the iteration times of jobs that share nodes first in, first out",
    "planning/weave/period.py": "the greatest cycle mean of a lap",
    "state/deployment.py": "the text forms of a deployment's keys",
}
"""Every module of the core that keeps what it could compute anew, and what that is."""
CACHING = {"cache", "cached_property", "lru_cache", "__dict__"}


def changed(tree: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    """Everything that a module assigns to, deletes, or calls a changing method of."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=found) | ast.Delete(targets=found):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                found = [target]
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in CHANGING:
                found = [owner]
            case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if "insort" in name:
                found = [first]
            case _:
                continue
        for whole in found:
            inner = whole.elts if isinstance(whole, ast.Tuple | ast.List) else [whole]
            for expression in inner:
                yield node.lineno, unsubscripted(expression)


def unsubscripted(expression: ast.expr) -> ast.expr:
    while isinstance(expression, ast.Subscript):
        expression = expression.value
    return expression


def last_name(expression: ast.expr) -> str:
    match unsubscripted(expression):
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


@cache
def trees() -> list[tuple[str, ast.Module]]:
    files = sorted(CORE.rglob("*.py"))
    return [(file.relative_to(CORE).as_posix(), ast.parse(file.read_text())) for file in files]


@pytest.mark.parametrize(
    ("record", "owner", "names"), RECORDS, ids=[r.__name__ for r, _, _ in RECORDS]
)
def test_record_is_changed_by_its_owner_only(
    record: type[msgspec.Struct], owner: str, names: set[str]
) -> None:
    fields = set(record.__struct_fields__)
    others = [
        f"{module}:{line}: {ast.unparse(target)}"
        for module, tree in trees()
        if module != owner
        for line, target in changed(tree)
        if isinstance(target, ast.Attribute)
        and target.attr in fields
        and last_name(target.value) in names
    ]
    assert others == [], f"{record.__name__} is changed outside {owner}"


@pytest.mark.parametrize("entity", [Deployment, Job])
def test_every_record_has_an_owner(entity: type[msgspec.Struct]) -> None:
    owned = {record for record, _, _ in RECORDS}
    nested = {
        field.type
        for field in msgspec.structs.fields(entity)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        if not field.type.__struct_config__.frozen
    }
    assert nested <= owned
    assert nested, f"{entity.__name__} has records"


def test_no_property_changes_anything() -> None:
    found = [
        f"{module}:{line}: {ast.unparse(target)}"
        for module, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        for line, target in changed(node)
        if isinstance(target, ast.Attribute)
    ]
    assert found == []


def test_caches_are_the_declared_ones() -> None:
    found = {
        module
        for module, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) in CACHING
    }
    assert found == set(CACHES)
