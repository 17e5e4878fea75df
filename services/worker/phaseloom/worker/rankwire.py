"""The node-local protocol between an agent and its ranks, over the agent's Unix socket."""

from __future__ import annotations

import msgspec

from phaseloom.common.errors import ErrorInfo
from phaseloom.common.ids import DeploymentKey
from phaseloom.common.messages import DeploymentSpec, Message, Permit
from phaseloom.common.statewire import Done, Failed


class RankConfig(msgspec.Struct, frozen=True):
    """What a rank is started with, as JSON on its only argument."""

    token: str
    """Per spawn, bound to this deployment and incarnation."""
    deployment: DeploymentKey
    incarnation: int
    spec: DeploymentSpec
    node: str
    device: int
    agent_socket: str
    state_socket: str
    checkpoint_root: str


class RankUp(Message, frozen=True):
    """rank → agent, its first call: its state is in host memory. Answer: Done."""

    token: str
    state_bytes: int
    applied: int


class RankFailed(Message, frozen=True):
    """rank → agent, instead of RankUp: it will exit. Answer: Done."""

    token: str
    error: ErrorInfo


class RunPermit(Message, frozen=True):
    """agent → leader. Answer: Done, once the outcome is stored and in the decision log."""

    permit: Permit
    traceparent: str


RankMessage = RankUp | RankFailed | RunPermit | Done | Failed
