"""Decide whether a command still applies, from the incarnations and epochs that it names. Pure.

A node may receive a command twice (redelivered, or sent by two schedulers that both believe they
lead) or late (sent to an earlier agent of the node, a replaced incarnation, or a closed
activation). Late commands are dropped. A permit that arrives before its activation is put back.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import CommandId

REMEMBERED_COMMANDS = 10_000
REMEMBERED_CANCELS = 1_000


class PermitVerdict(Enum):
    ACCEPT = auto()
    STALE = auto()
    """The command addresses an earlier agent, incarnation or epoch, or was already accepted."""
    EARLY = auto()
    """The permit's activation has not been opened on this node yet."""


class AcceptedCommands:
    """The ids of the newest commands that this agent has carried out."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __contains__(self, id: CommandId) -> bool:
        return (id.sequence, id.index) in self._ids

    def forget(self, id: CommandId) -> None:
        """Remove a command that had no effect after all and will be delivered again."""
        self._ids.pop((id.sequence, id.index), None)

    def add(self, id: CommandId) -> None:
        self._ids[(id.sequence, id.index)] = None
        while len(self._ids) > REMEMBERED_COMMANDS:
            self._ids.popitem(last=False)


class CancelledOperations:
    """The most recently cancelled operations.

    A cancel may arrive before the permit of its operation. May be read from any thread.
    """

    def __init__(self) -> None:
        self._keeps_partial: OrderedDict[OperationKey, bool] = OrderedDict()
        self._has_all = False

    def __contains__(self, key: OperationKey) -> bool:
        return self._has_all or key in self._keeps_partial

    def keeps_partial(self, key: OperationKey) -> bool:
        """Whether a cancelled operation should complete with the tokens that it has."""
        return self._keeps_partial.get(key, False)

    def add_all(self) -> None:
        """Treat every operation as cancelled from now on, because nobody waits for the
        results."""
        self._keeps_partial.clear()
        self._has_all = True

    def add(self, key: OperationKey, *, keeps_partial: bool = False) -> None:
        """Record a cancel. A cancel that discards the result overrides one that keeps a partial
        result."""
        keeps = keeps_partial and self._keeps_partial.get(key, True)
        self._keeps_partial[key] = keeps
        while len(self._keeps_partial) > REMEMBERED_CANCELS:
            self._keeps_partial.popitem(last=False)


def judge_permit(
    *, incarnation: int, epoch: int, opened_incarnation: int, opened_epoch: int, refused_epoch: int
) -> PermitVerdict:
    """Compare a permit with the newest activations of its deployment on this node.

    Args: opened_epoch: the epoch of the newest activation opened here.
          refused_epoch: the epoch of the newest activation refused here.
    """
    if incarnation != opened_incarnation or epoch == refused_epoch:
        return PermitVerdict.STALE
    if epoch == opened_epoch:
        return PermitVerdict.ACCEPT
    return PermitVerdict.EARLY if epoch > opened_epoch else PermitVerdict.STALE
