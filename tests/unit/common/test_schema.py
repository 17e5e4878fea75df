"""The contract's documents say what the contract is."""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec
import pytest

from phaseloom.common.contract import agents, api, commands, events, operations, specs
from phaseloom.common.contract.codec import Message
from phaseloom.common.contract.commands import NodeCommand
from phaseloom.common.contract.specs import SchedulerConfig, SchedulerSettings
from tests.support import schema

BASES = {Message, NodeCommand, SchedulerSettings}


@pytest.mark.parametrize("name", schema.DOCUMENTS)
def test_document_is_up_to_date(name: str) -> None:
    made = schema.render(schema.DOCUMENTS[name]())
    assert (schema.DIRECTORY / name).read_text() == made, "run python -m tests.support.schema"


def test_every_type_of_the_contract_is_described() -> None:
    kinds = {
        kind.__name__
        for edge in (agents, api, commands, events, operations, specs)
        for _, kind in inspect.getmembers(edge, inspect.isclass)
        if issubclass(kind, msgspec.Struct)
        and kind.__module__ == edge.__name__
        and kind not in BASES
    }
    assert kinds - set(schema.json_schema()["$defs"]) == set()
    assert SchedulerConfig.__name__ in kinds


def test_references_lead_somewhere() -> None:
    for make in schema.DOCUMENTS.values():
        document = make()
        for reference in _references(document):
            _follow(document, reference)


def test_subjects_of_the_documents_are_those_of_the_streams() -> None:
    addresses = {c.name: c.address for c in schema.channels()}
    assert addresses["operation"] == "pl.v1.op.{tenant}.{job}.{deployment}.{slot}"
    assert addresses["sched.queued"] == "pl.v1.sched.queued"
    assert len(set(addresses.values())) == len(addresses)


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [r for value in node.values() for r in _references(value)]
    if isinstance(node, list):
        return [r for value in node for r in _references(value)]
    return []


def _follow(document: Any, reference: str) -> None:
    """Raises: KeyError: it leads nowhere."""
    node = json.loads(json.dumps(document))
    for part in reference.removeprefix("#/").split("/"):
        node = node[part.replace("~1", "/").replace("~0", "~")]
