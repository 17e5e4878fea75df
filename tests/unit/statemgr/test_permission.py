"""Tickets: what is signed is what is permitted, and a later incarnation ends the earlier one's."""

from __future__ import annotations

import msgspec
import pytest

from phaseloom.common.contract.commands import FilesTicket, Ticket
from phaseloom.common.contract.errors import CallerError, Code
from phaseloom.common.contract.ids import DeploymentKey, VersionKey
from phaseloom.common.contract.state_agent import RegisterWpg
from phaseloom.common.transport.tickets import is_genuine, signed
from phaseloom.statemgr.records.incarnations import Wpg
from phaseloom.statemgr.records.residency import Residency
from phaseloom.statemgr.transfer.permission import Gate, check_reader

POLICY = DeploymentKey("acme", "sums", "policy")
SAMPLER = DeploymentKey("acme", "sums", "sampler")
VERSION = VersionKey(POLICY, 7)
GOOD = signed(Ticket(VERSION, SAMPLER, 3, ["a", "b"]), "secret")


def test_signature_covers_everything_and_needs_the_secret() -> None:
    assert is_genuine(GOOD, "secret")
    assert signed(msgspec.structs.replace(GOOD, mac=b""), "secret") == GOOD
    assert not is_genuine(GOOD, "another")
    for change in (
        {"version": VersionKey(POLICY, 8)},
        {"version": VersionKey(POLICY, 7, "0of2")},
        {"reader": POLICY},
        {"incarnation": 4},
        {"nodes": ["a", "b", "c"]},
        {"nodes": ["ab"]},
        {"mac": b""},
    ):
        assert not is_genuine(msgspec.structs.replace(GOOD, **change), "secret"), change


@pytest.mark.parametrize(
    ("ticket", "version", "node", "says"),
    [
        (None, VERSION, "a", "without a ticket"),
        (msgspec.structs.replace(GOOD, incarnation=9), VERSION, "a", "not signed"),
        (GOOD, VersionKey(POLICY, 8), "a", "not acme.sums.policy.8"),
        (GOOD, VERSION, "c", "shown by node 'c'"),
        (GOOD, VERSION, "", "shown by node ''"),
        (
            signed(Ticket(VERSION, DeploymentKey("globex", "sums", "s"), 1, ["a"]), "secret"),
            VERSION,
            "a",
            "is of another tenant",
        ),
    ],
)
def test_gate_says_why_not(
    ticket: Ticket | None, version: VersionKey, node: str, says: str
) -> None:
    with pytest.raises(CallerError, match=says) as caught:
        Gate("secret").check(ticket, version, node)
    assert caught.value.info.code is Code.PERMISSION_DENIED
    assert caught.value.info.remedy


def test_ticket_lasts_until_a_later_incarnation_of_its_reader() -> None:
    gate = Gate("secret")
    for node in ("a", "b", "a"):
        gate.check(GOOD, VERSION, node)
    other = signed(Ticket(VERSION, DeploymentKey("acme", "sums", "critic"), 9, ["a"]), "secret")
    gate.check(other, VERSION, "a")
    gate.check(GOOD, VERSION, "a")
    gate.check(signed(msgspec.structs.replace(GOOD, incarnation=4), "secret"), VERSION, "a")
    with pytest.raises(CallerError, match="which is at 4"):
        gate.check(GOOD, VERSION, "a")


def test_refused_ticket_ends_nobody_s() -> None:
    """A later incarnation counts only where everything else is right."""
    gate = Gate("secret")
    with pytest.raises(CallerError):
        gate.check(signed(msgspec.structs.replace(GOOD, incarnation=9), "guess"), VERSION, "a")
    with pytest.raises(CallerError):
        gate.check(signed(msgspec.structs.replace(GOOD, incarnation=9), "secret"), VERSION, "c")
    gate.check(GOOD, VERSION, "a")


def _wpg(key: DeploymentKey, incarnation: int) -> Wpg:
    residency = Residency([1])
    residency.register(RegisterWpg(["t"], key, incarnation, [0], 0))
    return residency.current(key, incarnation)


def test_a_reader_shows_its_own_ticket_or_none() -> None:
    check_reader(_wpg(SAMPLER, 3), VERSION, None)
    check_reader(_wpg(SAMPLER, 3), VERSION, GOOD)
    for reader, incarnation in ((SAMPLER, 2), (SAMPLER, 4), (POLICY, 3)):
        with pytest.raises(CallerError, match="shown by"):
            check_reader(_wpg(reader, incarnation), VERSION, GOOD)
    with pytest.raises(CallerError, match="of another tenant"):
        check_reader(_wpg(DeploymentKey("globex", "sums", "s"), 1), VERSION, None)


def test_files_go_to_the_nodes_of_a_ticket_until_a_later_incarnation_asks() -> None:
    gate = Gate("secret")
    good = signed(FilesTicket(POLICY, 3, ["a", "b"]), "secret")
    gate.check_files(good, POLICY, "b")
    later = signed(FilesTicket(POLICY, 4, ["a"]), "secret")
    for ticket, deployment, node, says in (
        (signed(good, "another"), POLICY, "a", "is not signed"),
        (good, SAMPLER, "a", "a ticket for"),
        (good, POLICY, "c", "shown by node 'c'"),
    ):
        with pytest.raises(CallerError, match=says) as caught:
            gate.check_files(ticket, deployment, node)
        assert caught.value.info.code is Code.PERMISSION_DENIED
    gate.check_files(later, POLICY, "a")
    with pytest.raises(CallerError, match="which is at 4"):
        gate.check_files(good, POLICY, "a")
    # Lives of readers are counted apart from incarnations of owners.
    gate.check(GOOD, VERSION, "a")
