"""The message contract as documents: JSON Schema of every type, AsyncAPI of every subject.

    python -m tests.support.schema

writes `messages.schema.json` and `asyncapi.json` anew, from the structs alone: what a program in
another language generates its types from. Bytes are base64 in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from phaseloom.common.contract import api, streams
from phaseloom.common.contract.agents import NodeReply, NodeRequest
from phaseloom.common.contract.checkpoints import NodeCheckpointReply, NodeCheckpointRequest
from phaseloom.common.contract.commands import Command
from phaseloom.common.contract.events import Notice, SealRecord
from phaseloom.common.contract.operations import Completion, Operation, Progress
from phaseloom.common.contract.specs import RegisteredModel
from phaseloom.common.contract.state_agent import StatusReport

DIRECTORY = Path(__file__).parents[2] / "docs" / "contract"

VERSION = "1.0.0"
_REFERENCE = "#/$defs/{name}"
_API = {
    "job.submit": (api.SubmitJob, api.JobStatus),
    "job.status": (api.JobRequest, api.JobStatus),
    "job.finish": (api.JobRequest, api.JobStatus),
    "job.drain": (api.JobRequest, api.JobStatus),
    "deployment.create": (api.CreateDeployment, api.JobStatus),
    "deployment.delete": (api.DeploymentRequest, api.JobStatus),
    "session.attach": (api.JobRequest, api.Attached),
    "session.heartbeat": (api.Heartbeat, api.Beat),
    "job.report": (api.JobReport, api.Reported),
    "phase.declare": (api.PhaseRequest, api.JobStatus),
    "operation.cancel": (api.CancelRequest, api.Explanation),
    "operation.explain": (api.OperationRequest, api.Explanation),
    "result.get": (api.ResultRequest, api.ResultReply),
    "checkpoint.list": (api.ListCheckpoints, api.CheckpointList),
    "checkpoint.show": (api.CheckpointRequest, api.SavedCheckpoint),
    "checkpoint.delete": (api.CheckpointRequest, api.CheckpointDeleted),
    "checkpoint.expire": (api.ExpireCheckpoint, api.SavedCheckpoint),
    "checkpoint.archive": (api.ArchiveCheckpoint, api.OpenedArchive),
    "checkpoint.read": (api.ReadArchive, api.ArchivePart),
    "tenant.usage": (api.UsageRequest, api.Usage),
}
"""Call → (request, answer). An error is an `ApiError`."""
_NODE_API = {
    "drain": (api.DrainNode, api.NodeStatus),
    "status": (api.DrainNode, api.NodeStatus),
}
"""The calls of operators: name → (request, answer)."""


@dataclass(frozen=True)
class Channel:
    """A family of subjects, and the messages on it."""

    name: str
    address: str
    description: str
    kinds: tuple[type, ...]


def channels() -> list[Channel]:
    """The channels of a tenant's programs, then those between the services."""
    prefix = streams.PREFIX
    log: dict[str, list[type]] = {}
    for kind, subject in streams.LOG_SUBJECTS.items():
        log.setdefault(subject, []).append(kind)
    operation = "{tenant}.{job}.{deployment}.{slot}"
    return [
        Channel(
            "operation",
            f"{prefix}.op.{operation}",
            "controller → router, WPG leader; one message a subject, the first wins; the answer is "
            "JetStream's acknowledgement",
            (Operation,),
        ),
        Channel(
            "outcome",
            f"{prefix}.out.{operation}",
            "the mesh → controller: the outcome that was stored",
            (Completion,),
        ),
        Channel(
            "progress",
            f"{prefix}.out.{operation}.progress",
            "WPG leader → controller: how far a long operation is; not stored",
            (Progress,),
        ),
        *(
            Channel(
                f"api.{call}",
                f"{prefix}.api.{{tenant}}.{call}",
                f"request and reply: {request.__name__} → {answer.__name__} or ApiError",
                (request, answer, api.ApiError),
            )
            for call, (request, answer) in _API.items()
        ),
        Channel(
            "done",
            f"{prefix}.done.{operation}",
            "WPG leader, scheduler → DONE; republished as the outcome",
            (Completion,),
        ),
        *(
            Channel(
                subject.removeprefix(f"{prefix}."),
                subject,
                "the decision log: everything that the scheduler decides on",
                tuple(kinds),
            )
            for subject, kinds in log.items()
        ),
        Channel(
            "permit",
            f"{prefix}.permit.{{node}}",
            "scheduler → agent: every command to a node",
            get_args(Command),
        ),
        Channel(
            "state",
            f"{prefix}.state.{{node}}",
            "request and reply: an empty message → StatusReport, what the node's state manager has",
            (StatusReport,),
        ),
        Channel(
            "checkpoint",
            f"{prefix}.checkpoint.{{node}}",
            "request and reply: router → agent, of the checkpoints that the node's disk has",
            (*get_args(NodeCheckpointRequest), *get_args(NodeCheckpointReply)),
        ),
        Channel(
            "wpg",
            f"{prefix}.wpg.{{node}}",
            "request and reply: agents of the nodes of one WPG, of one another's ranks",
            (*get_args(NodeRequest), *get_args(NodeReply)),
        ),
        *(
            Channel(
                f"node.{call}",
                streams.node_subject(call),
                f"request and reply, of operators: {request.__name__} → {answer.__name__} or "
                "ApiError",
                (request, answer, api.ApiError),
            )
            for call, (request, answer) in _NODE_API.items()
        ),
        Channel(
            "seals",
            f"$KV.{streams.Bucket.SEALS}.{{tenant}}.{{job}}.{{deployment}}",
            "agents: the commit record of a deployment's newest seal, by compare and swap",
            (SealRecord,),
        ),
        Channel(
            "models",
            f"$KV.{streams.Bucket.MODELS}.{{name}}",
            "operator → job API: a registered model; in the name, `=2F` stands for `/`, `=2E` for "
            "`.` and `=3A` for `:`",
            (RegisteredModel,),
        ),
        Channel(
            "event",
            f"{prefix}.event.{{source}}",
            "all → people; nothing is decided on it",
            (Notice,),
        ),
    ]


