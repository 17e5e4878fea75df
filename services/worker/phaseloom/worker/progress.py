"""Tells how far each `generate` of a leader is; nothing is decided on it."""

from __future__ import annotations

import asyncio
import logging

import nats.errors

from phaseloom.common.contract import streams
from phaseloom.common.contract.codec import CONTENT_TYPE, MSGPACK, encode
from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.operations import Progress
from phaseloom.common.transport.bus import Bus
from phaseloom.worker.device import Call, DeviceQueue

log = logging.getLogger(__name__)

PROGRESS_S = 0.5
"""Between two words on how far a `generate` is."""


async def report(bus: Bus, queue: DeviceQueue) -> None:
    """For ever."""
    told: dict[OperationKey, int] = {}
    while True:
        await asyncio.sleep(PROGRESS_S)
        calls = [call for call in queue.running if call.num_total]
        for call in calls:
            if told.get(call.key) != call.num_done:
                await _publish(bus, call)
        told = {call.key: call.num_done for call in calls}


async def _publish(bus: Bus, call: Call) -> None:
    progress = Progress(call.key, call.num_done, call.num_total)
    try:
        await bus.client.publish(
            streams.progress_subject(call.key),
            encode(progress),
            headers={CONTENT_TYPE: MSGPACK},
        )
    except nats.errors.Error as error:
        log.debug("no progress of %s is told: %r", call.key, error)
