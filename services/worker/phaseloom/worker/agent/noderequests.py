"""Requests from other nodes' agents with ranks of the same WPG. `nodes` is the sending side."""

from __future__ import annotations

from functools import partial

from phaseloom.common.contract.agents import (
    CallRoll,
    CancelPart,
    FindStore,
    IncarnationOver,
    NodeReply,
    NodeRequest,
    NotYet,
    Present,
    StoreFound,
    TakePart,
)
from phaseloom.common.contract.errors import Code, ErrorInfo, ResourceError
from phaseloom.common.contract.kinds import MUTATING_KINDS
from phaseloom.common.transport.bus import Bus
from phaseloom.worker.agent.activations import span_of
from phaseloom.worker.agent.nodes import IncarnationEnded, with_payloads
from phaseloom.worker.agent.wpg import LocalWpg
from phaseloom.worker.agent.wpgs import Wpgs
from phaseloom.worker.rank.wire import RunShare, SharesDone


class NodeRequests:
    def __init__(self, wpgs: Wpgs, bus: Bus) -> None:
        self._wpgs = wpgs
        self._bus = bus

    async def answer(self, request: NodeRequest) -> NodeReply:
        """Answer the agent of another node."""
        if isinstance(request, CancelPart):
            key = request.operation.deployment_key
        else:
            key = request.deployment
        wpg = self._wpgs.get(key, request.incarnation)
        if isinstance(request, FindStore):
            address = wpg.store_address if wpg is not None else ""
            return StoreFound(address) if address else NotYet()
        if wpg is None:
            incarnation = request.incarnation
            return IncarnationOver(
                ErrorInfo(Code.UNAVAILABLE, f"incarnation {incarnation} of {key} is over")
            )
        if wpg.is_killed:
            await wpg.ended()
            return IncarnationOver(wpg.reason)
        match request:
            case TakePart():
                return await wpg.answer_share(request, partial(self._run_share, wpg))
            case CallRoll():
                try:
                    await wpg.roll_call_locally()
                except IncarnationEnded as error:
                    return IncarnationOver(error.info)
            case CancelPart():
                await wpg.cancel_locally(request.operation, keeps_partial=request.keeps_partial)
        return Present()

    async def _run_share(self, wpg: LocalWpg, share: RunShare) -> SharesDone:
        """Run this node's ranks' share of a call whose leader is on another node.

        The share takes the deployment's lock here, just as the operation takes it on the leader's
        node.
        Raises: IncarnationEnded; PhaseloomError: a rank failed.
        """
        permit, lock = share.permit, self._wpgs.locks[wpg.deployment]
        if permit.kind == "save_state" and not share.prepares:
            # The state is already copied, so the files are written while other operations run.
            return await wpg.share_locally(await with_payloads(self._bus, share))
        await wpg.until_sealed(permit.sealing)
        is_mutating = permit.kind in MUTATING_KINDS
        async with lock.write() if is_mutating else lock.read():
            if permit.epoch != wpg.epoch:
                raise ResourceError(
                    f"{permit.operation} requires epoch {permit.epoch}, got epoch {wpg.epoch}",
                    code=Code.ABORTED,
                )
            wpg.last_span = span_of(share.traceparent)
            return await wpg.share_locally(await with_payloads(self._bus, share))
