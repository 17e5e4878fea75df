"""Answers those who look into this node, over the bus: what its state manager holds."""

from __future__ import annotations

import logging

from nats.aio.msg import Msg

from phaseloom.common.contract.codec import encode
from phaseloom.common.contract.errors import PhaseloomError
from phaseloom.common.contract.ids import NodeId
from phaseloom.common.contract.streams import state_subject
from phaseloom.common.transport.bus import Bus
from phaseloom.worker.agentstate import AgentStateClient

log = logging.getLogger(__name__)


async def serve_state(bus: Bus, node: NodeId, state: AgentStateClient) -> None:
    """Until the bus is closed. Requests are answered one after another."""

    async def answer(message: Msg) -> None:
        try:
            report = await state.status()
        except PhaseloomError as error:
            # Whoever asked gives up by itself.
            log.warning("what is on %s cannot be told: %s", node, error)
            return
        await message.respond(encode(report))

    await bus.client.subscribe(state_subject(node), cb=answer)
