"""Each field of the scheduler's records is written by one module, its owner."""

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
from phaseloom.scheduler.core.state.node import Expected, Leave, Node, Pace, Share, Slot
from phaseloom.scheduler.core.state.observed import Observed
from phaseloom.scheduler.core.state.operation import Op
from phaseloom.scheduler.core.state.queue import OperationQueue
from phaseloom.scheduler.core.state.tree import State
from phaseloom.scheduler.core.state.wpg import Wpg

CORE = Path(phaseloom.scheduler.core.__file__).parent

RECORDS: dict[type[msgspec.Struct], set[str]] = {
    Job: {"job", "old"},
    Controller: {"controller"},
    JobVersions: {"versions"},
    EarlierDeployments: {"earlier"},
    Speculation: {"speculation"},
    Progress: {"progress"},
    Op: {"op"},
    Deployment: {"deployment", "other", "victim", "policy"},
    OperationQueue: {"queue"},
    Wpg: {"wpg"},
    Activation: {"activation"},
    DeploymentDurability: {"durability"},
    Copying: {"copying", "before"},
    Move: {"move"},
    Relocation: {"relocation", "move"},
    Node: {"node", "old", "place"},
    Slot: {"slot", "other"},
    Share: {"share"},
    Pace: {"pace"},
    Observed: {"observed", "found"},
    Leave: {"leave", "known"},
    Expected: {"expected", "prediction"},
    State: {"state"},
}
"""Each record, and the names that its instances have outside its own methods."""

CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
CHANGING |= {"setdefault", "sort", "reverse", "update"}

CACHES = {
    "planning/chains.py": "what is left of a chain from each of its stages on",
    "planning/timeline.py": "the slots of the ring in which a cycle is busy",
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


def written(record: type[msgspec.Struct], names: set[str]) -> dict[str, set[str]]:
    """The modules that write each field of a record, by its methods or through its names."""
    own = record.__module__.removeprefix(f"{phaseloom.scheduler.core.__name__}.").replace(".", "/")
    writers: dict[str, set[str]] = {}
    for module, tree in trees():
        body: ast.AST = tree
        known = names
        if module == f"{own}.py":
            found = (n for n in tree.body if isinstance(n, ast.ClassDef))
            body = next(n for n in found if n.name == record.__name__)
            known = {"self"}
        for _, target in changed(body):
            if isinstance(target, ast.Attribute) and last_name(target.value) in known:
                writers.setdefault(target.attr, set()).add(module)
    return {name: writers[name] for name in record.__struct_fields__ if name in writers}


@pytest.mark.parametrize(("record", "names"), RECORDS.items(), ids=[r.__name__ for r in RECORDS])
def test_field_is_written_by_one_module_only(record: type[msgspec.Struct], names: set[str]) -> None:
    found = written(record, names)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_writers_are_found() -> None:
    """One of a record's own methods, one elsewhere; without them the test above could not fail."""
    assert written(Op, RECORDS[Op])["state"] == {"state/step.py"}
    assert written(Activation, RECORDS[Activation])["epoch"] == {"state/activation.py"}
    assert written(Slot, RECORDS[Slot])["resident"] == {"devices/devices.py"}


@pytest.mark.parametrize("entity", [Deployment, Job])
def test_every_record_has_its_names(entity: type[msgspec.Struct]) -> None:
    nested = {
        field.type
        for field in msgspec.structs.fields(entity)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        if not field.type.__struct_config__.frozen
    }
    assert nested <= set(RECORDS)
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
