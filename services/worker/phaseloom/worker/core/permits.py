"""Judgement of a command, by the incarnations and epochs that it names: is it still meant? Pure.

A node's commands may come twice (redelivered, or from two schedulers that both lead) and late (for
an earlier agent of the node, an incarnation that was replaced, an activation that was closed). Late
ones are dropped. A permit that overtook its activation is put back.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

from phaseloom.common.contract.ids import OperationKey
from phaseloom.common.contract.specs import CommandId

REMEMBERED_COMMANDS = 10_000
REMEMBERED_CANCELS = 1_000


class Verdict(Enum):
    TAKE = auto()
    STALE = auto()
    """The command is meant for an agent, incarnation or epoch that is over, or was taken
    already."""
    EARLY = auto()
    """The permit's activation has not been opened here yet."""


class TakenCommands:
    """The ids of the newest commands that took effect under this agent."""

    def __init__(self) -> None:
        self._taken: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __contains__(self, id: CommandId) -> bool:
        return (id.sequence, id.index) in self._taken

    def forget(self, id: CommandId) -> None:
        """Forget a command that did not take effect after all, and will come again."""
        self._taken.pop((id.sequence, id.index), None)

    def add(self, id: CommandId) -> None:
        self._taken[(id.sequence, id.index)] = None
        while len(self._taken) > REMEMBERED_COMMANDS:
            self._taken.popitem(last=False)


class Cancelled:
    """The operations that were cancelled last, whether they run or are yet to come: a cancel may
    overtake its permit. Any thread may ask."""

    def __init__(self) -> None:
        self._keeps_partial: OrderedDict[OperationKey, bool] = OrderedDict()
        self._has_all = False

    def __contains__(self, key: OperationKey) -> bool:
        return self._has_all or key in self._keeps_partial

    def keeps_partial(self, key: OperationKey) -> bool:
        """Whether the operation was cancelled, and completes with the tokens that it has by
        then."""
        return self._keeps_partial.get(key, False)

    def add_all(self) -> None:
        """Count every operation as cancelled from now on, because nobody waits for any."""
        self._keeps_partial.clear()
        self._has_all = True

    def add(self, key: OperationKey, *, keeps_partial: bool = False) -> None:
        """Note a cancel. A cancel that wants no result outweighs one that wants a partial
        result."""
        wants = keeps_partial and self._keeps_partial.get(key, True)
        self._keeps_partial[key] = wants
        while len(self._keeps_partial) > REMEMBERED_CANCELS:
            self._keeps_partial.popitem(last=False)


def judge_permit(
    *, incarnation: int, epoch: int, own_incarnation: int, own_epoch: int, refused_epoch: int
) -> Verdict:
    """Judge a permit by the newest activations of its deployment on this node.

    Args: own_epoch: the epoch of the newest activation opened here.
          refused_epoch: the epoch of the newest activation refused here.
    """
    if incarnation != own_incarnation or epoch == refused_epoch:
        return Verdict.STALE
    if epoch == own_epoch:
        return Verdict.TAKE
    return Verdict.EARLY if epoch > own_epoch else Verdict.STALE