def json_schema() -> dict[str, Any]:
    """Every type that crosses the bus, by name, under `$defs`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Phaseloom's message contract",
        "version": VERSION,
        "$defs": _components(_REFERENCE),
    }


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3.0 document of every subject. A message that the mesh publishes is an action
    `send`."""
    described = channels()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Phaseloom",
            "version": VERSION,
            "description": "Operations, decision log, permits and completions over NATS JetStream.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {
            channel.name: {
                "address": channel.address,
                "description": channel.description,
                "parameters": {name: {} for name in _parameters(channel.address)},
                "messages": {
                    kind.__name__: {"$ref": f"#/components/messages/{kind.__name__}"}
                    for kind in channel.kinds
                },
            }
            for channel in described
        },
        "operations": {
            channel.name: {
                "action": "receive" if _is_from_tenant(channel) else "send",
                "channel": {"$ref": f"#/channels/{channel.name.replace('/', '~1')}"},
            }
            for channel in described
        },
        "components": {
            "messages": {
                kind.__name__: {
                    "contentType": "application/json",
                    "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
                }
                for kind in _kinds(described)
            },
            "schemas": _components("#/components/schemas/{name}"),
        },
    }


def _is_from_tenant(channel: Channel) -> bool:
    return channel.name == "operation" or channel.name.startswith("api.")


def _parameters(address: str) -> list[str]:
    return [part[1:-1] for part in address.split(".") if part.startswith("{")]


def _kinds(described: Iterable[Channel]) -> list[type]:
    kinds = {kind.__name__: kind for channel in described for kind in channel.kinds}
    return [kinds[name] for name in sorted(kinds)]


def _components(reference: str) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_kinds(channels()), ref_template=reference)
    return {name: components[name] for name in sorted(components)}


DOCUMENTS = {"messages.schema.json": json_schema, "asyncapi.json": asyncapi}


def render(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, make in DOCUMENTS.items():
        (DIRECTORY / name).write_text(render(make()))
