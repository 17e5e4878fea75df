"""Checkpoints on a node's disk: answer requests of routers and remove expired checkpoints."""

from __future__ import annotations

import asyncio
import logging

import nats.errors
from nats.aio.msg import Msg

from phaseloom.common.contract.checkpoints import (
    CheckpointRefused,
    EraseCheckpoint,
    NodeCheckpointReply,
    NodeCheckpointRequest,
)
from phaseloom.common.contract.codec import content_type_of, decode
from phaseloom.common.contract.errors import Code, PhaseloomError, ResourceError
from phaseloom.common.contract.ids import DeploymentKey, NodeId
from phaseloom.common.contract.streams import checkpoint_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.common.transport.services import answer_requests
from phaseloom.worker.agent.stateclient import AgentStateClient
from phaseloom.worker.state.lastcheckpoint import has_ended, last_checkpoint, needed_error

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0


async def serve_checkpoints(bus: Bus, node: NodeId, state: AgentStateClient) -> None:
    """Answer requests of routers concurrently, until cancelled."""

    async def answer(request: NodeCheckpointRequest) -> NodeCheckpointReply:
        if isinstance(request, EraseCheckpoint):
            await _check_not_needed(bus, request.deployment, request.name)
        return await state.checkpoints(request)

    async def reply(message: Msg) -> NodeCheckpointReply:
        try:
            request: NodeCheckpointRequest = decode(
                message.data, NodeCheckpointRequest, content_type_of(message.headers)
            )
            return await answer(request)
        except PhaseloomError as error:
            return CheckpointRefused(error.info)
        except nats.errors.Error as error:
            return CheckpointRefused(ResourceError(f"the bus failed: {error!r}").info)

    await answer_requests(bus.client, checkpoint_subject(node), reply)


async def remove_expired(
    bus: Bus, state: AgentStateClient, look_every_s: float = _LOOK_EVERY_S
) -> None:
    """Remove checkpoints whose time to live has passed, until cancelled.

    A checkpoint that its job may fall back to stays until it is no longer needed. All nodes that
    share a checkpoint root look for expired checkpoints; the first to take the name away removes
    the checkpoint.
    """
    while True:
        try:
            for expired in (await state.expired_checkpoints()).checkpoints:
                await _remove_expired(bus, state, expired.deployment, expired.name)
        except (PhaseloomError, nats.errors.Error) as error:
            log.warning("cannot list expired checkpoints: %s", error)
        await asyncio.sleep(look_every_s)


async def _remove_expired(bus: Bus, state: AgentStateClient, key: DeploymentKey, name: str) -> None:
    try:
        await _check_not_needed(bus, key, name)
        await state.checkpoints(EraseCheckpoint(key, name, if_expired=True))
    except PhaseloomError as error:
        # NOT_FOUND: another node has removed it. FAILED_PRECONDITION: it is needed or was renewed.
        is_usual = error.info.code in (Code.NOT_FOUND, Code.FAILED_PRECONDITION)
        log.log(
            logging.DEBUG if is_usual else logging.WARNING,
            "expired checkpoint %s of %s not removed: %s",
            name,
            key,
            error,
        )


async def _check_not_needed(bus: Bus, key: DeploymentKey, name: str) -> None:
    """Check that a checkpoint may be removed.

    Raises: CallerError: FAILED_PRECONDITION: the job may fall back to it.
    """
    last = await last_checkpoint(bus, key.job_key)
    is_last = last is not None and last.checkpoints.get(key.deployment) == name
    if is_last and not await has_ended(bus, key.job_key):
        raise needed_error(name)
