"""Permission to read weights versions and state files. Other nodes may read those for which the
scheduler gave them a ticket."""

from __future__ import annotations

from collections import OrderedDict

from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, VersionKey, check_name
from phaseloom.common.transport.tickets import is_genuine
from phaseloom.statemgr.records.incarnations import Wpg

_MAX_DEPLOYMENTS = 8192
_REMEDY = "send the sync_weights again: its permit brings a ticket for this version and node"
_FILES_REMEDY = "the scheduler's next command brings another one"


class Gate:
    """Checks tickets. A ticket is valid until one of a later incarnation of the same deployment was
    seen here."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._newest: OrderedDict[tuple[type, DeploymentKey], int] = OrderedDict()
        """Newest incarnation seen of each deployment, in order of the last check. Readers of
        versions and owners of files are counted separately."""

    def check(self, ticket: Ticket | None, version: VersionKey, node: str) -> None:
        """Check that a ticket lets a node read a version.

        Args:   node: the requesting node, from its certificate.
        Raises: CallerError: PERMISSION_DENIED, with the reason.
        """
        if ticket is None:
            raise _denied(f"node {node!r} asks for version {version} without a ticket")
        refusal = ""
        if ticket.version != version:
            refusal = f"a ticket for version {ticket.version}, not {version}"
        elif ticket.reader.tenant != version.policy.tenant:
            refusal = f"{ticket.reader} is of another tenant than version {version}"
        self._check(ticket, ticket.reader, node, refusal, _REMEDY)

    def check_files(self, ticket: FilesTicket, deployment: DeploymentKey, node: str) -> None:
        """Check that a ticket lets a node have a deployment's state files.

        Args:   node: the node that will receive the files.
        Raises: CallerError: PERMISSION_DENIED, with the reason.
        """
        is_same = ticket.deployment == deployment
        refusal = "" if is_same else f"a ticket for {ticket.deployment}, not {deployment}"
        self._check(ticket, deployment, node, refusal, _FILES_REMEDY)

    def _check(
        self, ticket: Ticket | FilesTicket, key: DeploymentKey, node: str, refusal: str, remedy: str
    ) -> None:
        """Check what all tickets have in common.

        Args: refusal: the reason to refuse even a genuine ticket; empty: none.
        """
        newest = self._newest.get((type(ticket), key), 0)
        if not is_genuine(ticket, self._secret):
            refusal = f"the ticket of node {node!r} is not signed by this mesh's scheduler"
        elif not refusal and node not in ticket.nodes:
            refusal = f"a ticket of node {' and '.join(ticket.nodes)} shown by node {node!r}"
        elif not refusal and ticket.incarnation < newest:
            refusal = f"a ticket of incarnation {ticket.incarnation} of {key}, which is at {newest}"
        if refusal:
            raise _denied(refusal, remedy)
        self._newest[type(ticket), key] = ticket.incarnation
        self._newest.move_to_end((type(ticket), key))
        while len(self._newest) > _MAX_DEPLOYMENTS:
            self._newest.popitem(last=False)


def check_reader(wpg: Wpg, version: VersionKey, ticket: Ticket | None) -> None:
    """Check that a deployment on this node may read a version, and shows its own ticket or none.

    Raises: CallerError: PERMISSION_DENIED: the version belongs to another tenant, or the ticket to
            another deployment or incarnation; INVALID_ARGUMENT: a bad name.
    """
    if version.policy.tenant != wpg.key.tenant:
        raise CallerError(
            f"{wpg} may not read version {version} of another tenant",
            code=Code.PERMISSION_DENIED,
            field="version",
        )
    check_name(version.policy.job, "version.policy")
    check_name(version.policy.deployment, "version.policy")
    reader = (wpg.key, wpg.incarnation)
    if ticket is not None and (ticket.reader, ticket.incarnation) != reader:
        raise _denied(
            f"a ticket of {ticket.reader} incarnation {ticket.incarnation} shown by {wpg}"
        )


def _denied(reason: str, remedy: str = _REMEDY) -> CallerError:
    return CallerError(reason, code=Code.PERMISSION_DENIED, field="ticket", remedy=remedy)
