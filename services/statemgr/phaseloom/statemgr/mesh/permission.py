"""Permission to read weights versions and state files: other nodes may have those that a ticket of
the scheduler grants them."""

from __future__ import annotations

from collections import OrderedDict

from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.transport.tickets import is_genuine
from phaseloom.statemgr.residency.incarnations import Wpg

_MAX_DEPLOYMENTS = 4096
_REMEDY = "send the sync_weights again: its permit brings a ticket for this version and node"
_FILES_REMEDY = "the scheduler's next command brings another one"


class Gate:
    """Checks tickets. A ticket is good until one of a later incarnation of the same deployment is
    seen here."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._readers: OrderedDict[DeploymentKey, int] = OrderedDict()
        """The newest incarnation seen of each reader of versions, in order of the last check."""
        self._owners: OrderedDict[DeploymentKey, int] = OrderedDict()
        """The newest incarnation seen of each deployment whose files were asked for, in the order
        of the last check."""

    def check(self, ticket: Ticket | None, version: VersionKey, node: str) -> None:
        """Check that a ticket lets a node read a version.

        Args:   node: the node that asks, by its certificate.
        Raises: CallerError: PERMISSION_DENIED, and why.
        """
        if ticket is None:
            raise _denied(f"node {node!r} asks for version {version} without a ticket")
        self._check_genuine(ticket, node, _REMEDY)
        if ticket.version != version:
            raise _denied(f"a ticket for version {ticket.version}, not {version}")
        if ticket.reader.job_key != version.policy.job_key:
            raise _denied(f"{ticket.reader} is of another job than version {version}")
        _check_node(ticket, node, _REMEDY)
        _check_incarnation(self._readers, ticket.reader, ticket.incarnation, _REMEDY)

    def check_files(self, ticket: FilesTicket, deployment: DeploymentKey, node: str) -> None:
        """Check that a ticket lets a node have a deployment's state files.

        Args:   node: the node that is to get the files.
        Raises: CallerError: PERMISSION_DENIED, and why.
        """
        self._check_genuine(ticket, node, _FILES_REMEDY)
        if ticket.deployment != deployment:
            raise _denied(f"a ticket for {ticket.deployment}, not {deployment}", _FILES_REMEDY)
        _check_node(ticket, node, _FILES_REMEDY)
        _check_incarnation(self._owners, deployment, ticket.incarnation, _FILES_REMEDY)

    def _check_genuine(self, ticket: Ticket | FilesTicket, node: str, remedy: str) -> None:
        if not is_genuine(ticket, self._secret):
            raise _denied(
                f"the ticket of node {node!r} is not signed by this mesh's scheduler", remedy
            )


def check_reader(wpg: Wpg, version: VersionKey, ticket: Ticket | None) -> None:
    """Check that a deployment on this node may read a version, and shows its own ticket or none.

    Raises: CallerError: PERMISSION_DENIED: the version is of another job, or the ticket of another
            deployment or incarnation; INVALID_ARGUMENT: a bad name.
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


def _check_node(ticket: Ticket | FilesTicket, node: str, remedy: str) -> None:
    if node not in ticket.nodes:
        raise _denied(
            f"a ticket of node {' and '.join(ticket.nodes)} shown by node {node!r}", remedy
        )


def _check_incarnation(
    newest: OrderedDict[DeploymentKey, int], key: DeploymentKey, incarnation: int, remedy: str
) -> None:
    if incarnation < newest.get(key, 0):
        raise _denied(
            f"a ticket of incarnation {incarnation} of {key}, which is at {newest[key]}", remedy
        )
    newest[key] = incarnation
    newest.move_to_end(key)
    while len(newest) > _MAX_DEPLOYMENTS:
        newest.popitem(last=False)


def _denied(why: str, remedy: str = _REMEDY) -> CallerError:
    return CallerError(why, code=Code.PERMISSION_DENIED, field="ticket", remedy=remedy)
