"""Who of other nodes may have which weights version: whoever a permit's ticket names."""

from __future__ import annotations

from collections import OrderedDict

from phaseloom.common.contract.commands import Ticket
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.transport.tickets import is_genuine
from phaseloom.statemgr.residency.residency import Wpg

_MAX_READERS = 4096
_REMEDY = "send the sync_weights again: its permit brings a ticket for this version and node"


class Gate:
    """Checks tickets. One is good for as long as no later life of its reader has come here."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._lives: OrderedDict[DeploymentKey, int] = OrderedDict()
        """The newest incarnation that was seen of each reader; those seen longest ago go."""

    def check(self, ticket: Ticket | None, version: VersionKey, node: str) -> None:
        """Args:   node: of who asks, by its certificate.
        Raises: CallerError: PERMISSION_DENIED, and why.
        """
        if ticket is None:
            raise _denied(f"node {node!r} asks for version {version} without a ticket")
        if not is_genuine(ticket, self._secret):
            raise _denied(f"the ticket of node {node!r} is not signed by this mesh's scheduler")
        if ticket.version != version:
            raise _denied(f"a ticket for version {ticket.version}, not {version}")
        if ticket.reader.job_key != version.policy.job_key:
            raise _denied(f"{ticket.reader} is of another job than version {version}")
        if node not in ticket.nodes:
            raise _denied(f"a ticket of node {' and '.join(ticket.nodes)} shown by node {node!r}")
        newest = self._lives.get(ticket.reader, 0)
        if ticket.incarnation < newest:
            raise _denied(
                f"a ticket of incarnation {ticket.incarnation} of {ticket.reader}, "
                f"which is at {newest}"
            )
        self._lives[ticket.reader] = ticket.incarnation
        self._lives.move_to_end(ticket.reader)
        while len(self._lives) > _MAX_READERS:
            self._lives.popitem(last=False)


def check_reader(wpg: Wpg, version: VersionKey, ticket: Ticket | None) -> None:
    """Whether a deployment on this node may read a version, and shows its own ticket or none.

    Raises: CallerError: PERMISSION_DENIED: the version is of another job, or the ticket of another
            deployment or life. INVALID_ARGUMENT: a bad name.
    """
    if version.policy.job_key != wpg.key.job_key:
        raise CallerError(
            f"{wpg} cannot read version {version} of another job",
            code=Code.PERMISSION_DENIED,
            field="version",
        )
    check_name(version.policy.deployment, "version.policy")
    mine = (wpg.key, wpg.incarnation)
    if ticket is not None and (ticket.reader, ticket.incarnation) != mine:
        raise _denied(
            f"a ticket of {ticket.reader} incarnation {ticket.incarnation} shown by {wpg}"
        )


def _denied(why: str) -> CallerError:
    return CallerError(why, code=Code.PERMISSION_DENIED, field="ticket", remedy=_REMEDY)
